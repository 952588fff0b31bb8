"""An operator call as a rule sees it, and the iteration space that a rule makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from weft.plan.graph import Dim, Tensor

AxisNames = tuple[str | None, ...]  # for each axis of a tensor the name of its dimension


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A tensor between two operators. ``live``: it depends on a parameter; ``gradient``: on one that is trained, in a
    way that autograd follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    live: bool = False
    gradient: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    def tensor(self, dims: tuple[int | None, ...], gradient: bool) -> Tensor:
        """As an operator of the graph sees it."""
        return Tensor(self.shape, self.dtype.itemsize, dims, gradient)


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor argument: the position among the call's operands, and the tensor."""

    number: int
    value: TensorValue


@dataclass(frozen=True, slots=True)
class OpCall:
    """A node of the program. ``given`` holds every argument of the operator's schema by name, defaults included, with
    an :class:`TensorArgument` for each tensor; ``operands`` are the tensors alone, in the order in which the node names
    them."""

    target: str
    overload: str
    given: Mapping[str, Any]
    operands: tuple[TensorValue, ...]
    results: tuple[TensorValue, ...]

    def axis(self, rank: int, name: str = "dim") -> int:
        """An argument that is one axis, counted from the front."""
        axis: int = self.given[name]
        return axis % rank if rank else 0

    def axes(self, rank: int, name: str = "dim") -> frozenset[int]:
        """An argument that is one axis, several, or (None or empty) all."""
        found = self.given.get(name)
        if found is None or found == []:
            return frozenset(range(rank))
        return frozenset(axis % rank if rank else 0 for axis in ([found] if isinstance(found, int) else found))


@dataclass(frozen=True, slots=True)
class IterationSpace:
    """What a rule says of a call: the iteration space, and for each operand and result the dimensions of its axes.

    ``saved_operands`` and ``saved_results`` are the operands and results that the backward needs, ``extra`` the bytes
    that it needs besides.
    """

    kind: str
    dims: tuple[Dim, ...]
    reads: tuple[tuple[int | None, ...], ...]
    results: tuple[tuple[int | None, ...], ...]
    flops: float
    moved: float
    backward: float
    saved_operands: tuple[int, ...]
    saved_results: tuple[int, ...]
    extra: float


Rule = Callable[[OpCall], IterationSpace | None]  # None: this call of the operator has no rule
RULES: dict[str, Rule] = {}


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operators of ATen, by ``name`` (all overloads) or ``name.overload``, several to a string;
    or of another library, by ``library::name``."""

    def register(function: Rule) -> Rule:
        for target in " ".join(targets).split():
            name = target.replace("::", ".") if "::" in target else f"aten.{target}"
            if name in RULES:
                raise ValueError(f"two rules for '{name}'")
            RULES[name] = function
        return function

    return register


def iteration_space(
    call: OpCall,
    kind: str,
    reads: Sequence[AxisNames],
    results: Sequence[AxisNames],
    *,
    unsplittable: Collection[str] = (),
    max_parts: Mapping[str, int] | None = None,
    flops: float = 0.0,
    moved: float | None = None,
    backward: float = 1.0,
    saved_operands: Sequence[int] = (),
    saved_results: Sequence[int] = (),
    extra: float = 0.0,
) -> IterationSpace:
    """The iteration space of tensors with named axes. A dimension may be split into a number of parts that divides
    every axis that has its name (and ``max_parts[name]``), unless it is ``unsplittable``. By default operands are
    read and results written; a view moves nothing."""
    sizes: dict[str, int] = {}
    parts: dict[str, int] = {}
    for value, labels in (*zip(call.results, results, strict=True), *zip(call.operands, reads, strict=True)):
        if len(labels) != value.rank or len(named := [name for name in labels if name is not None]) != len(set(named)):
            raise ValueError(f"{call.target}: {labels} does not name the axes of {value.shape}")
        for size, name in zip(value.shape, labels, strict=True):
            if name is not None:
                sizes[name] = max(sizes.get(name, 0), size)
                parts[name] = math.gcd(parts.get(name, 0), size)
    for name, limit in (max_parts or {}).items():
        parts[name] = math.gcd(parts.get(name, 0), limit)
    numbers: dict[str | None, int | None] = {None: None, **{name: number for number, name in enumerate(sizes)}}
    touched = 0.0 if kind == "view" else sum(value.bytes for value in (*call.operands, *call.results))
    return IterationSpace(
        kind,
        tuple(Dim(name, size, 1 if name in unsplittable else max(parts[name], 1)) for name, size in sizes.items()),
        tuple(tuple(numbers[name] for name in labels) for labels in reads),
        tuple(tuple(numbers[name] for name in labels) for labels in results),
        flops,
        touched if moved is None else moved,
        backward,
        tuple(saved_operands),
        tuple(saved_results),
        extra,
    )


def names(prefix: str, count: int) -> tuple[str, ...]:
    """Names for consecutive axes.

    >>> names("b", 2)
    ('b0', 'b1')
    """
    return tuple(f"{prefix}{number}" for number in range(count))


class NoRule(Exception):
    """This call of the operator has no rule."""


def broadcast(shape: Sequence[int], onto: Sequence[int], labels: AxisNames) -> AxisNames:
    """The names of the axes of a tensor that is broadcast onto a shape with these names; NoRule where it cannot be.

    >>> broadcast((1, 8), (4, 3, 8), ("b", "m", "n"))
    (None, 'n')
    """
    missing = len(onto) - len(shape)
    if missing < 0 or any(size not in (1, target) for size, target in zip(shape, onto[missing:], strict=True)):
        raise NoRule
    aligned = zip(shape, onto[missing:], labels[missing:], strict=True)
    return tuple(name if size == target else None for size, target, name in aligned)


def tensors(argument: Any) -> Iterator[fx.Node]:
    """The nodes in an argument that hold one tensor, in the order in which the operands of an operator are counted."""
    nodes = (leaf for leaf in pytree.tree_leaves(argument) if isinstance(leaf, fx.Node))
    return (node for node in nodes if isinstance(node.meta.get("val"), torch.Tensor))
