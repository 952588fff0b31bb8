"""In which order vertices are eliminated, and how each is: decided from the classes alone, before any table is summed.

Eliminating a vertex sums the tables over it, takes the least over its configurations, and leaves a table over its
neighbours. The vertex whose sum has the fewest entries comes next (entries of classes, not configurations). Among equal
ones it is the one that was left alone longest: so equal layers shrink side by side, and what is computed for one serves
all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.plan.solver.compression import Partition, PartitionCache
from weft.plan.solver.problem import Index, Table


@dataclass(frozen=True, slots=True)
class TableView:
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


class StepLayout:
    """The elimination of one vertex, the same object for all vertices that stand alike in their tables."""

    def __init__(
        self, table_layouts: list[TableLayout], positions: list[tuple[int, ...]], classes: PartitionCache, count: int
    ) -> None:
        parts: list[Partition | None] = [None] * count
        for table_layout, axes in zip(table_layouts, positions, strict=True):
            for part, position in zip(table_layout.parts, axes, strict=True):
                known = parts[position]
                parts[position] = part if known is None else classes.join(known, part)
        self.parts = tuple(part for part in parts if part is not None)  # of the vertex itself, then of its neighbours
        self.shape = tuple(part.count for part in self.parts)
        self.work = math.prod(self.shape)
        self.size = math.prod(self.shape[1:])
        self.table_layout: TableLayout | None = None
        self._table_layouts, self._positions = table_layouts, positions

    @cached_property
    def views(self) -> tuple[TableView, ...]:
        return tuple(map(self._view, self._table_layouts, self._positions))

    def _view(self, table_layout: TableLayout, positions: tuple[int, ...]) -> TableView:
        axes = tuple(sorted(range(len(positions)), key=positions.__getitem__))
        shape, takes = [1] * len(self.parts), []
        for at, axis in enumerate(axes):
            have, want = table_layout.parts[axis], self.parts[positions[axis]]
            shape[positions[axis]] = want.count
            if have is not want:
                takes.append((at, have.index[want.first]))
        return TableView(None if axes == tuple(range(len(axes))) else axes, tuple(takes), tuple(shape))


@dataclass(frozen=True, slots=True, eq=False)
class TableLayout:
    """The classes along the axes of a table; equal ones are one object with one number."""

    parts: tuple[Partition, ...]
    number: int


# The layout's number, the vertices, the number among all tables, the layout.
Factor = tuple[int, tuple[int, ...], int, TableLayout]


@dataclass(frozen=True, slots=True)
class EliminationStep:
    """Vertex ``vertex`` goes: tables ``inputs`` are summed, vectors ``messages`` are over it alone, and the table
    ``output`` over ``scope`` is left (-1 where the vertex stood alone)."""

    vertex: int
    inputs: tuple[Factor, ...]
    messages: tuple[tuple[int, TableLayout], ...]
    scope: tuple[int, ...]
    layout: StepLayout
    output: int


MANY = 24  # vertices in more tables than this are weighed only when nothing else is left


@dataclass(frozen=True, slots=True)
class EliminationOrder:
    """All steps, or those before the first whose table would exceed what was allowed."""

    steps: tuple[EliminationStep, ...]
    tables: int  # how many there are in all, the given ones first
    left: tuple[int, ...]  # the vertices that no step eliminates
    work: int  # entries summed, were no two steps equal
    entries: int


_EMPTY = StepLayout([], [], PartitionCache(), 0)


class OrderSearch:
    """The search for the order of elimination of a graph with tables over ``scopes``, whose axes have these classes."""

    def __init__(
        self,
        count: int,
        scopes: Sequence[tuple[int, ...]],
        parts: Sequence[tuple[Partition, ...]],
        classes: PartitionCache,
    ) -> None:
        self.classes = classes
        self.table_layouts: dict[tuple[Partition, ...], TableLayout] = {}
        self.layouts: dict[tuple[int, ...], StepLayout] = {}
        self.at: list[list[Factor]] = [[] for _ in range(count)]
        self.messages: list[list[tuple[int, TableLayout]]] = [[] for _ in range(count)]
        self.tables = 0
        self.current: list[tuple[StepLayout, tuple[int, ...]]] = [(_EMPTY, ())] * count
        self.many: float = MANY
        for scope, axes in zip(scopes, parts, strict=True):
            self.add(scope, self.table_layout(axes))

    def table_layout(self, parts: tuple[Partition, ...]) -> TableLayout:
        table_layout = self.table_layouts.get(parts)
        if table_layout is None:
            table_layout = self.table_layouts[parts] = TableLayout(parts, len(self.table_layouts))
        return table_layout

    def add(self, scope: tuple[int, ...], table_layout: TableLayout) -> int:
        number = self.tables
        self.tables += 1
        if len(scope) == 1:
            self.messages[scope[0]].append((number, table_layout))
        else:
            for vertex in scope:
                self.at[vertex].append((table_layout.number, scope, number, table_layout))
        return number

    def rank(self, vertex: int) -> float:
        """The entries that eliminating the vertex would sum now."""
        if len(self.at[vertex]) > self.many:
            return math.inf
        factors = self.at[vertex]
        factors.sort()
        local = {vertex: 0}
        key: list[int] = []
        for number, scope, _, _ in factors:
            key.append(number)
            for other in scope:
                key.append(local.setdefault(other, len(local)))
        layout = self.layouts.get(found := tuple(key))
        if layout is None:
            positions = [tuple([local[other] for other in factor[1]]) for factor in factors]
            layout = self.layouts[found] = StepLayout(
                [factor[3] for factor in factors], positions, self.classes, len(local)
            )
        self.current[vertex] = layout, tuple(local)[1:]
        return layout.work

    def run(self, entries: int) -> EliminationOrder:
        """The order; it ends before a step whose table would exceed ``entries``, or whose sum would 64 times that."""
        latest = list(range(len(self.at)))  # when each vertex was last ranked; -1 once it is gone
        heap = [(self.rank(vertex), vertex, vertex) for vertex in latest]
        heapq.heapify(heap)
        stamp = len(latest)
        steps: list[EliminationStep] = []
        while heap:
            rank, stamped, vertex = heapq.heappop(heap)
            if latest[vertex] != stamped:
                continue
            if rank == math.inf:  # nothing but vertices in many tables is left
                self.many = math.inf
                heap = [(self.rank(other), latest[other], other) for other in range(len(latest)) if latest[other] >= 0]
                heapq.heapify(heap)
                continue
            layout, scope = self.current[vertex]
            if layout.size > entries or layout.work > 64 * entries:
                break
            latest[vertex] = -1
            steps.append(self.eliminate(vertex, layout, scope))
            for other in scope:
                heapq.heappush(heap, (self.rank(other), stamp, other))
                latest[other], stamp = stamp, stamp + 1
        left = tuple(vertex for vertex, at in enumerate(latest) if at >= 0)
        work = sum(step.layout.work for step in steps)
        size = max((step.layout.size for step in steps), default=1)
        return EliminationOrder(tuple(steps), self.tables, left, work, size)

    def eliminate(self, vertex: int, layout: StepLayout, scope: tuple[int, ...]) -> EliminationStep:
        factors = tuple(self.at[vertex])
        for other in scope:
            self.at[other] = [factor for factor in self.at[other] if vertex not in factor[1]]
        output = -1
        if scope:
            if layout.table_layout is None:
                layout.table_layout = self.table_layout(layout.parts[1:])
            output = self.add(scope, layout.table_layout)
        self.messages[vertex].sort()
        return EliminationStep(vertex, factors, tuple(self.messages[vertex]), scope, layout, output)
