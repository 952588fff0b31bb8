"""Traced: a module as an exported program, for batches of any size where the module allows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from weft.errors import SupernetError
from weft.supernet.layer import Carry, as_carry

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True, slots=True)
class Traced:
    """A program, the inputs that it is checked with (first the example), and which of them are a batch of any size.

    Where none is, `fixed` says why.
    """

    module: nn.Module
    program: ExportedProgram
    cases: tuple[Carry, ...]
    batched: tuple[bool, ...]
    fixed: str | None = None


def trace(module: nn.Module, example: Carry) -> Traced:
    """The program for any batch, else for that of the example; raises SupernetError if there is neither."""
    try:
        return _trace_any(module, example)
    except Exception as error:
        return trace_fixed(module, example, reason(error))


def trace_fixed(module: nn.Module, example: Carry, why: str) -> Traced:
    """The program for the shapes of the example alone, which is what `why` gives the reason for."""
    from torch.export import export

    try:
        program = _without_sources(export(module, _copies(example), strict=False))
    except Exception as error:
        raise SupernetError(
            f"torch.export cannot trace the module: {reason(error)}; formats=('safetensors',) writes its weights alone"
        ) from error
    return Traced(module, program, (example,), (False,) * len(example), why)


@contextmanager
def as_traced() -> Iterator[None]:
    """Within the block, modules compute what is traced of them, whatever the mode of the caller."""
    # nn.MultiheadAttention has a fused path for evaluation, of other rounding, that no exported program contains.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def outputs_of(module: nn.Module, inputs: Carry) -> Carry:
    """What the module gives for copies of these inputs."""
    return as_carry(module(*_copies(inputs)), "the module")


def identical(some: Carry, others: Carry) -> bool:
    """Whether the tensors are the same in number, type, shape and every bit."""

    def raw(value: Tensor) -> Tensor:  # bytes, since not-a-number does not equal itself
        return value.contiguous().reshape(-1).view(torch.uint8)

    return len(some) == len(others) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))
        for a, b in zip(some, others, strict=True)
    )


def reason(error: BaseException) -> str:
    """One sentence on what went wrong first; of several causes that torch lists, the first."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line.removeprefix("- ") for line in lines if line.startswith("- ")] or lines or [type(error).__name__]
    return told[0].partition(". ")[0].rstrip(".")[:300]


def _trace_any(module: nn.Module, example: Carry) -> Traced:
    if not example[0].dim():
        raise SupernetError("the first input has no dimensions, hence no batch")
    size = len(example[0])
    alike = [bool(value.dim()) and len(value) == size for value in example]
    program, lengths = _capture(module, example, alike)
    varies = [like and not length.isdigit() for like, length in zip(alike, lengths, strict=True)]
    if varies != alike:
        # An input that merely has the length of the batch, a square mask for example, is a constant to the module.
        # Unless it is traced as such, ONNX gets a dimension with the name "6" instead of the number.
        program, lengths = _capture(module, example, varies)
    batched = tuple(length == lengths[0] for length in lengths)
    more = tuple(torch.cat([v, v[:1]]) if like else v for v, like in zip(example, batched, strict=True))
    if not identical(outputs_of(program.module(), more), outputs_of(module, more)):
        raise SupernetError(f"with a batch of {size + 1} instead of {size} its outputs differ from those of the module")
    return Traced(module, program, (example, more), batched)


def _capture(module: nn.Module, example: Carry, varies: Sequence[bool]) -> tuple[ExportedProgram, list[str]]:
    """The program, and the length of each of its inputs: a symbol where it may vary, else a number."""
    from torch.export import Dim, export

    # The tracer takes a length of 1 for a constant, so a single row is doubled. Only the first input must vary.
    double = len(example[0]) == 1
    rows = tuple(torch.cat([v, v]) if double and like else v.clone() for v, like in zip(example, varies, strict=True))
    shapes = tuple({0: Dim.AUTO if i else Dim.DYNAMIC} if like else None for i, like in enumerate(varies))
    program = _without_sources(export(module, rows, dynamic_shapes=shapes, strict=False))
    taken = [node.meta["val"] for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    return program, [str(value.shape[0]) if value.dim() else "" for value in taken]


def _copies(inputs: Carry) -> Carry:
    """Tensors for one use, since a module may write to its inputs and the tracer leaves its marks on them."""
    return tuple(value.clone() for value in inputs)


def _without_sources(program: ExportedProgram) -> ExportedProgram:
    """The program less the lines and paths of the source files that its nodes came from."""
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)
    return program
