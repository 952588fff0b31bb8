"""How one vertex is eliminated: which tables are summed, how each is laid out for the sum, and what is left."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from weft.plan.solve.classes import Classes, Part
from weft.plan.solve.problem import Index, Table


@dataclass(frozen=True, slots=True)
class Wire:
    """How a table is laid out for the sum: axes in order, refined to the sum's classes, with room for the others."""

    axes: tuple[int, ...] | None
    takes: tuple[tuple[int, Index], ...]
    shape: tuple[int, ...]

    def __call__(self, table: Table) -> Table:
        if self.axes is not None:
            table = table.transpose(self.axes)
        for axis, index in self.takes:
            table = table.take(index, axis=axis)
        return np.ascontiguousarray(table).reshape(self.shape)


class Plan:
    """The elimination of one vertex, the same object for all vertices that stand alike in their tables."""

    __slots__ = ("_forms", "_places", "_wires", "form", "parts", "shape", "size", "work")

    def __init__(self, forms: list[Form], places: list[tuple[int, ...]], classes: Classes, count: int) -> None:
        parts: list[Part | None] = [None] * count
        for form, axes in zip(forms, places, strict=True):
            for part, place in zip(form.parts, axes, strict=True):
                known = parts[place]
                parts[place] = part if known is None else classes.join(known, part)
        self.parts = tuple(part for part in parts if part is not None)  # of the vertex itself, then of its neighbours
        self.shape = tuple(part.count for part in self.parts)
        self.work = math.prod(self.shape)
        self.size = math.prod(self.shape[1:])
        self.form: Form | None = None
        self._forms, self._places = forms, places
        self._wires: tuple[Wire, ...] | None = None

    @property
    def wires(self) -> tuple[Wire, ...]:
        if self._wires is None:
            self._wires = tuple(map(self._wire, self._forms, self._places))
        return self._wires

    def _wire(self, form: Form, places: tuple[int, ...]) -> Wire:
        axes = tuple(sorted(range(len(places)), key=places.__getitem__))
        shape, takes = [1] * len(self.parts), []
        for at, axis in enumerate(axes):
            have, want = form.parts[axis], self.parts[places[axis]]
            shape[places[axis]] = want.count
            if have is not want:
                takes.append((at, have.index[want.first]))
        return Wire(None if axes == tuple(range(len(axes))) else axes, tuple(takes), tuple(shape))


class Form:
    """The classes along the axes of a table; equal ones are one object with one number."""

    __slots__ = ("number", "parts")

    def __init__(self, parts: tuple[Part, ...], number: int) -> None:
        self.parts = parts
        self.number = number


Factor = tuple[int, tuple[int, ...], int, Form]  # the form's number, the vertices, the place among all tables, the form


@dataclass(frozen=True, slots=True)
class Step:
    """Vertex ``vertex`` goes: tables ``inputs`` are summed, vectors ``messages`` are over it alone, and the table
    ``output`` over ``scope`` is left (-1 where the vertex stood alone)."""

    vertex: int
    inputs: tuple[Factor, ...]
    messages: tuple[tuple[int, Form], ...]
    scope: tuple[int, ...]
    plan: Plan
    output: int
