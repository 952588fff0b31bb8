"""An operator where it is computed: its call in the captured program, and the split that says which part is meant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.plan.execute.wire import Wire
from weft.plan.graph import Operator, Tensor
from weft.plan.layout import PARTIAL, Layout, Mesh, Split, layout, local_shape, result_layout

Run = Callable[[Wire, list[Any], dict[str, Any]], Any]


class Unfit(Exception):
    """Why an operator cannot compute its part; the message is a reason for a person."""


@dataclass(frozen=True, slots=True)
class Operand:
    """The place of a tensor among the arguments of a call: which value it is, and how the operator sees it."""

    source: int
    output: int
    tensor: Tensor
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None  # of the whole value, where they are known


@dataclass(frozen=True, slots=True)
class Local:
    """How an operator computes its part: ``run`` with these arguments, whose operands are one device's parts. The
    outputs in ``whole`` come out whole where their dimensions alone would make them summands."""

    run: Run
    args: list[Any]
    kwargs: dict[str, Any]
    whole: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Site:
    """A call of the program with its arguments in the order of the schema, defaults included."""

    operator: Operator
    split: Split
    mesh: Mesh
    target: Any
    args: list[Any]
    kwargs: dict[str, Any]
    used: frozenset[int] = field(default=frozenset({0}))  # the outputs that somebody reads

    @property
    def name(self) -> str:
        """Of the operator without its overload: ``linear`` for ``aten.linear.default``."""
        if isinstance(self.target, torch._ops.OpOverload):
            return self.target._schema.name.removeprefix("aten::")
        return str(getattr(self.target, "__name__", self.target))

    @property
    def is_cut(self) -> bool:
        return any(place >= 0 and size > 1 for place, size in zip(self.split, self.mesh.sizes, strict=True))

    def local(self, run: Run | None = None, whole: frozenset[int] = frozenset(), **changes: Any) -> Local:
        """This call with some arguments replaced, and computed by ``run`` if given."""
        args = list(self.args)
        for name, value in changes.items():
            args[self.index(name)] = value
        return Local(run or called(self.target), args, self.kwargs, whole)

    def index(self, name: str) -> int:
        """Where an argument of the schema stands."""
        return next(place for place, argument in enumerate(self.target._schema.arguments) if argument.name == name)

    def has(self, name: str) -> bool:
        return isinstance(self.target, torch._ops.OpOverload) and any(
            argument.name == name and not argument.kwarg_only for argument in self.target._schema.arguments
        )

    def argument(self, name: str) -> Any:
        return self.args[self.index(name)]

    def parts(self, place: int | None) -> int:
        """Into how many parts a dimension is split."""
        return math.prod(size for size, split in zip(self.mesh.sizes, self.split, strict=True) if split == place)

    def wanted(self, operand: Operand) -> Layout:
        return layout(operand.tensor, self.split)

    def result(self, output: int = 0) -> Layout:
        return result_layout(self.operator.outputs[output], self.split)

    def shape(self, output: int = 0) -> tuple[int, ...]:
        """Of this device's part of an output."""
        return local_shape(self.operator.outputs[output].shape, self.result(output), self.mesh)

    def summed(self, output: int = 0) -> tuple[int, ...]:
        """The mesh axes along which an output comes out as summands."""
        return tuple(
            axis
            for axis, (place, size) in enumerate(zip(self.result(output), self.mesh.sizes, strict=True))
            if place == PARTIAL and size > 1
        )

    def summands(self, output: int = 0) -> int:
        return math.prod(self.mesh.sizes[axis] for axis in self.summed(output))


def called(target: Any) -> Run:
    def run(wire: Wire, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return target(*args, **kwargs)

    return run


def operands(value: Any) -> Iterator[Operand]:
    """The operands in an argument, lists included, in order."""
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from operands(item)
    elif isinstance(value, dict):
        yield from operands(list(value.values()))
