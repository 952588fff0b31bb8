"""A lower bound for graphs too entangled to eliminate, which also says which configurations cannot be in an optimum.

Costs are moved between vertices and edges without changing the cost of any assignment, all kept >= 0, and what is
common to all configurations of a vertex goes into the bound (sequential reweighted message passing, Kolmogorov 2015; on
pairs the same as TRW-S). Sweeping to and fro, each vertex takes in what its edges can spare and hands it on to those
ahead. What is left at a configuration is a lower bound on how far every assignment with it lies above the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.plan.solver.compression import CompressedEdges, CompressedTable, Partition
from weft.plan.solver.problem import Table

_CALL = 1 << 13  # entries summed in the time that an edge takes however small its table is


class _Edge:
    """One direction of an edge, seen from the vertex that takes in: rows are the other's classes, columns its own."""

    __slots__ = ("back", "given", "mine", "other", "table")

    def __init__(self, table: Table, other: int, mine: Partition) -> None:
        self.table, self.other, self.mine = table, other, mine
        self.given = np.zeros(mine.count)  # what the edge has given to this vertex
        self.back: _Edge = self

    def spare(self) -> Table:
        """The least that the edge adds, for each class."""
        spare: Table = (self.table - self.back.given[:, None]).min(axis=0) - self.given
        return spare


class DualBound:
    """The bound and what is left at each vertex; changes in place with each sweep."""

    def __init__(self, unary: Sequence[Table], edges: CompressedEdges) -> None:
        every = (*unary, *[edge.table for edge in edges.tables])
        largest = {key: float(np.abs(table).max()) for key, table in {id(table): table for table in every}.items()}
        total = 1.0
        for table in every:
            total += largest[id(table)]
        self.ceiling = 2 * total  # above the cost of any assignment, for configurations that are no longer alive
        self.own = [costs - costs.min() for costs in unary]
        self.alive = [np.ones(len(costs), dtype=bool) for costs in unary]
        self.bound = 0.0
        self.before: list[list[_Edge]] = [[] for _ in unary]
        self.after: list[list[_Edge]] = [[] for _ in unary]
        known: dict[CompressedTable, tuple[Table, Table, float]] = {}
        for (i, j), edge in zip(edges.pairs, edges.tables, strict=True):
            if edge not in known:
                known[edge] = edge.table, np.ascontiguousarray(edge.table.T), float(edge.table.min())
            table, turned, least = known[edge]
            one, two = _Edge(table, i, edge.columns), _Edge(turned, j, edge.rows)
            one.back, two.back = two, one
            one.given += least
            self.bound += least
            self.before[j].append(one)
            self.after[i].append(two)
        for costs in unary:
            self.bound += float(costs.min())

    def sweep(self, forward: bool, upper: float) -> list[int]:
        """Visits all vertices once; a configuration that only assignments above ``upper`` have is no longer alive.
        Returns an assignment read off on the way."""
        count = len(self.own)
        assignment = [0] * count
        behind, ahead = (self.before, self.after) if forward else (self.after, self.before)
        for vertex in range(count) if forward else range(count - 1, -1, -1):
            own = guess = self.own[vertex]
            for edge in behind[vertex]:
                row = edge.table[edge.back.mine.labels[assignment[edge.other]]] - edge.given
                spare = edge.spare()
                edge.given += spare
                guess = guess + row[edge.mine.index]
                own = own + spare[edge.mine.index]
            assignment[vertex] = int(guess.argmin())  # what is no longer alive costs more than all else
            least = own.min()
            self.bound += float(least)
            own = own - least
            alive = own <= upper - self.bound
            if not alive.all():
                self.alive[vertex] &= alive
                own[~self.alive[vertex]] = self.ceiling
            share = 1.0 / max(len(behind[vertex]), len(ahead[vertex]), 1)
            left = own
            for edge in ahead[vertex]:
                gift = share * edge.mine.least(own)
                edge.given -= gift
                left = left - gift[edge.mine.index]
            self.own[vertex] = left
        return assignment


def sweep_work(edges: CompressedEdges) -> int:
    """The entries that an elimination sums in about the time of one sweep."""
    return sum(edge.table.size + _CALL for edge in edges.tables)
