"""Capture of a model: the graph that the planner sees, each operator by its rule, and the program that can be run."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx, nn

from weft.errors import PlanError
from weft.plan.capture import rules
from weft.plan.capture.export import Batch, ExportResult, Loss, NamedBatch, export_program
from weft.plan.capture.op_call import (
    RULES,
    IterationSpace,
    NoRule,
    OpCall,
    TensorArgument,
    TensorValue,
    iteration_space,
    names,
    tensors,
)
from weft.plan.capture.rules.elementwise import elementwise
from weft.plan.graph import INPUT, PARAMETER, Dim, Graph, Operator, Read

log = logging.getLogger("weft.plan")

CONSTANT = "constant"
UNKNOWN = "unknown"
__all__ = ["CapturedModel", "capture", "rules"]

# No gradient comes back through these.
_STOPS = frozenset({"aten.detach", "aten.zeros_like", "aten.ones_like", "aten.empty_like", "aten.full_like"})
# Results of these, after the first, are outside of what is differentiated.
_FIRST_ONLY = frozenset({"aten._native_batch_norm_legit_functional", "aten._native_batch_norm_legit_no_training"})
_DRAWS = frozenset(
    {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "rand_like", "randn_like", "multinomial"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel(ExportResult):
    """A graph and its program. Operators have the names of the program's nodes, and their reads are in the order in
    which a node's arguments name tensors.

    ``op_index``: node -> operator. ``values``: node that holds a tensor -> (operator, which of its outputs); a
    ``getitem`` is here only. ``tied``: placeholder that is not used -> the one that is, for a parameter with two names.
    ``model``, ``batch`` and ``loss`` are what was captured. The program names the device it was captured on in
    operators that make tensors."""

    graph: Graph
    op_index: Mapping[str, int]
    values: Mapping[str, tuple[int, int]]
    tied: Mapping[str, str]
    model: nn.Module = field(repr=False)
    batch: Batch = field(repr=False)
    loss: Loss | None = field(repr=False)


def capture(model: nn.Module, batch: Batch, *, loss: Loss | None = None, name: str | None = None) -> CapturedModel:
    """The graph of a model's forward for this batch, in the mode (training or evaluation) that it is in.

    ``batch`` is a tensor, a tuple of positional arguments or a mapping of keyword arguments; ``loss(output, batch)``
    makes the loss part of the graph. Nothing is computed: parameters may be on the meta device. Where ``torch.export``
    fails, another method is tried, as ``graph.notes`` then say; where that fails too, PlanError gives the reason."""
    found = export_program(model, NamedBatch.of(batch, model), loss)
    graph, values, tied = _build(name or type(model).__name__, model, found)
    return CapturedModel(
        **{each.name: getattr(found, each.name) for each in fields(found)},
        graph=graph,
        op_index={entry.name: op for op, entry in enumerate(graph.operators)},
        values=values,
        tied=tied,
        model=model,
        batch=batch,
        loss=loss,
    )


@dataclass(slots=True)
class _GraphBuilder:
    operators: list[Operator] = field(default_factory=list)
    values: dict[str, tuple[int, int]] = field(default_factory=dict)  # node -> operator and which of its outputs
    tensors: dict[tuple[int, int], TensorValue] = field(default_factory=dict)
    spaces: dict[int, IterationSpace] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, made: Operator, results: tuple[TensorValue, ...]) -> None:
        op = len(self.operators)
        self.operators.append(made)
        self.values[made.name] = (op, 0)
        self.tensors.update({(op, number): value for number, value in enumerate(results)})


def _build(
    name: str, model: nn.Module, found: ExportResult
) -> tuple[Graph, dict[str, tuple[int, int]], dict[str, str]]:
    """The graph, where each tensor of the program is in it (operator and output), and the parameters that are another
    by a second name (placeholder -> the placeholder that is used)."""
    builder = _GraphBuilder()
    tied = _tied(model, found)
    trained = {key for key, value in model.named_parameters(remove_duplicate=False) if value.requires_grad}
    for node in found.program.graph.nodes:
        if node.name in tied or node.op == "output":
            continue
        if node.op in ("placeholder", "get_attr"):
            if isinstance(value := node.meta.get("val", found.constants.get(node.name)), torch.Tensor):
                _source(builder, node, value, found, trained)
        elif node.target is operator.getitem and node.args[0].name in builder.values:
            op, _ = builder.values[node.args[0].name]
            before = node.args[0].meta["val"][: node.args[1]]  # outputs are the results that are tensors
            builder.values[node.name] = (op, sum(isinstance(value, torch.Tensor) for value in before))
        elif node.op == "call_function":
            _call(builder, node)
        else:
            raise PlanError(f"node '{node.name}' ({node.op}) of the program has no operator in a graph")
    results = [builder.values[node] for node in found.results if node in builder.values]
    graph = Graph(
        name,
        tuple(_saved(_reached(builder.operators, results), builder.spaces)),
        (*found.notes, *dict.fromkeys(builder.notes)),
    )
    return graph, builder.values, tied


def _tied(model: nn.Module, found: ExportResult) -> dict[str, str]:
    """Export gives a parameter that has two names two placeholders, and uses one."""
    used = {node.name for node in found.program.graph.nodes if node.op == "placeholder" and node.users}
    owners: dict[int, str] = {}
    by_name = dict(model.named_parameters(remove_duplicate=False))
    ordered = sorted(found.parameters.items(), key=lambda item: item[0] not in used)
    tied: dict[str, str] = {}
    for node, name in ordered:
        owner = owners.setdefault(id(by_name[name]), node)
        if owner != node and node not in used:
            tied[node] = owner
    return tied


def _sizes(node: fx.Node, value: torch.Tensor) -> tuple[int, ...]:
    if not all(isinstance(size, int) for size in value.shape):
        trace = str(node.meta.get("stack_trace") or "").strip().split("\n")
        at = f", at `{trace[-1].strip()}`" if trace[-1] else ""
        raise PlanError(
            f"the shape of '{node.name}' ({_target(node)}) depends on data{at}: a plan needs the sizes of all tensors"
        )
    return tuple(value.shape)


def _source(builder: _GraphBuilder, node: fx.Node, value: torch.Tensor, found: ExportResult, trained: set[str]) -> None:
    shape = _sizes(node, value)
    target = (
        found.parameters.get(node.name) or found.buffers.get(node.name) or str(found.inputs.get(node.name, node.target))
    )
    parameter = node.name in found.parameters
    kind = PARAMETER if parameter else INPUT if node.name in found.inputs else CONSTANT
    made = Dim.free if parameter else Dim.whole
    gradient = parameter and target in trained
    own = TensorValue(shape, value.dtype, parameter, gradient)
    dims = tuple(made(label, size) for label, size in zip(names("a", len(shape)), shape, strict=True))
    module = target.rpartition(".")[0] if kind != INPUT else ""
    out = own.tensor(tuple(range(len(shape))), gradient)
    builder.add(Operator(node.name, kind, target, dims, (), (out,), backward=0.0, module=module), (own,))


def _target(node: fx.Node) -> str:
    return str(getattr(node.target, "_overloadpacket", node.target)).removeprefix("torch.ops.")


def _call(builder: _GraphBuilder, node: fx.Node) -> None:
    sources = [source for source in tensors((node.args, node.kwargs)) if source.name in builder.values]
    operands = tuple(builder.tensors[builder.values[source.name]] for source in sources)
    target = _target(node)
    live = any(value.live for value in operands)
    trained = any(value.gradient for value in operands) and target not in _STOPS
    made = node.meta.get("val")
    flat = [value for value in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(value, torch.Tensor)]
    results = []
    for number, value in enumerate(flat):
        learns = (
            trained
            and (value.dtype.is_floating_point or value.dtype.is_complex)
            and not (number and target in _FIRST_ONLY)
        )
        results.append(TensorValue(_sizes(node, value), value.dtype, live, learns))
    call = OpCall(target, getattr(node.target, "_overloadname", ""), {}, operands, tuple(results))
    found = _space(builder, node, call) if results else None
    if found is None:
        found = _replicated(call, "random" if target.split(".")[-1] in _DRAWS else UNKNOWN)
    if not live:  # computed on every device alike
        found = replace(found, dims=tuple(Dim.whole(dim.name, dim.size) for dim in found.dims))
        if found.kind == UNKNOWN:
            found = replace(found, kind=CONSTANT)
    trained = any(value.gradient for value in results)
    builder.spaces[len(builder.operators)] = found
    entry = Operator(
        node.name,
        found.kind,
        f"{target}.{node.target._overloadname}" if isinstance(node.target, torch._ops.OpOverload) else target,
        found.dims,
        tuple(
            Read(*builder.values[source.name], value.tensor(dims, value.gradient and trained))
            for source, value, dims in zip(sources, operands, found.reads, strict=True)
        ),
        tuple(value.tensor(dims, value.gradient) for value, dims in zip(results, found.results, strict=True)),
        found.flops,
        found.moved,
        found.backward if trained else 0.0,
        module=_module(node),
        known=found.kind != UNKNOWN,
    )
    builder.add(entry, call.results)


def _space(builder: _GraphBuilder, node: fx.Node, call: OpCall) -> IterationSpace | None:
    rule = RULES.get(f"{call.target}.{call.overload}") or RULES.get(call.target)
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = elementwise
    if rule is None or (schema := getattr(node.target, "_schema", None)) is None or schema.is_mutable:
        return None
    try:
        return rule(replace(call, given=_arguments(node, call.operands)))
    except NoRule:
        return None
    except Exception as problem:  # a rule must not be in the way of a plan: without it the operator is replicated
        log.warning("the rule for %s failed on '%s': %r", call.target, node.name, problem)
        builder.notes.append(f"the rule for {call.target} failed: {problem!r}")
        return None


def _arguments(node: fx.Node, operands: tuple[TensorValue, ...]) -> Mapping[str, Any]:
    """The node's arguments by the names of the operator's schema, with its defaults."""
    numbers: Iterator[int] = iter(range(len(operands)))

    def convert(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if not isinstance(value.meta.get("val"), torch.Tensor):
                return value.meta.get("val")
            number = next(numbers)
            return TensorArgument(number, operands[number])
        if isinstance(value, (list, tuple)):
            return [convert(part) for part in value]
        return value

    schema = node.target._schema  # type: ignore[union-attr]
    given = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    for argument, value in zip(schema.arguments, node.args, strict=False):
        given[argument.name] = convert(value)
    return {**given, **{name: convert(value) for name, value in node.kwargs.items()}}


def _replicated(call: OpCall, kind: str) -> IterationSpace:
    reads, results = ([(None,) * value.rank for value in each] for each in (call.operands, call.results))
    floating = [number for number, value in enumerate(call.operands) if value.floating]
    elements = float(sum(value.elements for value in call.results))
    return iteration_space(call, kind, reads, results, flops=elements, saved_operands=floating)


def _module(node: fx.Node) -> str:
    """The path of the module whose forward made the node; '@' counts the calls of a module that is called again."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return ".".join(part.partition("@")[0] for part in path.split(".")).removeprefix("L['self'].")


Output = tuple[int, int]  # an operator, and which of its outputs


def _reached(operators: Sequence[Operator], results: Iterable[Output]) -> list[Operator]:
    """The operators, without gradients for tensors that no result depends on in a way that autograd follows."""
    needed = set(results)
    found = list(operators)
    for op in reversed(range(len(found))):
        entry = found[op]
        outputs = tuple(
            replace(tensor, gradient=tensor.gradient and (op, number) in needed)
            for number, tensor in enumerate(entry.outputs)
        )
        reads = entry.reads
        if not any(tensor.gradient for tensor in outputs):
            reads = tuple(replace(read, tensor=replace(read.tensor, gradient=False)) for read in reads)
            entry = replace(entry, backward=0.0)
        needed.update((read.source, read.output) for read in reads if read.tensor.gradient)
        found[op] = replace(entry, outputs=outputs, reads=reads)
    return found


def _saved(operators: Sequence[Operator], spaces: Mapping[int, IterationSpace]) -> Iterator[Operator]:
    """The operators, each with the bytes that are kept. A tensor is counted where it was made, once, however many need
    it; a view keeps what it looks at. Parameters, inputs and constants (which have no space) are there anyway."""
    roots: dict[Output, Output] = {}
    kept: set[Output] = set()
    for op, entry in enumerate(operators):
        sources = [roots[read.source, read.output] for read in entry.reads]
        space = spaces.get(op)
        for number in range(len(entry.outputs)):
            if space is not None and space.kind == "view" and sources:
                roots[op, number] = sources[number if len(sources) == len(entry.outputs) else 0]
            else:
                roots[op, number] = (op, number)
        if space is not None and entry.has_gradient:
            kept.update(sources[number] for number in space.saved_operands)
            kept.update(roots[op, number] for number in space.saved_results)
    for op, entry in enumerate(operators):
        if (space := spaces.get(op)) is None:
            yield entry
            continue
        own = sum(tensor.bytes for number, tensor in enumerate(entry.outputs) if (op, number) in kept)
        extra = space.extra if entry.has_gradient else 0.0
        yield replace(entry, saved=float(own + extra))
