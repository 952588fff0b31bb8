"""What a unit of weight costs: the price at which the cheapest assignment just keeps the limit, and the bound that it
gives.

For any price the least of ``cost + price * weight``, less ``price * limit``, is at most the optimum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from weft.plan.solver.elimination import Elimination, share_equal
from weft.plan.solver.local_search import Neighbours, crossover, local_search, neighbours
from weft.plan.solver.problem import EXACT, Problem, Table


@dataclass(frozen=True, slots=True)
class BoundedSolution:
    """An assignment within the limit, a bound on the optimum, and the price of a unit of weight that gave the bound."""

    assignment: list[int]
    cost: float
    bound: float
    price: float = 0.0
    elimination: Elimination | None = None
    entries: int = 0  # of the largest table that was made
    width: int = 0  # the most vertices that one was summed over
    over: list[int] | None = None  # the best assignments at that price over and under the limit, where there are both
    under: list[int] | None = None

    def within(self, gap: float) -> bool:
        """Whether the cost is at most ``gap`` above the bound, relative to it."""
        return near(self.cost, self.bound, gap)


def near(cost: float, bound: float, gap: float) -> bool:
    return cost - bound <= max(gap, EXACT) * abs(cost)


# What is known of the least cost, given the costs of all configurations.
Minimizer = Callable[[list[Table]], BoundedSolution]


def costs_at(problem: Problem, price: float) -> list[Table]:
    """What each configuration costs with its weight at this price."""
    if problem.weights is None or price == 0.0:
        return share_equal(problem.unary)
    return share_equal([costs + price * weights for costs, weights in zip(problem.unary, problem.weights, strict=True)])


def lagrangian(problem: Problem, minimum: Minimizer, light: list[int], deadline: float = math.inf) -> BoundedSolution:
    """The best bound that a price gives, and the best assignment met on the way to it, given an assignment within the
    limit; at the deadline those so far."""
    around = neighbours(problem)
    found = minimum(costs_at(problem, 0.0))
    heavy = found.assignment
    over = problem.cost(heavy), problem.weight(heavy)
    if over[1] <= problem.limit:
        return found
    best = _within(problem, light, around)
    cost = problem.cost(best)
    under, lighter = (cost, problem.weight(best)), best
    # Over and under the limit, two assignments as points (cost, weight); the line between them gives the next price. An
    # assignment below that line takes the place of one of them; if there is none, no other price gives a better bound.
    while (slope := (under[0] - over[0]) / (over[1] - under[1])) > 0:
        least = minimum(costs_at(problem, slope))
        if (bound := least.bound - slope * problem.limit) > found.bound:
            found = replace(least, bound=bound, price=slope)
        point = problem.cost(least.assignment), problem.weight(least.assignment)
        line = under[0] + slope * under[1]
        if point[0] + slope * point[1] >= line - 1e-12 * abs(line) or time.monotonic() > deadline:
            break
        if point[1] > problem.limit:
            over, heavy = point, least.assignment
        else:
            under, lighter = point, least.assignment
    for assignment in (lighter, crossover(problem, lighter, heavy)):
        met = _within(problem, assignment, around)
        if (new := problem.cost(met)) < cost:
            best, cost = met, new
    return replace(found, assignment=best, cost=cost, bound=min(cost, found.bound), over=heavy, under=lighter)


def _within(problem: Problem, assignment: list[int], around: Neighbours) -> list[int]:
    better = local_search(problem, assignment, around)
    return better if problem.weight(better) <= problem.limit else assignment  # rounding may have taken it over
