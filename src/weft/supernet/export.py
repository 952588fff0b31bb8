"""Export: a folder with a plain module as files that run without weft, and a description of how to call it."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weft.errors import SupernetError, install_extra, nearest
from weft.space import Subnet
from weft.supernet.layer import Activations, as_activations
from weft.utils.files import replacing_files, to_json
from weft.utils.imports import installed_version

if TYPE_CHECKING:
    from torch.export import ExportedProgram

FILES = MappingProxyType({"safetensors": "model.safetensors", "torch": "model.pt2", "onnx": "model.onnx"})
ABOUT = "model.json"
KEYS = ("dynamic_batch", "files", "inputs", "outputs", "versions")
"""The keys of model.json that export() writes itself."""

log = logging.getLogger("weft.supernet")


def export(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    folder: Path | str,
    formats: Sequence[str] = tuple(FILES),
    metadata: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Path]:
    """Write a plain module, such as `extract` gives; the paths by format, and that of model.json by "json".

    A copy of the module is exported, in evaluation mode on the CPU. Inputs as long as the first one are a batch, which
    may have any size in the programs where the module allows it. Elsewhere the size of the example is kept and the
    reason is logged. Every file is read again and run: the torch program gives the same outputs to the last bit, ONNX
    the same within float tolerance. model.json holds `metadata` and what is needed to call the module.

    Raises SupernetError if a format is unknown, a package is missing (before anything is written), the module cannot be
    exported or a check fails; then the folder is as it was.
    """
    formats = _check_formats(formats)
    about = _check_metadata(metadata)
    if isinstance(inputs, Tensor) or not inputs or not all(isinstance(value, Tensor) for value in inputs):
        raise SupernetError("export() takes a tuple of example tensors, one for each input of the module: (images,)")
    folder = Path(folder)
    with _export_mode():
        with _explained("the module cannot be exported with these inputs"):
            plain = copy.deepcopy(module).cpu().eval()
            example = tuple(value.detach().cpu().clone() for value in inputs)
            outputs = _outputs(plain, example)
        # A file that refers to others moves into the folder after them.
        with replacing_files(folder, last=(FILES["onnx"], ABOUT)) as temp:
            fixed = _write_formats(plain, example, temp, formats)
            programs = [name for name in formats if name != "safetensors"]
            about |= {
                "dynamic_batch": dict.fromkeys(programs, fixed is None),
                "files": {name: FILES[name] for name in formats},
                "inputs": _describe(_input_names(plain, len(example)), example),
                "outputs": _describe(_output_names(len(outputs)), outputs),
                "versions": {"torch": torch.__version__, "weft": installed_version("weft")},
            }
            (temp / ABOUT).write_text(json.dumps(about, sort_keys=True, indent=2, allow_nan=False) + "\n")
    for name in programs if fixed is not None else ():
        log.warning("%s takes batches of the size of the example only: %s", FILES[name], fixed)
    return {name: folder / FILES[name] for name in formats} | {"json": folder / ABOUT}


def _check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    formats = (formats,) if isinstance(formats, str) else tuple(dict.fromkeys(formats))
    for name in formats:
        if name not in FILES:
            raise SupernetError(f"unknown format '{name}'{nearest(str(name), FILES)}")
    if not formats:
        raise SupernetError(f"export() needs at least one format of {', '.join(FILES)}")
    for package in ("onnx", "onnxscript", "onnxruntime") if "onnx" in formats else ():
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise SupernetError(f"the format 'onnx' needs {package}: {install_extra('onnx')}") from error
    return formats


def _check_metadata(metadata: Mapping[str, Any]) -> Any:
    """The metadata in the types of JSON."""
    taken = sorted(set(KEYS) & set(metadata))
    if taken:
        raise SupernetError(f"the key '{taken[0]}' of {ABOUT} is written by export() itself: choose another one")

    def plain(value: Any) -> Any:
        return value.to_json() if isinstance(value, Subnet) else to_json(value)

    with _explained(f"the metadata cannot be written to {ABOUT}"):
        return json.loads(json.dumps(dict(metadata), allow_nan=False, default=plain))


def _describe(names: Sequence[str], values: Activations) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in zip(names, values, strict=True)
    ]


def _input_names(module: nn.Module, count: int) -> list[str]:
    """The names of the first arguments of the module's forward, or numbered ones where it names fewer."""
    names = [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return names[:count] if len(names) >= count else [f"input_{i}" for i in range(count)]


def _output_names(count: int) -> list[str]:
    return ["output"] if count == 1 else [f"output_{i}" for i in range(count)]


@contextmanager
def _export_mode() -> Iterator[None]:
    """Within the block, modules compute what an exported program contains, whatever the mode of the caller.

    Drops warnings, what is logged below an error, and what exporters print.
    """
    # nn.MultiheadAttention has a fused path for evaluation, of other rounding, that no exported program contains.
    fast, disabled = torch.backends.mha.get_fastpath_enabled(), logging.root.manager.disable
    torch.backends.mha.set_fastpath_enabled(False)
    logging.disable(logging.WARNING)
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            warnings.catch_warnings(),
            redirect_stderr(io.StringIO()),  # torch.export prints graphs that it refuses
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _explained(problem: str, advice: str = "") -> Iterator[None]:
    """Turns whatever fails in the block into a SupernetError that says what it means."""
    try:
        yield
    except Exception as error:
        raise SupernetError(f"{problem}: {_reason(error)}{advice}") from error


def _reason(error: BaseException) -> str:
    """One sentence on the first cause; of several causes that torch lists, the first."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line.removeprefix("- ") for line in lines if line.startswith("- ")] or lines or [type(error).__name__]
    return causes[0].partition(". ")[0].rstrip(".")[:300]


# The module as a torch.export program, for batches of any size where the module allows it.


@dataclass(frozen=True, slots=True)
class _Exported:
    """A program, the inputs that it is checked with (first the example), and which of them are a batch of any size.

    Where none is, `fixed` says why.
    """

    module: nn.Module
    program: ExportedProgram
    cases: tuple[Activations, ...]
    batched: tuple[bool, ...]
    fixed: str | None = None


def _trace(module: nn.Module, example: Activations) -> _Exported:
    """The program for any batch, else for that of the example; raises SupernetError if there is neither."""
    from torch.export import export

    try:
        return _trace_any(module, example)
    except Exception as error:
        why = _reason(error)
    with _explained("torch.export cannot trace the module", "; formats=('safetensors',) writes its weights alone"):
        program = _without_sources(export(module, _copies(example), strict=False))
    return _Exported(module, program, (example,), (False,) * len(example), why)


def _trace_any(module: nn.Module, example: Activations) -> _Exported:
    if not example[0].dim():
        raise SupernetError("the first input has no dimensions, hence no batch")
    size = len(example[0])
    as_long = [bool(value.dim()) and len(value) == size for value in example]
    program, lengths = _capture(module, example, as_long)
    varies = [like and not length.isdigit() for like, length in zip(as_long, lengths, strict=True)]
    if varies != as_long:
        # An input that merely has the length of the batch, a square mask for example, is a constant to the module.
        # Unless it is traced as such, ONNX gets a dimension with the name "6" instead of the number.
        program, lengths = _capture(module, example, varies)
    batched = tuple(length == lengths[0] for length in lengths)
    more = tuple(torch.cat([v, v[:1]]) if like else v for v, like in zip(example, batched, strict=True))
    if not _identical(_outputs(program.module(), more), _outputs(module, more)):
        raise SupernetError(f"with a batch of {size + 1} instead of {size} its outputs differ from those of the module")
    return _Exported(module, program, (example, more), batched)


def _capture(module: nn.Module, example: Activations, varies: Sequence[bool]) -> tuple[ExportedProgram, list[str]]:
    """The program, and the length of each of its inputs: a symbol where it may vary, else a number."""
    from torch.export import Dim, export

    # The tracer takes a length of 1 for a constant, so a single row is doubled. Only the first input must vary.
    double = len(example[0]) == 1
    rows = tuple(torch.cat([v, v]) if double and like else v.clone() for v, like in zip(example, varies, strict=True))
    shapes = tuple({0: Dim.AUTO if i else Dim.DYNAMIC} if like else None for i, like in enumerate(varies))
    program = _without_sources(export(module, rows, dynamic_shapes=shapes, strict=False))
    taken = [node.meta["val"] for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    return program, [str(value.shape[0]) if value.dim() else "" for value in taken]


def _outputs(module: nn.Module, inputs: Activations) -> Activations:
    return as_activations(module(*_copies(inputs)), "the module")


def _copies(inputs: Activations) -> Activations:
    """Tensors for one use, since a module may write to its inputs and the tracer leaves its marks on them."""
    return tuple(value.clone() for value in inputs)


def _identical(some: Activations, others: Activations) -> bool:
    """Whether the tensors are the same in number, type, shape and every bit."""

    def raw(value: Tensor) -> Tensor:  # bytes, since not-a-number does not equal itself
        return value.contiguous().reshape(-1).view(torch.uint8)

    return len(some) == len(others) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))
        for a, b in zip(some, others, strict=True)
    )


def _without_sources(program: ExportedProgram) -> ExportedProgram:
    """The program less the lines and paths of the source files that its nodes came from."""
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)
    return program


# The formats: safetensors, a torch.export program and ONNX, each written, read again and checked.


def _write_formats(module: nn.Module, example: Activations, folder: Path, formats: Sequence[str]) -> str | None:
    """Writes and checks every format; why the programs take a batch of a fixed size, or None."""
    if "safetensors" in formats:
        _write_safetensors(module, folder / FILES["safetensors"])
    if formats == ("safetensors",):
        return None
    exported = _trace(module, example)
    if "torch" in formats:
        _write_torch(exported, folder / FILES["torch"])
    if "onnx" in formats:
        with _explained("ONNX cannot hold the module", "; leave 'onnx' out of the formats"):
            _write_onnx(exported, folder / FILES["onnx"])
    return exported.fixed


def _write_safetensors(module: nn.Module, path: Path) -> None:
    from safetensors.torch import save_file

    state = module.state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise SupernetError(
            f"the state '{odd[0]}' is not a tensor, and safetensors holds nothing else: make it a buffer"
        )
    # Each entry gets memory of its own, since safetensors refuses the shared memory of tied weights and of views.
    owned = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    path.touch()
    mode = path.stat().st_mode  # safetensors would let nobody else read it
    with _explained("the weights cannot be written as safetensors"):
        save_file(owned, path, metadata={"format": "pt"})
    path.chmod(mode)


def _write_torch(exported: _Exported, path: Path) -> None:
    from torch.export import load, save

    with _explained("the torch program cannot be written and read again"):
        save(exported.program, path)
        loaded = load(path).module()
    for case in exported.cases:
        if not _identical(_outputs(loaded, case), _outputs(exported.module, case)):
            raise SupernetError(
                "the torch program does not repeat the outputs of the module to the last bit: "
                "is something in the module random in evaluation mode?"
            )


def _write_onnx(exported: _Exported, path: Path) -> None:
    import onnxruntime

    names = _input_names(exported.module, len(exported.batched))
    outputs = _output_names(len(_outputs(exported.module, exported.cases[0])))
    shapes = tuple({0: "batch"} if like else None for like in exported.batched) if any(exported.batched) else None
    # One file, unless it would pass protobuf's limit of 2 GB: then torch puts the weights beside it (model.onnx.data).
    torch.onnx.export(
        exported.program,
        (),
        path,
        input_names=names,
        output_names=outputs,
        dynamic_shapes=shapes,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    for case in exported.cases:
        results = session.run(outputs, {name: value.numpy() for name, value in zip(names, case, strict=True)})
        for name, one, other in zip(outputs, results, _outputs(exported.module, case), strict=True):
            _check_near(name, torch.from_numpy(one), other)


def _check_near(name: str, result: Tensor, expected: Tensor) -> None:
    """Within 1e-4 of each element and 1e-5 of the largest, or a few roundings; whole numbers must be equal."""
    rtol = atol = 0.0
    if expected.is_floating_point() or expected.is_complex():
        rounding = 4 * torch.finfo(expected.dtype).eps
        largest = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 0.0
        rtol, atol = max(1e-4, rounding), max(1e-5, rounding) * (largest or 1.0)
    try:
        torch.testing.assert_close(result, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        why = " ".join(str(error).split())
        raise SupernetError(f"{name} as computed by onnxruntime differs from that of the module: {why}") from None
