"""From a module to a flat, functional program of ATen operators: by export, and where that fails by other ways."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from weft.errors import PlanError
from weft.plan.capture.batch import Named
from weft.plan.capture.refusal import refusal
from weft.plan.capture.settle import Inapplicable, Loss, custom_functions, grouped_experts, settled, with_loss
from weft.plan.capture.states import true_states
from weft.plan.capture.tidy import detach, tidy
from weft.plan.capture.trace import real, trace

log = logging.getLogger("weft.plan")


@dataclass(frozen=True, slots=True)
class Program:
    """A captured program and what its placeholders and results are, by the names of its nodes."""

    program: torch.export.ExportedProgram | fx.GraphModule
    graph: fx.Graph
    way: str
    parameters: Mapping[str, str]  # placeholder -> name in the model
    buffers: Mapping[str, str]
    constants: Mapping[str, Tensor]
    inputs: Mapping[str, int | str]  # placeholder -> place or key in the batch
    results: tuple[str, ...]  # the tensors that the model returns
    mutated: Mapping[str, str]  # node -> the buffer that it becomes the new value of
    notes: tuple[str, ...] = ()


def program(model: nn.Module, named: Named, loss: Loss | None) -> Program:
    """The first way that works; PlanError with the reason of the first that did not where none does."""
    problems: list[tuple[str, BaseException]] = []
    with with_loss(model, named, loss), _quiet(), true_states():
        for way, attempt in WAYS.items():
            try:
                with custom_functions() as functions:
                    found = attempt(model, named)
            except Inapplicable:
                continue
            except Exception as problem:  # whatever tracing runs into: the next way may not
                log.info("capture by %s failed: %s", way, str(problem).strip().split("\n")[0])
                problems.append((way, problem))
                continue
            notes = found.notes
            if functions:
                names = ", ".join(sorted(functions))
                notes = (
                    *notes,
                    f"a program has the forward of {names}: its gradient is that of the forward's operators",
                )
            if problems:
                reason = f"captured by {way}, since {problems[0][0]} failed: {refusal(problems[0][1])}"
                notes = (reason, *notes)
                log.warning("%s: %s", type(model).__name__, "; ".join(notes))
            return replace(found, way=way, notes=notes)
    tried = "; ".join(way for way, _ in problems)
    reasons = dict.fromkeys(refusal(problem) for _, problem in (problems[0], problems[-1]))
    last = "".join(f"; by {problems[-1][0]}: {reason}" for reason in list(reasons)[1:])
    text = f"{type(model).__name__} cannot be captured (tried: {tried}): {next(iter(reasons))}{last}"
    raise PlanError(text) from problems[0][1]


def _exported(model: nn.Module, named: Named, *, strict: bool = False) -> Program:
    exported = torch.export.export(model, (), dict(named.tensors), strict=strict)
    detach(exported.graph_module)
    # An empty table takes no operator apart: it makes the program functional, and linear, attention and losses stay
    # whole.
    exported = exported.run_decompositions({})
    tidy(exported.graph_module)
    signature = exported.graph_signature
    constants = {
        node: value
        for node, target in signature.inputs_to_lifted_tensor_constants.items()
        if isinstance(value := exported.constants[target], Tensor)
    }
    return Program(
        program=exported,
        graph=exported.graph,
        way="",
        parameters=dict(signature.inputs_to_parameters),
        buffers=dict(signature.inputs_to_buffers),
        constants=real(constants),
        inputs={str(node): named.keys[name] for node, name in zip(signature.user_inputs, named.tensors, strict=True)},
        results=tuple(node for node in signature.user_outputs if isinstance(node, str)),
        mutated=dict(signature.buffers_to_mutate),
    )


def _with_experts(model: nn.Module, named: Named) -> Program:
    with grouped_experts(model) as before:
        note = f"the experts' implementation 'grouped_mm' stands in for the model's own, '{before}'"
        return replace(_exported(model, named), notes=(note,))


def _settled(model: nn.Module, named: Named) -> Program:
    with settled(model) as mode:
        found = _exported(model, named)
    return replace(found, notes=tuple(sorted(mode.notes)))


def _traced(model: nn.Module, named: Named) -> Program:
    return Program(**trace(model, named), notes=("operators made of others are taken apart",))


WAYS: Mapping[str, Callable[[nn.Module, Named], Program]] = {
    "export": _exported,
    "export with grouped experts": _with_experts,
    "export of a settled model": _settled,
    "strict export": lambda model, named: _exported(model, named, strict=True),
    "trace": _traced,
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # Export warns of what is known, and prints and logs the graph of a failure; the reason is in what it raises.
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("torch")]
    before = [logger.disabled for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.disabled = True
        try:
            yield
        finally:
            for logger, was in zip(loggers, before, strict=True):
                logger.disabled = was
