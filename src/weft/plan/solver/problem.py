"""What is solved: a configuration for each vertex of a graph, at the least sum of the costs of vertices and edges."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.errors import PlanError

Table = NDArray[np.float64]
Index = NDArray[np.intp]

EXACT = 1e-9  # a bound this near to the cost, relative to it, is the optimum


@dataclass(frozen=True, slots=True)
class Problem:
    """Vertex v takes one of ``len(unary[v])`` configurations. ``pairs[i, j]``, i < j, has a row for each configuration
    of i and a column for each of j. Where there are ``weights`` (a number >= 0 for each configuration, such as bytes),
    those that are taken sum to at most ``limit``."""

    unary: tuple[Table, ...]
    pairs: Mapping[tuple[int, int], Table]
    weights: tuple[Table, ...] | None = None
    limit: float = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "unary", tuple(map(_table, self.unary)))
        object.__setattr__(self, "pairs", {edge: _table(table) for edge, table in self.pairs.items()})
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(map(_table, self.weights)))

    def cost(self, assignment: Sequence[int]) -> float:
        """The sum of the costs of an assignment, summed exactly: the same whatever the order of the tables."""
        costs = [float(costs[k]) for costs, k in zip(self.unary, assignment, strict=True)]
        costs += [float(table[assignment[i], assignment[j]]) for (i, j), table in self.pairs.items()]
        return math.fsum(costs)

    def weight(self, assignment: Sequence[int]) -> float:
        if self.weights is None:
            return 0.0
        return math.fsum(float(weights[k]) for weights, k in zip(self.weights, assignment, strict=True))

    def lightest(self) -> list[int]:
        """The assignment of the least weight; raises `OverLimit` where it does not keep the limit."""
        if self.weights is None:
            return [0] * len(self.unary)
        assignment = [int(weights.argmin()) for weights in self.weights]
        if (least := self.weight(assignment)) > self.limit:
            raise OverLimit(least, self.limit)
        return assignment

    @property
    def limited(self) -> bool:
        """Whether the limit can matter at all."""
        return self.weights is not None and math.fsum(float(weights.max()) for weights in self.weights) > self.limit


class OverLimit(PlanError):
    """No assignment keeps the limit: the least weight of any is ``least``."""

    def __init__(self, least: float, limit: float) -> None:
        self.least, self.limit = least, limit
        super().__init__(
            f"no assignment keeps the limit of {limit:,.6g}: the least weight is {least:,.6g}, "
            f"{least - limit:,.6g} more"
        )


@dataclass(frozen=True, slots=True)
class Effort:
    """How far a solution goes: tables of at most ``entries``, to within ``gap`` of the optimum, until ``deadline``."""

    entries: int
    gap: float
    deadline: float

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline

    def part(self, share: float) -> Effort:
        """With a share of the time that is left."""
        now = time.monotonic()
        return replace(self, deadline=now + share * (self.deadline - now))


@dataclass(frozen=True, slots=True)
class Solution:
    """An assignment that keeps the limit, and what is known of the optimum: ``bound <= optimum <= cost``."""

    assignment: tuple[int, ...]
    cost: float
    bound: float
    weight: float = 0.0
    entries: int = 0  # of the largest table that was made
    method: str = "elimination"

    @property
    def gap(self) -> float:
        """How far the cost may lie above the optimum, relative to the cost."""
        return 0.0 if self.cost == self.bound else (self.cost - self.bound) / max(abs(self.cost), abs(self.bound))

    @property
    def optimal(self) -> bool:
        return self.gap <= EXACT


def _table(values: Table) -> Table:
    return np.ascontiguousarray(values, dtype=np.float64)
