"""Solves a problem by the cheapest way that proves its answer."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from weft.errors import PlanError
from weft.plan.solve.branch import branched, narrowed, sweeps_worth
from weft.plan.solve.divide import Minima
from weft.plan.solve.edges import compressed
from weft.plan.solve.elimination import Network, eliminate, same
from weft.plan.solve.limit import OverLimit, bettered, limited
from weft.plan.solve.price import Minimum, Priced, priced
from weft.plan.solve.problem import EXACT, Index, Problem, Solution, Table

ENTRIES = 1 << 25  # of one table: 256 MiB
_DEAR = 32  # sweeps: what is dearer to eliminate is bounded, for each price anew


def solve(problem: Problem, *, gap: float = 0.01, entries: int = ENTRIES, seconds: float | None = 60.0) -> Solution:
    """The optimum and its proof, or a pick with a bound.

    The optimum is proven wherever bounds, or eliminations with tables of at most ``entries``, do it. Where the graph
    has to be split into parts, or weights have a limit and exactness would take long, the pick is at most ``gap`` above
    the optimum, unless ``seconds`` run out first; the bound tells. Raises `OverLimit` where no pick keeps the limit,
    and `PlanError` where all are forbidden.

    >>> costs = Problem((np.array([0.0, 3.0]), np.array([2.0, 0.0])), {(0, 1): np.array([[0.0, 9.0], [9.0, 0.0]])})
    >>> found = solve(costs)
    >>> found.pick, found.cost, found.optimal
    ((0, 0), 2.0, True)
    """
    started, deadline = time.process_time(), time.monotonic() + (math.inf if seconds is None else seconds)
    kept = _allowed(problem)
    part = problem if kept is None else narrowed(problem, kept)
    network = Network(len(part.unary), compressed(part.pairs), entries)
    found, method = _solved(part, network, entries, gap, deadline)
    pick = found.pick if kept is None else [int(index[k]) for index, k in zip(kept, found.pick, strict=True)]
    cost = problem.cost(pick)
    return Solution(
        pick=tuple(pick),
        cost=cost,
        bound=min(cost, found.bound),
        weight=problem.weight(pick),
        price=found.price,
        method=method,
        entries=found.entries,
        width=found.width,
        seconds=time.process_time() - started,
    )


def _solved(problem: Problem, network: Network, entries: int, gap: float, deadline: float) -> tuple[Priced, str]:
    sweeps = sweeps_worth(problem, network)
    if sweeps == 0 and not problem.limited:
        return _eliminated(problem, network), "elimination"
    light = _lightest(problem, entries)
    if not problem.limited:
        return branched(problem, network, light, 0.0, _eliminated_or_none, entries, gap, deadline), "bounds"
    dear = sweeps > _DEAR
    minimum = _minima(problem, network, light, entries, gap, deadline)

    def lightest(part: Problem) -> list[int]:
        return light if part is problem else _lightest(part, entries)

    def exact(part: Problem, inner: Network, enough: float) -> Priced | None:
        try:
            start = _lightest(part, entries)
            return limited(part, _minima(part, inner, start, entries, gap, deadline), lightest, gap, deadline, enough)
        except PlanError:  # nothing in this part is allowed
            return None

    if not dear:
        return limited(problem, minimum, lightest, gap, deadline), "elimination, weights priced"
    least = minimum(problem)
    found = priced(problem, least, light, deadline)
    if not network.fits:  # else what is left of it soon will be eliminated, and picks are bettered there
        found = bettered(problem, found, least, gap, deadline)
    before = None
    while found.cost - found.bound > max(gap, EXACT) * abs(found.cost) and found != before:
        before = found
        # What is little above the bound is soon looked through: it holds a better pick, or the bound rises.
        step = max(gap / 2 * abs(found.cost), (found.cost - found.bound) / 8)
        enough = found.bound + step if gap else math.inf
        more = branched(problem, network, found.pick, found.price, exact, entries, gap, deadline, gap, enough)
        found = replace(more, bound=max(found.bound, more.bound))
        if time.monotonic() > deadline:
            break
    return found, "bounds, weights priced"


def _minima(problem: Problem, network: Network, light: list[int], entries: int, gap: float, deadline: float) -> Minima:
    """What solves the problem and parts of it without the limit: by elimination where that is not dear."""

    def minimum(part: Problem) -> Minimum:
        inner = network if part is problem else Network(len(part.unary), compressed(part.pairs), entries)
        if sweeps_worth(part, inner) <= _DEAR:
            return _eliminating(inner)
        start = light if part is problem else _lightest(part, entries)
        return _bounding(part, inner, start, entries, gap, deadline)

    return minimum


def _eliminating(network: Network) -> Minimum:
    def minimum(costs: list[Table]) -> Priced:
        done = eliminate(network, costs)
        return Priced(done.pick(), done.value, done.value, 0.0, done, network.order.entries, network.order.width)

    return minimum


def _bounding(
    problem: Problem, network: Network, start: list[int], entries: int, gap: float, deadline: float
) -> Minimum:
    def cheap(part: Problem, inner: Network, _: float) -> Priced | None:
        if gap and sweeps_worth(part, inner) > _DEAR:  # a bound that is nearly as good takes far less
            return Priced([0] * len(part.unary), math.inf, -math.inf)
        return _eliminated_or_none(part, inner)

    def minimum(costs: list[Table]) -> Priced:
        part = Problem(tuple(costs), problem.pairs)
        return branched(part, network, start, 0.0, cheap, entries, gap / 16, deadline, gap / 16)

    return minimum


def _eliminated(problem: Problem, network: Network) -> Priced:
    done = eliminate(network, same(problem.unary))
    if math.isinf(done.value):
        raise PlanError(_FORBIDDEN)
    pick = done.pick()
    cost = problem.cost(pick)
    return Priced(pick, cost, min(cost, done.value), 0.0, done, network.order.entries, network.order.width)


def _lightest(problem: Problem, entries: int) -> list[int]:
    """An allowed pick of the least weight."""
    weights = problem.weights or tuple(np.zeros(len(costs)) for costs in problem.unary)
    distinct = {id(table): table for table in problem.pairs.values()}
    forbidding = {at: np.where(np.isinf(table), np.inf, 0.0) for at, table in distinct.items() if np.isinf(table.max())}
    forbids = {edge: forbidding[id(table)] for edge, table in problem.pairs.items() if id(table) in forbidding}
    alone = Problem(weights, forbids)
    network = Network(len(weights), compressed(forbids), entries)
    if network.fits:
        pick = _eliminated(alone, network).pick
    else:
        found = branched(alone, network, [0] * len(weights), 0.0, _eliminated_or_none, entries, EXACT, math.inf)
        if math.isinf(found.cost):
            raise PlanError(_FORBIDDEN)
        pick = found.pick
    if (least := problem.weight(pick)) > problem.limit:
        raise OverLimit(least, problem.limit)
    return pick


def _eliminated_or_none(problem: Problem, network: Network, _: float = math.inf) -> Priced | None:
    try:
        return _eliminated(problem, network)
    except PlanError:
        return None


def _allowed(problem: Problem) -> list[Index] | None:
    """The configurations that are not forbidden, or None if all are allowed."""
    flat = np.concatenate([np.zeros(1), *problem.unary])
    if np.isfinite(flat).all():
        return None
    if not flat.min() > -math.inf:
        raise PlanError("a vertex has a cost that is not a number or -inf; only finite costs and inf can be summed")
    kept = [np.flatnonzero(np.isfinite(costs)) for costs in problem.unary]
    for vertex, index in enumerate(kept):
        if not len(index):
            raise PlanError(f"every configuration of vertex {vertex} is forbidden")
    return kept


_FORBIDDEN = "every pick is forbidden: some vertices have no configurations that may meet"
