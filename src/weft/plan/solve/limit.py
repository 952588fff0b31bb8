"""The optimum under a limit on the weights: first priced, then, where the price leaves a gap, built within it."""

from __future__ import annotations

import time
from dataclasses import replace

from weft.errors import PlanError
from weft.plan.solve.beam import beam
from weft.plan.solve.classes import Classes
from weft.plan.solve.price import Minimum, Priced, priced
from weft.plan.solve.problem import EXACT, Problem
from weft.plan.solve.splice import changed

_ROWS = (256, 4096, 16384, 65536)
_EFFORT = 1 << 27  # choices weighed for exactness alone, once the gap is as asked


class OverLimit(PlanError):
    """No pick keeps the limit: the least weight of any is ``least``."""

    def __init__(self, least: float, limit: float) -> None:
        self.least, self.limit = least, limit
        super().__init__(
            f"no pick keeps the limit of {limit:,.6g}: the least weight is {least:,.6g}, {least - limit:,.6g} more"
        )


def limited(
    problem: Problem, minimum: Minimum, classes: Classes, light: list[int], gap: float, deadline: float
) -> Priced:
    """The optimum, or a pick within ``gap`` of it: exact as far as that takes little, and no longer than the deadline.
    ``light`` is a pick within the limit; if ``minimum`` does not eliminate, the gap may stay larger."""
    found = priced(problem, minimum, light, deadline)
    done, weights = found.elimination, problem.weights
    bound = found.bound

    now = time.monotonic()
    half = now + (deadline - now) / 2

    def enough(cost: float) -> bool:
        return cost - bound <= max(gap / 4, EXACT) * abs(cost) or time.monotonic() > half

    pick = found.pick
    if not enough(found.cost):
        pick = changed(problem, lambda costs: minimum(costs).pick, found.price, pick, enough)
    cost = problem.cost(pick)
    if done is None or weights is None:
        return replace(found, pick=pick, cost=cost)
    choices = sum(map(len, problem.unary))
    for rows in _ROWS:
        asked = EXACT if rows * choices <= _EFFORT else gap
        if cost - bound <= asked * abs(cost) or time.monotonic() > deadline:
            break
        slack = cost - found.bound + 1e-12 * abs(cost)
        met = beam(done, classes, weights, problem.limit, found.price, slack, rows, deadline)
        if (
            met.pick is not None
            and problem.weight(met.pick) <= problem.limit
            and (new := problem.cost(met.pick)) < cost
        ):
            pick, cost = met.pick, new
        bound = max(bound, min(cost, found.bound + met.dropped))
    return replace(found, pick=pick, cost=cost, bound=bound)
