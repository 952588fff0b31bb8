"""Repeated layers tied on request: a smaller problem whose picks give all vertices of a group one configuration.

Its optimum may lie above that of the problem itself (ties between 1 and 2 % are known), so nothing is tied unasked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weft.errors import PlanError
from weft.plan.solve.problem import Problem, Table

Expand = Callable[[Sequence[int]], tuple[int, ...]]


def tied(problem: Problem, groups: Sequence[Sequence[int]]) -> tuple[Problem, Expand]:
    """The problem in which the vertices of each group pick the same place in their lists of configurations, and the
    function from its picks to picks of ``problem``. Costs and weights of a pick are the same in both."""
    home = _homes(problem, groups)
    count = max(home, default=-1) + 1
    unary: list[Table | None] = [None] * count
    weights: list[Table | None] = [None] * count
    for vertex, place in enumerate(home):
        unary[place] = _plus(unary[place], problem.unary[vertex])
        if problem.weights is not None:
            weights[place] = _plus(weights[place], problem.weights[vertex])
    pairs: dict[tuple[int, int], Table] = {}
    for (i, j), table in problem.pairs.items():
        one, two = home[i], home[j]
        if one == two:
            unary[one] = _plus(unary[one], np.diagonal(table))
        elif one < two:
            pairs[one, two] = _plus(pairs.get((one, two)), table)
        else:
            pairs[two, one] = _plus(pairs.get((two, one)), table.T)
    kept = tuple(costs for costs in unary if costs is not None)
    heavy = tuple(table for table in weights if table is not None) if problem.weights is not None else None

    def expand(pick: Sequence[int]) -> tuple[int, ...]:
        return tuple(pick[place] for place in home)

    return Problem(kept, pairs, heavy, problem.limit), expand


def _homes(problem: Problem, groups: Sequence[Sequence[int]]) -> list[int]:
    """The vertex of the smaller problem for each vertex, numbered as they first occur."""
    group = list(range(len(problem.unary)))
    seen: set[int] = set()
    for members in groups:
        for vertex in members:
            if not 0 <= vertex < len(group) or vertex in seen:
                raise PlanError(f"vertex {vertex} is in two groups, or is none of the {len(group)} vertices")
            one, other = len(problem.unary[members[0]]), len(problem.unary[vertex])
            if one != other:
                raise PlanError(
                    f"vertices {members[0]} and {vertex} cannot be tied: they have {one} and {other} configurations"
                )
            seen.add(vertex)
            group[vertex] = min(members)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(first, len(numbers)) for first in group]


def _plus(one: Table | None, other: Table) -> Table:
    return other if one is None else one + other
