"""Reading a captured program: its values, its calls, and which operator of the graph each of them is."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from weft.errors import PlanError
from weft.plan.capture import Captured
from weft.plan.execute.site import Operand, Site
from weft.plan.graph import Graph, Operator, Read
from weft.plan.layout import Mesh, Split


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program: an output of the operator at a place of the graph."""

    source: int
    output: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A captured program whose calls are looked at one by one. ``device`` is where tensors are made that the program
    makes, if not where it was captured."""

    captured: Captured
    device: torch.device | None = None

    @property
    def graph(self) -> Graph:
        return self.captured.graph

    @property
    def root(self) -> fx.GraphModule:
        program = self.captured.program
        return program if isinstance(program, fx.GraphModule) else program.graph_module

    def calls(self) -> Iterator[tuple[int, fx.Node]]:
        """The calls in order, each with its operator's place; the picking of one of several results is none."""
        for node in self.captured.nodes.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                if node.name not in self.captured.places:
                    raise PlanError(
                        f"'{node.name}' ({node.target}) is in the program but not in the graph; capture anew"
                    )
                yield self.captured.places[node.name], node

    def value(self, node: str) -> Value:
        """Which operator's output a node stands for."""
        if node not in self.captured.values:
            raise PlanError(f"'{node}' is read in the program but is not in the graph; capture anew")
        return Value(*self.captured.values[node])

    def site(self, place: int, node: fx.Node, split: Split, mesh: Mesh) -> Site:
        """A call with its arguments in the order of the schema, and operands in place of nodes."""
        reads = _Reads(self.graph.operators[place])

        def operand(each: fx.Node) -> Any:
            if each.op == "get_attr" and each.name not in self.captured.places:
                return _placed(_attribute(self.root, str(each.target)), self.device)
            value = self.value(each.name)
            found = reads.take(value)
            return Operand(value.source, value.output, found.tensor, _dtype(each), _strides(each))

        args, kwargs = _bound(node)
        outputs = {user.args[1] for user in node.users if user.target is operator.getitem} or {0}
        return Site(
            self.graph.operators[place],
            split,
            mesh,
            node.target,
            [_replaced(each, operand, self.device) for each in args],
            {name: _replaced(each, operand, self.device) for name, each in kwargs.items()},
            frozenset(int(output) for output in outputs if isinstance(output, int)),
        )


class _Reads:
    """An operator's operands, taken in order. One that is named twice may be listed once."""

    def __init__(self, reader: Operator) -> None:
        self.reader, self.left = reader, list(reader.reads)

    def take(self, value: Value) -> Read:
        for reads in (self.left, self.reader.reads):
            for read in reads:
                if (read.source, read.output) == (value.source, value.output):
                    if reads is self.left:
                        self.left.remove(read)
                    return read
        raise PlanError(f"operator '{self.reader.name}' reads a tensor that the graph does not know; capture anew")


def _replaced(value: Any, operand: Callable[[fx.Node], Any], device: torch.device | None) -> Any:
    if isinstance(value, fx.Node):
        return operand(value)
    if isinstance(value, torch.device):
        return device or value
    if isinstance(value, (list, tuple)):
        return [_replaced(each, operand, device) for each in value]
    if isinstance(value, dict):
        return {name: _replaced(each, operand, device) for name, each in value.items()}
    return value


def _attribute(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name)
    return root


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
                    node.args = fx.node.map_aggregate(node.args, lambda each: _on(each, device))
                    node.kwargs = fx.node.map_aggregate(node.kwargs, lambda each: _on(each, device))
                module.recompile()
    return value


def _on(value: Any, device: torch.device) -> Any:
    return device if isinstance(value, torch.device) else value


def _bound(node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by position with the defaults of the schema, so that a rule finds each by its name."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return list(node.args), dict(node.kwargs)
    args, kwargs = list(node.args), dict(node.kwargs)
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
