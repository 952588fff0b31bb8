"""The captured program as the runtime reads it: its values, its inputs and results, and each call under a split."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from weft.errors import PlanError
from weft.nn.batch import batch_items
from weft.plan.capture import Batch, CapturedModel
from weft.plan.graph import Graph, Operator, Read
from weft.plan.graph import Tensor as GraphTensor
from weft.plan.runtime.redistribute import MeshCollectives
from weft.plan.sharding import PARTIAL, Mesh, OpSplit, Placements, local_shape, operand_placements, result_placements


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A tensor of the program: an output of an operator of the graph."""

    source: int
    output: int


@dataclass(frozen=True, slots=True)
class CapturedProgram:
    """A captured program, call by call. ``device`` is where tensors are made that the program
    makes, if not where it was captured."""

    captured: CapturedModel
    device: torch.device | None = None

    @property
    def graph(self) -> Graph:
        return self.captured.graph

    def calls(self) -> Iterator[tuple[int, fx.Node]]:
        """The calls in order, each with its operator's index; the picking of one of several results is none."""
        for node in self.captured.program.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                yield self.captured.op_index[node.name], node

    def value(self, node: str) -> ValueRef:
        """Which operator's output a node stands for."""
        return ValueRef(*self.captured.values[node])

    def dtypes(self) -> dict[ValueRef, torch.dtype]:
        """The types of all values."""
        nodes = [node for node in self.captured.program.graph.nodes if node.name in self.captured.values]
        return {self.value(each.name): _dtype(each) for each in nodes if isinstance(each.meta.get("val"), Tensor)}

    def call(self, op: int, node: fx.Node, split: OpSplit, mesh: Mesh) -> ShardedCall:
        """A call with its arguments in the order of the schema, and operands in place of nodes."""
        reader = self.graph.operators[op]
        left = list(reader.reads)  # taken in order; one that is named twice may be listed once

        def read_of(value: ValueRef) -> Read:
            found = next(read for read in (*left, *reader.reads) if ValueRef(read.source, read.output) == value)
            if found in left:
                left.remove(found)
            return found

        def given(each: fx.Node | torch.device) -> Any:
            if isinstance(each, torch.device):
                return self.device or each
            if each.op == "get_attr" and each.name not in self.captured.op_index:
                return _placed(attrgetter(str(each.target))(self.captured.program.graph_module), self.device)
            value = self.value(each.name)
            return Operand(value, read_of(value).tensor, _dtype(each), _strides(each))

        args, kwargs = _bound(node)
        outputs = {user.args[1] for user in node.users if user.target is operator.getitem} or {0}
        return ShardedCall(
            reader,
            split,
            mesh,
            node.target,
            replace_leaves(args, (fx.Node, torch.device), given),
            replace_leaves(kwargs, (fx.Node, torch.device), given),
            frozenset(int(output) for output in outputs if isinstance(output, int)),
        )


def _placed(value: Any, device: torch.device | None) -> Any:
    """A part of the program that is called as a whole, or a constant, on the device."""
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, fx.GraphModule):
        value = copy.deepcopy(value).to(device)
        for module in value.modules():
            if isinstance(module, fx.GraphModule):
                for node in module.graph.nodes:
                    node.args = replace_leaves(node.args, torch.device, lambda _: device)
                    node.kwargs = replace_leaves(node.kwargs, torch.device, lambda _: device)
                module.recompile()
    return value


def _bound(node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by position with the defaults of the schema, so that a rule finds each by its name."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if not isinstance(node.target, torch._ops.OpOverload):
        return args, kwargs
    for argument in node.target._schema.arguments[len(args) :]:
        if argument.kwarg_only:
            break
        args.append(kwargs.pop(argument.name, argument.default_value))
    return args, kwargs


def _dtype(node: fx.Node) -> torch.dtype:
    found = node.meta.get("val")
    return found.dtype if isinstance(found, torch.Tensor) else torch.get_default_dtype()


def _strides(node: fx.Node) -> tuple[int, ...] | None:
    found = node.meta.get("val")
    return tuple(found.stride()) if isinstance(found, torch.Tensor) and found.layout == torch.strided else None


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """A tensor of the batch: its position among the arguments or its keyword, and what it was when captured."""

    key: int | str
    value: ValueRef
    shape: tuple[int, ...]
    dtype: torch.dtype

    def check(self, given: Any) -> Tensor:
        """Refuses what is not like the captured input."""
        if not isinstance(given, Tensor):
            raise PlanError(
                f"the model was captured with a tensor as argument {self.key!r}, but is called with {given!r}"
            )
        if tuple(given.shape) != self.shape or given.dtype != self.dtype:
            raise PlanError(
                f"argument {self.key!r} was captured as {self.dtype} of shape {self.shape}, "
                f"but is {given.dtype} of shape {tuple(given.shape)}; give it so, or capture anew"
            )
        return given


@dataclass(frozen=True, slots=True)
class CallSignature:
    """Inputs in the order of the program; outputs are values, or constants in a tuple of one, in the form ``tree``."""

    inputs: tuple[ProgramInput, ...]
    outputs: tuple[ValueRef | tuple[Any], ...]
    tree: Any

    @classmethod
    def of(cls, program: CapturedProgram) -> CallSignature:
        captured = program.captured
        held = {node.name: node.meta["val"] for node in captured.program.graph.nodes if node.name in captured.inputs}
        inputs = tuple(
            ProgramInput(key, program.value(node), tuple(held[node].shape), held[node].dtype)
            for node, key in captured.inputs.items()
        )
        exported = captured.program
        found, tree = exported.graph_signature.user_outputs, exported.call_spec.out_spec
        outputs = tuple(program.value(each) if isinstance(each, str) else (each,) for each in found)
        return cls(inputs, outputs, tree)

    def tensors(self, batch: Batch) -> list[Any]:
        """What is given for each input. What was no tensor when captured is part of the program, and ignored."""
        given = {0: batch} if isinstance(batch, Tensor) else dict(batch_items(batch))
        known = {each.key for each in self.inputs}
        for key, value in given.items():
            if isinstance(value, Tensor) and key not in known:
                raise PlanError(f"the model was captured without a tensor as argument {key!r}; capture it with one")
        return [given.get(each.key) for each in self.inputs]


Kernel = Callable[[MeshCollectives, list[Any], dict[str, Any]], Any]


class CannotShard(Exception):
    """Why an operator cannot compute its part; the message is a reason for a person."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Stands for a tensor among the arguments of a call: which value it is, and how the operator sees it."""

    value: ValueRef
    tensor: GraphTensor
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None  # of the whole value, where they are known


@dataclass(frozen=True, slots=True)
class LocalKernel:
    """How an operator computes its part: ``run`` with these arguments, whose operands are one device's parts. The
    outputs in ``whole`` come out whole where their dimensions alone would make them partial sums."""

    run: Kernel
    args: list[Any]
    kwargs: dict[str, Any]
    whole: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ShardedCall:
    """A call of the program with its arguments in the order of the schema, defaults included."""

    operator: Operator
    split: OpSplit
    mesh: Mesh
    target: Any
    args: list[Any]
    kwargs: dict[str, Any]
    used_outputs: frozenset[int] = field(default=frozenset({0}))  # the outputs that somebody reads

    @property
    def name(self) -> str:
        """Of the operator without its overload: ``linear`` for ``aten.linear.default``."""
        if isinstance(self.target, torch._ops.OpOverload):
            return self.target._schema.name.removeprefix("aten::")
        return str(getattr(self.target, "__name__", self.target))

    @property
    def is_split(self) -> bool:
        return any(dim >= 0 and size > 1 for dim, size in zip(self.split, self.mesh.sizes, strict=True))

    def kernel(self, run: Kernel | None = None, whole: frozenset[int] = frozenset(), **changes: Any) -> LocalKernel:
        """This call with some arguments replaced, and computed by ``run`` if given."""
        args = list(self.args)
        for name, value in changes.items():
            args[self.index(name)] = value
        run = run or (lambda collectives, args, kwargs: self.target(*args, **kwargs))
        return LocalKernel(run, args, self.kwargs, whole)

    def index(self, name: str) -> int:
        """Where an argument of the schema stands."""
        return next(index for index, argument in enumerate(self.target._schema.arguments) if argument.name == name)

    def has(self, name: str) -> bool:
        return isinstance(self.target, torch._ops.OpOverload) and any(
            argument.name == name and not argument.kwarg_only for argument in self.target._schema.arguments
        )

    def argument(self, name: str) -> Any:
        return self.args[self.index(name)]

    def parts(self, dim: int | None) -> int:
        """Into how many parts a dimension is split."""
        return math.prod(size for size, split in zip(self.mesh.sizes, self.split, strict=True) if split == dim)

    def operand_placements(self, operand: Operand) -> Placements:
        return operand_placements(operand.tensor, self.split)

    def result_placements(self, output: int = 0) -> Placements:
        return result_placements(self.operator.outputs[output], self.split)

    def shape(self, output: int = 0) -> tuple[int, ...]:
        """Of this device's part of an output."""
        return local_shape(self.operator.outputs[output].shape, self.result_placements(output), self.mesh)

    def partial_axes(self, output: int = 0) -> tuple[int, ...]:
        """The mesh axes along which an output comes out as partial sums."""
        return tuple(
            axis
            for axis, (placement, size) in enumerate(zip(self.result_placements(output), self.mesh.sizes, strict=True))
            if placement == PARTIAL and size > 1
        )

    def partial_count(self, output: int = 0) -> int:
        return math.prod(self.mesh.sizes[axis] for axis in self.partial_axes(output))


Leaf = TypeVar("Leaf")


def leaves(value: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    """What there is of a kind in an argument, lists included, in order."""
    return (each for each in pytree.tree_leaves(value) if isinstance(each, kind))


def replace_leaves(value: Any, kind: type[Any] | tuple[type[Any], ...], give: Callable[[Any], Any]) -> Any:
    """A copy of an argument, lists included, in which ``give`` replaces what there is of a kind."""
    if isinstance(value, kind):
        return give(value)
    if isinstance(value, list):
        return [replace_leaves(each, kind, give) for each in value]
    if isinstance(value, tuple):
        return tuple(replace_leaves(each, kind, give) for each in value)
    if isinstance(value, dict):
        return {name: replace_leaves(each, kind, give) for name, each in value.items()}
    return value


def split_batch(batch: Batch, rows: int, count: int) -> list[Batch]:
    """A batch of so many rows in equal parts, in order. Tensors whose first axis is not that long are in each part."""

    def part(value: Any, number: int) -> Any:
        return value.tensor_split(count)[number] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value

    if isinstance(batch, Tensor):
        return [part(batch, number) for number in range(count)]
    parts = [{key: part(value, number) for key, value in batch_items(batch)} for number in range(count)]
    return list(parts) if isinstance(batch, Mapping) else [tuple(each.values()) for each in parts]
