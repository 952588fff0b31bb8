"""The optimum of graphs too large to eliminate at once: bounded, narrowed to what can matter, and split if need be.

The part with the lowest bound comes first. Its bound is raised and its configurations narrowed until it is solved or
what is left is easily eliminated; if nothing more is won and it cannot be eliminated, one vertex of its entangled core
is fixed to each of its configurations in turn. So the least bound of all parts is a bound on the optimum at any time.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weft.plan.solve.dual import Dual, effort_of_sweep
from weft.plan.solve.edges import compressed
from weft.plan.solve.elimination import Network, effort, same
from weft.plan.solve.local import Neighbours, neighbours, polished
from weft.plan.solve.price import Priced, costs_at
from weft.plan.solve.problem import EXACT, Index, Problem

EASY = 1 << 24  # entries: summed in some hundredths of a second
_SWEEPS = 2000
_STALL = 1e-3  # of the gap, won in ten sweeps

Exact = Callable[[Problem, Network], Priced | None]


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

    def near(self, bound: float, gap: float) -> bool:
        return self.cost < math.inf and self.cost - bound <= gap * abs(self.cost)


@dataclass(slots=True)
class _Part:
    """What some configurations of each vertex leave of the problem."""

    problem: Problem
    kept: list[Index]
    bound: float
    network: Network | None  # None: solved, no pick in it is better than the bound

    def whole(self, pick: list[int]) -> list[int]:
        return [int(index[k]) for index, k in zip(self.kept, pick, strict=True)]

    def narrow(self, alive: list[Index], entries: int) -> None:
        if sum(map(len, alive)) == sum(map(len, self.kept)):
            return
        self.problem = narrowed(self.problem, alive)
        self.kept = [index[still] for index, still in zip(self.kept, alive, strict=True)]
        self.network = Network(len(self.kept), compressed(self.problem.pairs), entries)


def branched(
    problem: Problem,
    network: Network,
    start: list[int],
    price: float,
    exact: Exact,
    entries: int,
    gap: float,
    deadline: float,
) -> Priced:
    """The optimum, or at the deadline the best pick and bound so far. ``exact`` solves what can be eliminated (None: no
    pick in it is allowed). Weights cost ``price`` in the bounds. Once a part had to be split, a bound within ``gap`` is
    enough. The cost is inf if ``start`` is not allowed and no pick that is was found; the bound then tells whether
    there is none."""
    best = _Best(problem, neighbours(problem), start, math.inf)
    best.offer(start, polish=False)
    best.offer(start)
    all_of_them = [np.arange(len(costs)) for costs in problem.unary]
    waiting: list[tuple[float, int, list[Index]]] = [(-math.inf, 0, all_of_them)]
    largest = widest = 0
    closed, made = math.inf, 0  # the least bound of all parts that are done with; how many parts there were
    while waiting and not best.near(min(closed, waiting[0][0]), gap if made else 0.0):
        if made and time.monotonic() > deadline:
            break
        bound, _, kept = heapq.heappop(waiting)
        part = _Part(problem, all_of_them, bound, network)
        part.narrow(kept, entries)
        _raise(part, price, best, entries, deadline)
        late = time.monotonic() > deadline and best.cost < math.inf
        if part.network is None or late:
            closed = min(closed, part.bound)
        elif part.network.fits:
            solved = exact(part.problem, part.network)
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
    bound = min([closed, *[lower for lower, _, _ in waiting]])
    return Priced(best.pick, best.cost, min(bound, best.cost), price, None, largest, widest)


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


def _raise(part: _Part, price: float, best: _Best, entries: int, deadline: float) -> None:
    """Raises the bound of a part and narrows it, until it is solved, easily eliminated, or nothing more is won."""
    while part.network is not None and (worth := sweeps_worth(part.problem, part.network)) > 0:
        dual = Dual(costs_at(part.problem, price), part.network.edges)
        paid = price * part.problem.limit if price else 0.0
        count = sum(map(len, part.kept))
        before, shrunk = -math.inf, False
        for sweep in range(_SWEEPS):
            upper = best.cost + paid
            pick = dual.sweep(sweep % 2 == 0, upper + EXACT / 100 * abs(upper))
            if sweep % 10 in (0, 1, 4, 9):
                best.offer(part.whole(pick))
            part.bound = max(part.bound, dual.bound - paid)
            left = sum(int(alive.sum()) for alive in dual.alive)
            if best.near(part.bound, EXACT) or not all(alive.any() for alive in dual.alive):
                part.bound, part.network = min(part.bound, best.cost), None
                return
            if shrunk := left < count / 4:
                break
            if sweep % 10 == 9:
                if part.bound - before <= _STALL * (best.cost - part.bound) or time.monotonic() > deadline:
                    break
                before = part.bound
            if sweep + 1 >= worth / 2:
                return  # by now it might have been eliminated
        part.narrow([np.flatnonzero(alive) for alive in dual.alive], entries)
        if not shrunk:
            return


def _entangled(problem: Problem, left: tuple[int, ...]) -> int:
    """The vertex with most edges among those that no step could eliminate."""
    inside = set(left)
    degree = dict.fromkeys(left, 0)
    for i, j in problem.pairs:
        if i in inside and j in inside:
            degree[i] += 1
            degree[j] += 1
    return max((vertex for vertex in left if len(problem.unary[vertex]) > 1), key=lambda vertex: degree[vertex])
