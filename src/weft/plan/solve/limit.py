"""The optimum under a limit on the weights: first priced; then, where that leaves a gap, built within it or by case."""

from __future__ import annotations

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


def limited(problem: Problem, minimum: Minima, lightest: Lightest, gap: float, deadline: float) -> Priced:
    """The optimum, or a pick within ``gap`` of it: exact as far as that takes little, and no longer than the deadline.
    ``minimum`` solves it (or a part of it) without the limit, ``lightest`` gives a pick within the limit."""
    least = minimum(problem)
    found = priced(problem, least, lightest(problem), deadline)
    found = _changed(problem, found, least, gap, _soon(deadline, 1 / 4))
    whole, base = found.elimination, found.bound
    choices, cases = sum(map(len, problem.unary)), False
    for rows in _ROWS:
        little = rows * choices <= _EFFORT and whole is not None
        if not little and not cases and not _near(found, gap):
            found, cases = divided(problem, found, minimum, lightest, gap, _soon(deadline, 2 / 3)), True
        if _near(found, EXACT if little else gap) or whole is None or time.monotonic() > deadline:
            break
        slack = found.cost - base + _ROUNDING * abs(found.cost)
        met = beam(whole, problem.weights or (), problem.limit, found.price, slack, rows, deadline)
        if met.pick is not None and problem.weight(met.pick) <= problem.limit:
            found = _better(problem, found, met.pick)
        found = replace(found, bound=max(found.bound, min(found.cost, base + met.dropped)))
    return found


def _changed(problem: Problem, found: Priced, least: Minimum, gap: float, deadline: float) -> Priced:
    def enough(cost: float) -> bool:
        return _near(replace(found, cost=cost), gap / 4) or time.monotonic() > deadline

    if enough(found.cost):
        return found
    return _better(problem, found, changed(problem, lambda costs: least(costs).pick, found.price, found.pick, enough))


def _better(problem: Problem, found: Priced, pick: list[int]) -> Priced:
    cost = problem.cost(pick)
    return replace(found, pick=pick, cost=cost) if cost < found.cost else found


def _near(found: Priced, gap: float) -> bool:
    return found.cost - found.bound <= max(gap, EXACT) * abs(found.cost)


def _soon(deadline: float, share: float) -> float:
    now = time.monotonic()
    return now + share * (deadline - now)
