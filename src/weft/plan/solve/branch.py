"""The optimum of graphs too large to eliminate at once: bounded, narrowed to what can matter, and split if need be.

The part with the lowest bound comes first. Its bound is raised and its configurations narrowed until it is solved or
what is left is easily eliminated; if nothing more is won and it cannot be eliminated, one vertex of its entangled core
is fixed to each of its configurations in turn. So the least bound of all parts is a bound on the optimum at any time.
Where a pick within some part of the optimum will do, configurations that could not better the best pick by more are
left out too: of a model whose layers all read one tensor, a few ways to lay it are left, and what was too entangled
is eliminated in a second.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from weft.plan.solve.dual import Dual, effort_of_sweep
from weft.plan.solve.edges import compressed
from weft.plan.solve.elimination import Network, effort, same
from weft.plan.solve.local import Neighbours, neighbours, polished
from weft.plan.solve.price import Priced, costs_at
from weft.plan.solve.problem import EXACT, Index, Problem

EASY = 1 << 24  # entries: summed in some hundredths of a second
_SWEEPS = 2000
_ROUNDING = 1e-6
_LOOKS = (9, 39, 159, 639)  # sweeps after which it is asked what eliminating the rest would take
_STALL = 1e-3  # of the gap, won in ten sweeps

Exact = Callable[[Problem, Network, float], Priced | None]  # given the bound that is enough


@dataclass(slots=True)
class _Best:
    """The cheapest pick so far that keeps the limit."""

    problem: Problem
    around: Neighbours
    pick: list[int]
    cost: float

    def offer(self, pick: list[int], polish: bool = True) -> None:
        if polish:
            pick = polished(self.problem, pick, self.around)
        if self.problem.weight(pick) <= self.problem.limit and (cost := self.problem.cost(pick)) < self.cost:
            self.pick, self.cost = pick, cost

    def aim(self, gap: float, enough: float) -> float:
        """The bound that is to be reached."""
        return min(self.cost - gap * abs(self.cost), enough) if self.cost < math.inf else enough


@dataclass(slots=True)
class _Part:
    """What some configurations of each vertex leave of the problem."""

    problem: Problem
    kept: list[Index]
    bound: float
    network: Network | None  # None: solved, no pick in it is better than the bound

    def whole(self, pick: list[int]) -> list[int]:
        return [int(index[k]) for index, k in zip(self.kept, pick, strict=True)]

    def narrowed(self, alive: list[Index], entries: int) -> _Part:
        if sum(map(len, alive)) == sum(map(len, self.kept)):
            return self
        problem = narrowed(self.problem, alive)
        kept = [index[still] for index, still in zip(self.kept, alive, strict=True)]
        return _Part(problem, kept, self.bound, Network(len(kept), compressed(problem.pairs), entries))


def branched(
    problem: Problem,
    network: Network,
    start: list[int],
    price: float,
    exact: Exact,
    entries: int,
    gap: float,
    deadline: float,
    spare: float = 0.0,
    enough: float = math.inf,
) -> Priced:
    """The optimum, or at the deadline the best pick and bound so far. ``exact`` solves what can be eliminated (None: no
    pick in it is allowed). Weights cost ``price`` in the bounds. A bound of ``enough``, or within ``spare``, will do;
    once a part had to be split, one within ``gap``. The cost is inf if ``start`` is not allowed and no pick that is was
    found; the bound then tells whether there is none."""
    best = _Best(problem, neighbours(problem), start, math.inf)
    best.offer(start, polish=False)
    best.offer(start)
    all_of_them = [np.arange(len(costs)) for costs in problem.unary]
    waiting: list[tuple[float, int, list[Index]]] = [(-math.inf, 0, all_of_them)]
    largest = widest = 0
    gap, spare = (1 - _ROUNDING) * gap, (1 - _ROUNDING) * spare
    closed, made = math.inf, 0  # the least bound of all parts that are done with; how many parts there were
    while waiting and min(closed, waiting[0][0]) < best.aim(gap if made else spare, enough):
        if made and time.monotonic() > deadline:
            break
        bound, _, kept = heapq.heappop(waiting)
        part = _Part(problem, all_of_them, bound, network).narrowed(kept, entries)
        part = _raised(part, price, best, entries, deadline, spare, enough)
        late = time.monotonic() > deadline and best.cost < math.inf
        if part.network is None or late:
            closed = min(closed, part.bound)
        elif part.network.fits:
            solved = exact(part.problem, part.network, best.aim(spare, enough))
            if solved is not None:
                best.offer(part.whole(solved.pick), polish=False)
                largest, widest = max(largest, solved.entries), max(widest, solved.width)
                closed = min(closed, max(part.bound, solved.bound))
        else:
            vertex = _entangled(part.problem, part.network.order.left)
            for place in part.kept[vertex]:
                made += 1
                fixed = [*part.kept[:vertex], np.array([place]), *part.kept[vertex + 1 :]]
                heapq.heappush(waiting, (part.bound, made, fixed))
    bound = min([closed, *[lower for lower, _, _ in waiting], best.aim(spare, enough)])
    return Priced(best.pick, best.cost, bound, price, None, largest, widest)


def narrowed(problem: Problem, kept: list[Index]) -> Problem:
    """The problem with only these configurations of each vertex."""
    whole = [len(index) == len(costs) for index, costs in zip(kept, problem.unary, strict=True)]
    if all(whole):
        return problem
    pairs = {
        (i, j): table if whole[i] and whole[j] else table[np.ix_(kept[i], kept[j])]
        for (i, j), table in problem.pairs.items()
    }
    unary = tuple(costs[index] for costs, index in zip(problem.unary, kept, strict=True))
    weights = problem.weights and tuple(table[index] for table, index in zip(problem.weights, kept, strict=True))
    return Problem(unary, pairs, weights, problem.limit)


def sweeps_worth(problem: Problem, network: Network) -> float:
    """In the time of how many sweeps the problem can be eliminated; inf where it cannot."""
    if not network.fits:
        return math.inf
    summed = network.order.work
    if summed > EASY:
        summed = effort(network, same(problem.unary))
    return 0.0 if summed <= EASY else summed / effort_of_sweep(network.edges)


def _raised(
    part: _Part, price: float, best: _Best, entries: int, deadline: float, spare: float, enough: float
) -> _Part:
    """A part with its bound raised, and without what cannot better the best pick by more than ``spare``: until it is
    solved, easily eliminated, or nothing more is won."""
    while part.network is not None and (worth := sweeps_worth(part.problem, part.network)) > 0:
        dual = Dual(costs_at(part.problem, price), part.network.edges)
        paid = price * part.problem.limit if price else 0.0
        count = sum(map(len, part.kept))
        before, shrunk = -math.inf, False
        for sweep in range(_SWEEPS):
            upper = best.aim(spare, enough) + paid
            pick = dual.sweep(sweep % 2 == 0, upper + EXACT / 100 * abs(upper))
            if sweep % 10 in (0, 1, 4, 9):
                best.offer(part.whole(pick))
            part.bound = max(part.bound, dual.bound - paid)
            left = sum(int(alive.sum()) for alive in dual.alive)
            if part.bound >= best.aim(max(spare, EXACT), enough) or not all(alive.any() for alive in dual.alive):
                return replace(part, bound=min(part.bound, best.cost), network=None)
            if shrunk := left < count / 4:
                break
            if sweep % 10 == 9:
                if part.bound - before <= _STALL * (best.cost - part.bound) or time.monotonic() > deadline:
                    break
                before = part.bound
            if sweep + 1 >= worth / 2:
                break  # by now it might have been eliminated
            if sweep in _LOOKS and left < count:
                rest = part.narrowed(_alive(dual), entries)
                if rest.network is not None and sweeps_worth(rest.problem, rest.network) <= sweep + 1:
                    return rest
        part = part.narrowed(_alive(dual), entries)
        if not shrunk:
            return part
    return part


def _alive(dual: Dual) -> list[Index]:
    return [np.flatnonzero(alive) for alive in dual.alive]


def _entangled(problem: Problem, left: tuple[int, ...]) -> int:
    """The vertex with most edges among those that no step could eliminate."""
    inside = set(left)
    degree = dict.fromkeys(left, 0)
    for i, j in problem.pairs:
        if i in inside and j in inside:
            degree[i] += 1
            degree[j] += 1
    return max((vertex for vertex in left if len(problem.unary[vertex]) > 1), key=lambda vertex: degree[vertex])
