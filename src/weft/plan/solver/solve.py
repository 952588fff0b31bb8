"""Solves a problem by the cheapest method that proves its answer.

A limit on the weights is first priced; where that leaves a gap, assignments are built within the limit, and cases of
one vertex are solved apart.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from weft.errors import PlanError
from weft.plan.solver.branch_and_bound import branch_and_bound, sweeps_to_eliminate
from weft.plan.solver.close_gap import MakeMinimizer, beam_search, branch_on_vertex
from weft.plan.solver.elimination import Network, eliminate, share_equal
from weft.plan.solver.lagrangian import BoundedSolution, Minimizer, lagrangian, near
from weft.plan.solver.problem import EXACT, Effort, OverLimit, Problem, Solution, Table

ENTRIES = 1 << 25  # of one table: 256 MiB
_EXPENSIVE = 32  # sweeps: what is more expensive to eliminate is bounded, for each price anew


def solve(
    problem: Problem, *, tolerance: float = 0.01, entries: int = ENTRIES, time_limit: float | None = 60.0
) -> Solution:
    """The optimum and its proof, or an assignment with a bound.

    The optimum is proven wherever bounds, or eliminations with tables of at most ``entries``, do it. Where the graph
    has to be split into parts, or weights have a limit and exactness would take long, the assignment is at most
    ``tolerance`` above the optimum, unless ``time_limit`` seconds run out first; the bound tells. Raises `OverLimit`
    where no assignment keeps the limit.

    >>> costs = Problem((np.array([0.0, 3.0]), np.array([2.0, 0.0])), {(0, 1): np.array([[0.0, 9.0], [9.0, 0.0]])})
    >>> found = solve(costs)
    >>> found.assignment, found.cost, found.optimal
    ((0, 0), 2.0, True)
    """
    if not all(np.isfinite(costs).all() for costs in problem.unary):
        raise PlanError("a vertex has a cost that is not a finite number")
    effort = Effort(entries, tolerance, time.monotonic() + (math.inf if time_limit is None else time_limit))
    found, method = _solved(problem, Network.of(problem, entries), effort)
    cost, weight = problem.cost(found.assignment), problem.weight(found.assignment)
    return Solution(tuple(found.assignment), cost, min(cost, found.bound), weight, found.entries, method)


def _solved(problem: Problem, network: Network, effort: Effort) -> tuple[BoundedSolution, str]:
    sweeps = sweeps_to_eliminate(problem, network)
    if not problem.limited:
        if sweeps == 0:
            return _eliminated(problem, network), "elimination"
        return branch_and_bound(problem, network, problem.lightest(), 0.0, _eliminated, effort), "bounds"
    minimum = _make_minimizer(problem, network, effort)

    def exact(part: Problem, inner: Network, target_bound: float) -> BoundedSolution | None:
        try:
            return solve_limited(part, _make_minimizer(part, inner, effort), effort, target_bound)
        except OverLimit:  # nothing in this part keeps the limit
            return None

    if sweeps <= _EXPENSIVE:
        return solve_limited(problem, minimum, effort), "elimination, weights priced"
    found = lagrangian(problem, minimum(problem), effort)
    gap, before = effort.gap, None
    while not near(found.cost, found.bound, gap) and found != before:
        before = found
        # What is little above the bound is soon looked through: it holds a better assignment, or the bound rises.
        step = max(gap / 2 * abs(found.cost), (found.cost - found.bound) / 8)
        target_bound = found.bound + step if gap else math.inf
        more = branch_and_bound(
            problem, network, found.assignment, found.price, exact, effort, spare=gap, target_bound=target_bound
        )
        found = replace(more, bound=max(found.bound, more.bound))
        if effort.over:
            break
    return found, "bounds, weights priced"


def _make_minimizer(problem: Problem, network: Network, effort: Effort) -> MakeMinimizer:
    """What solves the problem and parts of it without the limit: by elimination where that is not expensive."""

    def minimum(part: Problem) -> Minimizer:
        inner = network if part is problem else Network.of(part, effort.entries)
        if sweeps_to_eliminate(part, inner) <= _EXPENSIVE:
            return _eliminating(inner)
        return _bounding(part, inner, effort)

    return minimum


def _eliminating(network: Network) -> Minimizer:
    def minimum(costs: list[Table]) -> BoundedSolution:
        done = eliminate(network, costs)
        return BoundedSolution(done.assignment(), done.value, done.value, 0.0, done, network.order.entries)

    return minimum


def _bounding(problem: Problem, network: Network, effort: Effort) -> Minimizer:
    finer, start = replace(effort, gap=effort.gap / 16), problem.lightest()

    def cheap(part: Problem, inner: Network, _: float) -> BoundedSolution:
        if effort.gap and sweeps_to_eliminate(part, inner) > _EXPENSIVE:  # a bound nearly as good takes far less
            return BoundedSolution([0] * len(part.unary), math.inf, -math.inf)
        return _eliminated(part, inner)

    def minimum(costs: list[Table]) -> BoundedSolution:
        part = Problem(tuple(costs), problem.pairs)
        return branch_and_bound(part, network, start, 0.0, cheap, finer, spare=finer.gap)

    return minimum


def _eliminated(problem: Problem, network: Network, _: float = math.inf) -> BoundedSolution:
    found = _eliminating(network)(share_equal(problem.unary))
    cost = problem.cost(found.assignment)
    return replace(found, cost=cost, bound=min(cost, found.bound))


_ROWS = (256, 4096, 16384, 65536)
_LITTLE = 1 << 27  # choices weighed for exactness alone, once the gap is as asked
_ROUNDING = 1e-12


def solve_limited(
    problem: Problem, minimum: MakeMinimizer, effort: Effort, target_bound: float = math.inf
) -> BoundedSolution:
    """The optimum, or an assignment within the gap of it: exact as far as that takes little, and no longer than the
    deadline. ``minimum`` solves it (or a part of it) without the limit. A bound of ``target_bound`` need not be raised
    further."""
    start = lagrangian(problem, minimum(problem), effort)
    found = _improved_by_beam(problem, start, start, target_bound, effort.part(1 / 8))
    if found.bound < _target(found, effort.gap, target_bound):
        found = branch_on_vertex(problem, found, minimum, effort.part(2 / 3))
        found = _improved_by_beam(problem, start, found, target_bound, effort)
    return found


def _improved_by_beam(
    problem: Problem, start: BoundedSolution, found: BoundedSolution, target_bound: float, effort: Effort
) -> BoundedSolution:
    """What was found, improved by assignments that are built from the elimination that gave the bound to start with:
    for the optimum as long as that is little work, then only to know whether any assignment is below what is aimed
    at."""
    choices = sum(map(len, problem.unary))
    for rows in _ROWS:
        little = rows * choices <= _LITTLE
        target = _target(found, EXACT, math.inf) if little else _target(found, effort.gap, target_bound)
        if found.bound >= target or start.elimination is None or effort.over:
            break
        top = found.cost + _ROUNDING * abs(found.cost) if little else target
        slack = top - start.bound
        weights = problem.weights or ()
        met, dropped = beam_search(start.elimination, weights, problem.limit, start.price, slack, rows, effort)
        if met is not None and problem.weight(met) <= problem.limit:
            found = _better(problem, found, met)
        found = replace(found, bound=max(found.bound, min(found.cost, top, start.bound + dropped)))
    return found


def _target(found: BoundedSolution, gap: float, target_bound: float) -> float:
    """The bound that is to be reached."""
    return min(found.cost - max(gap, EXACT) * abs(found.cost), target_bound)


def _better(problem: Problem, found: BoundedSolution, assignment: list[int]) -> BoundedSolution:
    cost = problem.cost(assignment)
    return replace(found, assignment=assignment, cost=cost) if cost < found.cost else found
