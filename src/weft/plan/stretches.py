"""Stretches of the line that a pipeline cuts, each solved by itself: what its operators take at least, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.plan.graph import PARAMETER, Graph
from weft.plan.line import Line
from weft.plan.solve import OverLimit, Problem, Solution, solve
from weft.plan.tables import Tables

Table = NDArray[np.float64]


class Stretches:
    """The operators of a line with their costs, to be solved from one place to another under a limit of memory."""

    class Kept:
        """What was solved, by the tables that it depends on, which are kept so that no others take their places."""

        def __init__(self) -> None:
            self.bounds: dict[object, float] = {}
            self.tables: list[Tables] = []

    def __init__(
        self, graph: Graph, row: Line, found: Tables, limit: float, gap: float, seconds: float, kept: Kept
    ) -> None:
        self.row, self.found, self.limit = row, found, limit
        kept.tables.append(found)
        self._gap, self._seconds = gap, seconds
        self._fixed = [
            operator.kind == PARAMETER for operator in graph.operators
        ]  # memory that flights do not multiply
        self._edges: list[list[int]] = [[] for _ in found.compute]
        self._readers: list[list[int]] = [[] for _ in found.compute]
        for source, reader in found.moves:
            self._edges[reader].append(source)
            self._readers[source].append(reader)
        self._members: list[list[int]] = [[] for _ in range(len(row))]
        for place, rank in enumerate(row.ranks):
            self._members[rank].append(place)
        self._bounds = kept.bounds
        self._weights: dict[tuple[int, int], Table] = {}

    def alone(self) -> list[float]:
        """Of each operator what it adds to its place in the line at least, whatever the others do."""
        ranks, moves = self.row.ranks, self.found.moves
        costs = [table.copy() for table in self.found.compute]
        least = [0.0] * len(costs)
        into: dict[int, int] = {}  # the one reader at the same place in the line that an operator is weighed with
        for source, reader in moves:
            if ranks[source] == ranks[reader]:
                into.setdefault(source, reader)
        for place, own in enumerate(costs):
            for source in self._edges[place]:
                table = moves[source, place]
                own += (costs[source][:, None] + table if into.get(source) == place else table).min(0)
            if place not in into:
                least[place] = float(own.min())
        return least

    def lightest(self) -> tuple[list[float], list[float]]:
        """Of each operator the fewest bytes that stay, and the fewest for each micro-batch in flight."""
        least = [float(memory.min()) for memory in self.found.memory]
        stays = [own if fixed else 0.0 for own, fixed in zip(least, self._fixed, strict=True)]
        return stays, [own - kept for own, kept in zip(least, stays, strict=True)]

    def least(self, first: int, last: int, flights: int) -> float:
        """Seconds that the operators from one place to before another take at least, with so many micro-batches in
        flight; ``inf`` where they do not keep the limit. With 0 there is no limit."""
        inside = self._inside(first, last)
        number = {place: at for at, place in enumerate(inside)}
        found = self.found
        signature = (
            flights,
            *(
                (
                    id(found.compute[place]),
                    id(found.memory[place]),
                    *((number.get(source), id(found.moves[source, place])) for source in self._edges[place]),
                )
                for place in inside
            ),
        )
        if signature not in self._bounds:
            try:
                self._bounds[signature] = solve(
                    self._problem(inside, flights, None), gap=self._gap, seconds=self._seconds
                ).bound
            except OverLimit:
                self._bounds[signature] = math.inf
        return self._bounds[signature]

    def solved(self, first: int, last: int, flights: int, around: Sequence[int]) -> tuple[list[int], Solution]:
        """The operators from one place to before another, and their best configurations, where those around them have
        what is given; raises OverLimit where they do not keep the limit."""
        inside = self._inside(first, last)
        return inside, solve(self._problem(inside, flights, around), gap=self._gap, seconds=self._seconds)

    def _inside(self, first: int, last: int) -> list[int]:
        return sorted(place for members in self._members[first:last] for place in members)

    def _problem(self, inside: list[int], flights: int, around: Sequence[int] | None) -> Problem:
        number = {place: at for at, place in enumerate(inside)}
        costs: list[Table] = []
        pairs: dict[tuple[int, int], Table] = {}
        for place in inside:
            own = self.found.compute[place]
            for source in self._edges[place]:
                table = self.found.moves[source, place]
                if source in number:
                    pairs[number[source], number[place]] = table
                else:
                    own = own + (table.min(0) if around is None else table[around[source]])
            for reader in self._readers[place]:
                if around is not None and reader not in number:
                    own = own + self.found.moves[place, reader][:, around[reader]]
            costs.append(own)
        if not flights or math.isinf(self.limit):
            return Problem(tuple(costs), pairs)
        weights = tuple(self._weight(place, flights) for place in inside)
        return Problem(tuple(costs), pairs, weights, self.limit)

    def _weight(self, place: int, flights: int) -> Table:
        """Bytes of each configuration with so many micro-batches in flight."""
        times = 1 if self._fixed[place] else flights
        memory = self.found.memory[place]
        return self._weights.setdefault((id(memory), times), times * memory)
