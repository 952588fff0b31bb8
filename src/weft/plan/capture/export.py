"""From a module to a flat, functional program of ATen operators, by ``torch.export``.

A batch is taken apart into tensors with names. Where export fails, the model is exported once more in a mode in
which it decides nothing at random. The program is then normalized, so that it can be run in parts, with gradients.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from weft.errors import PlanError
from weft.nn.batch import batch_items, call_model
from weft.plan.capture.diagnose import diagnose

Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NamedBatch:
    """A batch taken apart. ``tensors`` are copies, so that no two share memory, with a name for each; ``batch`` puts
    tensors of these names back into the form in which the batch was given."""

    given: Batch
    tensors: Mapping[str, Tensor]
    keys: Mapping[str, int | str]  # the position of each tensor in a tuple, or its key

    @classmethod
    def of(cls, batch: Batch, model: nn.Module) -> NamedBatch:
        if not isinstance(batch, (Tensor, Mapping, tuple, list)):
            raise PlanError(f"a batch is a tensor, a tuple or a mapping, not {type(batch).__name__}")
        device = next((value.device for value in model.parameters()), torch.device("cpu"))
        tensors: dict[str, Tensor] = {}
        keys: dict[str, int | str] = {}
        for key, value in [(0, batch)] if isinstance(batch, Tensor) else batch_items(batch):
            if isinstance(value, Tensor):
                name = f"input_{key}" if isinstance(key, int) or not key.isidentifier() else key
                # A copy, because export takes two inputs that are one tensor for one input; values do not matter.
                tensors[name] = torch.zeros_like(value, device=device, requires_grad=False)
                keys[name] = key
            elif value is not None and not isinstance(value, (bool, int, float, str)):
                kind = type(value).__name__
                raise PlanError(f"batch entry '{key}' is {kind}: an entry is a tensor, a number, a string or None")
        if not tensors:
            raise PlanError("the batch holds no tensor")
        return cls(batch, tensors, keys)

    def batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        found = {self.keys[name]: tensor for name, tensor in tensors.items()}
        if isinstance(self.given, Tensor):
            return found[0]
        if isinstance(self.given, Mapping):
            return {key: found.get(key, value) for key, value in self.given.items()}
        return tuple(found.get(index, value) for index, value in enumerate(self.given))


log = logging.getLogger("weft.plan")


@dataclass(frozen=True, slots=True)
class ExportResult:
    """A captured program and what its placeholders and results are, by the names of its nodes."""

    program: torch.export.ExportedProgram
    method: str
    parameters: Mapping[str, str]  # placeholder -> name in the model
    buffers: Mapping[str, str]
    constants: Mapping[str, Tensor]
    inputs: Mapping[str, int | str]  # placeholder -> position or key in the batch
    results: tuple[str, ...]  # the tensors that the model returns
    mutated: Mapping[str, str]  # node -> the buffer that it becomes the new value of
    notes: tuple[str, ...] = ()


def export_program(model: nn.Module, named: NamedBatch, loss: Loss | None) -> ExportResult:
    """The program by export, or by deterministic export where that fails; PlanError with the reasons where both do."""
    with with_loss(model, named, loss), _quiet(), true_lstm_states():
        try:
            return _export(model, named, "export", ())
        except Exception as problem:  # whatever export runs into, the other method may not
            first, reason = problem, diagnose(problem)
            log.info("capture by export failed: %s", reason)
        method = "deterministic export"
        try:
            with deterministic(model) as mode:
                found = _export(model, named, method, mode.notes)
        except Exception as problem:
            more = f"; by {method}: {other}" if (other := diagnose(problem)) != reason else ""
            text = f"{type(model).__name__} cannot be captured (tried: export; {method}): {reason}{more}"
            raise PlanError(text) from first
        found = replace(found, notes=(f"captured by {method}, since export failed: {reason}", *found.notes))
        log.warning("%s: %s", type(model).__name__, "; ".join(found.notes))
        return found


def _export(model: nn.Module, named: NamedBatch, method: str, changes: Collection[str]) -> ExportResult:
    """The program; ``changes`` are those that the method made to the model's calls once it is exported."""
    with custom_functions() as functions:
        exported = torch.export.export(model, (), dict(named.tensors), strict=False)
        detach_no_grad(exported.graph_module)
        # An empty table decomposes no operator: it makes the program functional, and linear, attention and losses stay
        # one operator each.
        exported = exported.run_decompositions({})
    notes = sorted(changes)
    if functions:
        names = ", ".join(sorted(functions))
        notes.append(f"a program has the forward of {names}: its gradient is that of the forward's operators")
    normalize(exported.graph_module)
    signature = exported.graph_signature
    constants = {
        node: value
        for node, target in signature.inputs_to_lifted_tensor_constants.items()
        if isinstance(value := exported.constants[target], Tensor)
    }
    for node, value in constants.items():
        if isinstance(value, FakeTensor):  # the result of a computation that tracing lost
            raise RuntimeError(f"a tensor of the forward {tuple(value.shape)} became the constant '{node}'")
    return ExportResult(
        program=exported,
        method=method,
        parameters=dict(signature.inputs_to_parameters),
        buffers=dict(signature.inputs_to_buffers),
        constants=constants,
        inputs={str(node): named.keys[name] for node, name in zip(signature.user_inputs, named.tensors, strict=True)},
        results=tuple(node for node in signature.user_outputs if isinstance(node, str)),
        mutated=dict(signature.buffers_to_mutate),
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # Export warns of what is known, and prints and logs the graph of a failure; the reason is in what it raises.
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("torch")]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), contextlib.ExitStack() as disabled:
        warnings.simplefilter("ignore")
        for logger in loggers:
            disabled.enter_context(mock.patch.object(logger, "disabled", True))
        yield


Loss = Callable[[Any, Any], Tensor]


@contextlib.contextmanager
def with_loss(model: nn.Module, named: NamedBatch, loss: Loss | None) -> Iterator[None]:
    """Within the block the model's forward takes the batch's tensors by name and gives the loss, if there is one. (A
    module around model and loss would give every parameter another name.)"""
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise PlanError("the loss has parameters of its own, which no model holds: make it part of the model")
    inner = model.forward

    def forward(**tensors: Tensor) -> Any:
        batch = named.batch(tensors)
        output = call_model(inner, batch)
        return _plain(output) if loss is None else loss(output, batch)

    with mock.patch.object(model, "forward", forward):
        yield


class DeterministicExport(TorchFunctionMode):
    """A single number drawn at random is the largest that can be, so that ``torch.rand([]) < p`` is false, as a
    constant; and ``x.data`` is ``x.detach()``. ``notes`` says what it came to that."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rand and len(args) == 1 and args[0] in ([], (), [1], (1,), 1):
            self.notes.add("whole layers that the model drops at random (torch.rand) are captured as never dropped")
            largest = 1.0 - 2.0**-24
            return torch.tensor([largest] if args[0] else largest)
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            self.notes.add("x.data is read as x.detach()")
            return args[0].detach()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic(model: nn.Module) -> Iterator[DeterministicExport]:
    """Within the block the model's forward runs in the mode."""
    inner = model.forward
    mode = DeterministicExport()

    def forward(**tensors: Tensor) -> Any:
        with mode:
            return inner(**tensors)

    with mock.patch.object(model, "forward", forward):
        yield mode


@contextlib.contextmanager
def custom_functions() -> Iterator[set[str]]:
    """Gathers the names of autograd functions with a backward of their own, of which a program holds only the forward.
    A checkpoint of torch is such a function, without gradient inside: within the block it is what it computes."""
    found: set[str] = set()
    before = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            function, _, *inputs = args
            return function(*inputs, **kwargs)
        if not cls.__module__.startswith("torch."):
            found.add(cls.__name__)
        return before.__func__(cls, *args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield found


def _plain(output: Any) -> Any:
    """Objects that torch cannot take apart, as a mapping of the tensors that they hold."""

    def plain(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, (Tensor, bool, int, float, str)):
            return leaf
        held = {name: value for name, value in getattr(leaf, "__dict__", {}).items() if isinstance(value, Tensor)}
        return held or None

    return pytree.tree_map(plain, output)


@contextlib.contextmanager
def true_lstm_states() -> Iterator[None]:
    """Within it an LSTM's layer on fake tensors returns states of the shape ``(b, h)``, as it does on real ones.

    Torch 2.11 leaves an axis of one in them that real states have not, and what reads them would be captured in shapes
    that it never has.
    """
    layer: Any = getattr(decompositions, "one_layer_lstm", None)  # it is torch's own business where this is

    def squeezed(value: Tensor, hidden: tuple[Tensor, Tensor], *rest: Any, **options: Any) -> Any:
        out, states = layer(value, hidden, *rest, **options)
        return out, tuple(state.reshape(*hidden[0].shape[:-1], state.shape[-1]) for state in states)

    with mock.patch.object(decompositions, "one_layer_lstm", squeezed) if layer else contextlib.nullcontext():
        yield


Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def normalize(module: fx.GraphModule) -> None:
    """Assertions about whole tensors go, and operands that are read for their type only; a view becomes a reshape,
    since a part need not lie as the whole would; what autograd does not know becomes what it knows. Names stay."""
    graph = module.graph
    for node in list(graph.nodes):
        name = str(node.target)
        if node.op != "call_function":
            continue
        if name in ("aten.view.default", "aten._unsafe_view.default"):
            node.target = torch.ops.aten.reshape.default
        elif name.startswith("aten.squeeze."):  # a part may have an axis of one where the whole has more
            node.target, node.kwargs = torch.ops.aten.reshape.default, {}
            node.args = (node.args[0], list(node.meta["val"].shape))
        elif name.startswith("aten.new_"):
            node.target, node.args, node.kwargs = _factory(node)
        elif "_assert" in name and not node.users:
            graph.erase_node(node)
        elif name == "aten.copy.default":
            node.target, node.args, node.kwargs = _copied(graph, node)
        elif name == "aten.type_as.default":
            dtype = node.meta["val"].dtype
            node.target, node.args, node.kwargs = torch.ops.aten._to_copy.default, (node.args[0],), {"dtype": dtype}
    module.recompile()


def detach_no_grad(module: fx.GraphModule) -> None:
    """Detaches what is computed under ``no_grad``. Export marks such parts as submodules, which become part of the one
    graph later; without this the gradient would then flow through them."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and isinstance(inner := getattr(module, str(node.target), None), fx.GraphModule):
            detach_no_grad(inner)
            if any("wrap_with_set_grad_enabled" in str(user.target) and user.args[0] is False for user in node.users):
                _detach_results(inner)


def _detach_results(inner: fx.GraphModule) -> None:
    output = inner.graph.output_node()

    def detached(value: Any) -> Any:
        found = value.meta.get("val") if isinstance(value, fx.Node) else None
        if not isinstance(found, Tensor) or not found.is_floating_point():
            return value
        node = inner.graph.call_function(torch.ops.aten.detach.default, (value,))
        node.meta = dict(value.meta)
        return node

    with inner.graph.inserting_before(output):
        output.args = (pytree.tree_map(detached, output.args[0]),)
    inner.recompile()


def _factory(node: fx.Node) -> Made:
    """``x.new_ones(size)`` without x."""
    value = node.meta["val"]
    name = str(node.target).split(".")[1].removeprefix("new_")
    options = {"dtype": value.dtype, "device": value.device}
    size = list(value.shape)
    if name == "full":
        filling = node.args[2] if len(node.args) > 2 else node.kwargs["fill_value"]
        return torch.ops.aten.full.default, (size, filling), options
    makers = {"zeros": torch.ops.aten.zeros.default, "ones": torch.ops.aten.ones.default}
    return makers.get(name, torch.ops.aten.empty.memory_format), (size,), options


def _copied(graph: fx.Graph, node: fx.Node) -> Made:
    """``copy(x, y)``, which autograd does not know, is y in the shape and type of x."""
    value, source = node.meta["val"], node.args[1]
    if isinstance(source, fx.Node) and source.meta["val"].shape != value.shape:
        with graph.inserting_before(node):
            wide = graph.call_function(torch.ops.aten.expand.default, (source, list(value.shape)))
        wide.meta = {**node.meta, "val": source.meta["val"].expand(value.shape)}
        source = wide
    return torch.ops.aten._to_copy.default, (source,), {"dtype": value.dtype}
