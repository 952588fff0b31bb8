"""The optimum under a limit on the weights: first priced; then, where that leaves a gap, built within it or by case."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from weft.errors import PlanError
from weft.plan.solve.beam import beam
from weft.plan.solve.divide import Lightest, Minima, divided
from weft.plan.solve.price import Minimum, Priced, priced
from weft.plan.solve.problem import EXACT, Problem
from weft.plan.solve.splice import changed

_ROWS = (256, 4096, 16384, 65536)
_EFFORT = 1 << 27  # choices weighed for exactness alone, once the gap is as asked
_ROUNDING = 1e-12


class OverLimit(PlanError):
    """No pick keeps the limit: the least weight of any is ``least``."""

    def __init__(self, least: float, limit: float) -> None:
        self.least, self.limit = least, limit
        super().__init__(
            f"no pick keeps the limit of {limit:,.6g}: the least weight is {least:,.6g}, {least - limit:,.6g} more"
        )


def limited(
    problem: Problem, minimum: Minima, lightest: Lightest, gap: float, deadline: float, enough: float = math.inf
) -> Priced:
    """The optimum, or a pick within ``gap`` of it: exact as far as that takes little, and no longer than the deadline.
    ``minimum`` solves it (or a part of it) without the limit, ``lightest`` gives a pick within the limit. A bound of
    ``enough`` need not be raised further."""
    least = minimum(problem)
    start = priced(problem, least, lightest(problem), deadline)
    found = bettered(problem, start, least, gap, deadline)
    found = _built(problem, start, found, gap, enough, _soon(deadline, 1 / 8))
    if found.bound < _aim(found, gap, enough):
        found = divided(problem, found, minimum, lightest, gap, _soon(deadline, 2 / 3))
        found = _built(problem, start, found, gap, enough, deadline)
    return found


def bettered(problem: Problem, found: Priced, least: Minimum, gap: float, deadline: float) -> Priced:
    """What was found, perhaps with a better pick, one that changes its way at some layer."""
    deadline = _soon(deadline, 1 / 8)

    def enough(cost: float) -> bool:
        return _near(replace(found, cost=cost), gap / 4) or time.monotonic() > deadline

    if enough(found.cost):
        return found
    return _better(problem, found, changed(problem, lambda costs: least(costs).pick, found.price, found.pick, enough))


def _built(problem: Problem, start: Priced, found: Priced, gap: float, enough: float, deadline: float) -> Priced:
    """What was found, bettered by picks that are built from the elimination that gave the bound to start with: for the
    optimum as long as that is little work, then only to know whether any pick is below what is aimed at."""
    choices = sum(map(len, problem.unary))
    for rows in _ROWS:
        little = rows * choices <= _EFFORT
        aim = _aim(found, EXACT, math.inf) if little else _aim(found, gap, enough)
        if found.bound >= aim or start.elimination is None or time.monotonic() > deadline:
            break
        top = found.cost + _ROUNDING * abs(found.cost) if little else aim
        slack = top - start.bound
        met = beam(start.elimination, problem.weights or (), problem.limit, start.price, slack, rows, deadline)
        if met.pick is not None and problem.weight(met.pick) <= problem.limit:
            found = _better(problem, found, met.pick)
        found = replace(found, bound=max(found.bound, min(found.cost, top, start.bound + met.dropped)))
    return found


def _aim(found: Priced, gap: float, enough: float) -> float:
    """The bound that is to be reached."""
    return min(found.cost - max(gap, EXACT) * abs(found.cost), enough)


def _better(problem: Problem, found: Priced, pick: list[int]) -> Priced:
    cost = problem.cost(pick)
    return replace(found, pick=pick, cost=cost) if cost < found.cost else found


def _near(found: Priced, gap: float) -> bool:
    return found.cost - found.bound <= max(gap, EXACT) * abs(found.cost)


def _soon(deadline: float, share: float) -> float:
    now = time.monotonic()
    return now + share * (deadline - now)
