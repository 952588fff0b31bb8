"""The optimum under a limit by cases: where one choice decides for all layers, each case has a price of its own.

A price bounds the optimum as if picks could be mixed. If all layers read one tensor, half a way to lay it and half
another is no pick, and the bound is too low. So the problem is divided by the configurations of the vertex with the
most edges of those in which the picks over and under the limit differ; the case with the lowest bound is next.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from weft.errors import PlanError
from weft.plan.solve.branch import narrowed
from weft.plan.solve.price import Minimum, Priced, costs_at, priced
from weft.plan.solve.problem import EXACT, Index, Problem
from weft.plan.solve.splice import places

Minima = Callable[[Problem], Minimum]
Lightest = Callable[[Problem], list[int]]


def divided(
    problem: Problem,
    found: Priced,
    minimum: Minima,
    lightest: Lightest,
    gap: float,
    deadline: float,
) -> Priced:
    """What was found with one price, with the bound raised and the cost lowered until they are within ``gap``, or to
    the deadline. ``minimum`` solves cases without the limit, ``lightest`` gives a pick within it or raises."""
    cases: list[tuple[float, int, list[Index]]] = []
    closed, made = found.cost, 0  # the least bound of all cases that are done with, how many there were
    node, kept = found, [np.arange(len(costs)) for costs in problem.unary]
    while True:
        if node.cost < found.cost:
            found = replace(found, pick=node.pick, cost=node.cost)
        vertex = _deciding(problem, node)
        if vertex is None or _near(found.cost, node.bound, gap):
            closed = min(closed, node.bound)
        else:
            for place in kept[vertex]:
                made += 1
                case = [*kept[:vertex], np.array([place]), *kept[vertex + 1 :]]
                heapq.heappush(cases, (_bound(problem, case, node, minimum, deadline), made, case))
        solved = None
        while solved is None:
            if not cases or _near(found.cost, cases[0][0], gap) or time.monotonic() > deadline:
                bound = min([closed, found.cost, *[least for least, _, _ in cases]])
                return replace(found, bound=max(found.bound, bound))
            least, _, kept = heapq.heappop(cases)
            solved = _solved(narrowed(problem, kept), minimum, lightest, deadline)
        whole = [_whole(kept, pick) for pick in (solved.pick, solved.over, solved.under)]
        node = replace(solved, pick=whole[0] or [], over=whole[1], under=whole[2], bound=max(least, solved.bound))


def _solved(part: Problem, minimum: Minima, lightest: Lightest, deadline: float) -> Priced | None:
    try:
        return priced(part, minimum(part), lightest(part), deadline)
    except PlanError:  # nothing in this case is within the limit
        return None


def _bound(problem: Problem, case: list[Index], node: Priced, minimum: Minima, deadline: float) -> float:
    """The bound of a case at the price of what it is a case of."""
    if time.monotonic() > deadline:
        return node.bound
    part = narrowed(problem, case)
    try:
        return max(node.bound, minimum(part)(costs_at(part, node.price)).bound - node.price * problem.limit)
    except PlanError:
        return math.inf


def _whole(kept: list[Index], pick: list[int] | None) -> list[int] | None:
    return None if pick is None else [int(index[k]) for index, k in zip(kept, pick, strict=True)]


def _near(cost: float, bound: float, gap: float) -> bool:
    return cost - bound <= max(gap, EXACT) * abs(cost)


def _deciding(problem: Problem, found: Priced) -> int | None:
    """Of the vertices in which the picks over and under the limit differ, that with the most edges; of equals the one
    in the middle."""
    if found.over is None or found.under is None:
        return None
    differ = [v for v, (one, other) in enumerate(zip(found.over, found.under, strict=True)) if one != other]
    if not differ:
        return None
    degree = dict.fromkeys(differ, 0)
    for edge in problem.pairs:
        for vertex in edge:
            if vertex in degree:
                degree[vertex] += 1
    most = max(degree.values())
    order = places(problem)
    ends = sorted((v for v in differ if degree[v] == most), key=order.__getitem__)
    return ends[len(ends) // 2]
