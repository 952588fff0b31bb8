"""The optimum of graphs too large to eliminate at once: bounded, narrowed to what can matter, and split if need be.

The part with the lowest bound comes first. Its bound is raised and its configurations narrowed until it is solved or
what is left is easily eliminated; if nothing more is won and it cannot be eliminated, one vertex of its entangled core
is fixed to each of its configurations in turn. So the least bound of all parts is a bound on the optimum at any time.
Where an assignment within some part of the optimum will do, configurations that could not improve on the best
assignment by more are left out too: of a model whose layers all read one tensor, a few of its placements are left, and
what was too entangled is eliminated in a second.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from weft.plan.solver.dual_bound import DualBound, sweep_work
from weft.plan.solver.elimination import Network, elimination_work, share_equal
from weft.plan.solver.lagrangian import BoundedSolution, Neighbours, costs_at, local_search, neighbours
from weft.plan.solver.problem import EXACT, Effort, Index, Problem

EASY = 1 << 24  # entries: summed in some hundredths of a second
_SWEEPS = 2000
_ROUNDING = 1e-6
_LOOKS = (9, 39, 159, 639)  # sweeps after which it is asked what eliminating the rest would take
_STALL = 1e-3  # of the gap, won in ten sweeps

Exact = Callable[[Problem, Network, float], BoundedSolution | None]  # given the bound that is enough


@dataclass(slots=True)
class _Incumbent:
    """The cheapest assignment so far that keeps the limit."""

    problem: Problem
    around: Neighbours
    assignment: list[int]
    cost: float

    def offer(self, assignment: list[int], polish: bool = True) -> None:
        if polish:
            assignment = local_search(self.problem, assignment, self.around)
        if (
            self.problem.weight(assignment) <= self.problem.limit
            and (cost := self.problem.cost(assignment)) < self.cost
        ):
            self.assignment, self.cost = assignment, cost

    def target(self, gap: float, target_bound: float) -> float:
        """The bound that is to be reached."""
        return min(self.cost - gap * abs(self.cost), target_bound)


@dataclass(slots=True)
class _Subproblem:
    """What some configurations of each vertex leave of the problem."""

    problem: Problem
    kept: list[Index]
    bound: float
    network: Network | None  # None: solved, no assignment in it is better than the bound

    def restricted(self, alive: list[Index], effort: Effort) -> _Subproblem:
        if sum(map(len, alive)) == sum(map(len, self.kept)):
            return self
        problem = restricted(self.problem, alive)
        kept = [index[still] for index, still in zip(self.kept, alive, strict=True)]
        return _Subproblem(problem, kept, self.bound, Network.of(problem, effort.entries))


def branch_and_bound(
    problem: Problem,
    network: Network,
    start: list[int],
    price: float,
    exact: Exact,
    effort: Effort,
    spare: float = 0.0,
    target_bound: float = math.inf,
) -> BoundedSolution:
    """The optimum, or at the deadline the best assignment and bound so far. ``start`` keeps the limit. ``exact`` solves
    what can be eliminated (None: no assignment in it keeps the limit). Weights cost ``price`` in the bounds. A bound of
    ``target_bound``, or within ``spare``, will do; once a part had to be split, one within ``gap``."""
    best = _Incumbent(problem, neighbours(problem), start, problem.cost(start))
    best.offer(start)
    all_of_them = [np.arange(len(costs)) for costs in problem.unary]
    waiting: list[tuple[float, int, list[Index]]] = [(-math.inf, 0, all_of_them)]
    largest = 0
    gap, spare = (1 - _ROUNDING) * effort.gap, (1 - _ROUNDING) * spare
    closed, made = math.inf, 0  # the least bound of all parts that are done with; how many parts there were
    while waiting and min(closed, waiting[0][0]) < best.target(gap if made else spare, target_bound):
        if made and effort.over:
            break
        bound, _, kept = heapq.heappop(waiting)
        part = _Subproblem(problem, all_of_them, bound, network).restricted(kept, effort)
        part = _raise_bound(part, price, best, effort, spare, target_bound)
        if part.network is None or effort.over:
            closed = min(closed, part.bound)
        elif part.network.fits:
            solved = exact(part.problem, part.network, best.target(spare, target_bound))
            if solved is not None:
                best.offer(expanded(part.kept, solved.assignment), polish=False)
                largest = max(largest, solved.entries)
                closed = min(closed, max(part.bound, solved.bound))
        else:
            vertex = _most_connected(part.problem, part.network.order.left)
            for choice in part.kept[vertex]:
                made += 1
                fixed = [*part.kept[:vertex], np.array([choice]), *part.kept[vertex + 1 :]]
                heapq.heappush(waiting, (part.bound, made, fixed))
    bound = min([closed, *[lower for lower, _, _ in waiting], best.target(spare, target_bound)])
    return BoundedSolution(best.assignment, best.cost, bound, price, None, largest)


def restricted(problem: Problem, kept: list[Index]) -> Problem:
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


def expanded(kept: list[Index], assignment: list[int]) -> list[int]:
    """An assignment of a restricted problem as one of the whole problem."""
    return [int(index[k]) for index, k in zip(kept, assignment, strict=True)]


def sweeps_to_eliminate(problem: Problem, network: Network) -> float:
    """In the time of how many sweeps the problem can be eliminated; inf where it cannot."""
    if not network.fits:
        return math.inf
    summed = network.order.work
    if summed > EASY:
        summed = elimination_work(network, share_equal(problem.unary))
    return 0.0 if summed <= EASY else summed / sweep_work(network.edges)


def _raise_bound(
    part: _Subproblem, price: float, best: _Incumbent, effort: Effort, spare: float, target_bound: float
) -> _Subproblem:
    """A part with its bound raised, and without what cannot better the best assignment by more than ``spare``: until it
    is solved, easily eliminated, or nothing more is won."""
    while part.network is not None and (sweeps := sweeps_to_eliminate(part.problem, part.network)) > 0:
        dual = DualBound(costs_at(part.problem, price), part.network.edges)
        paid = price * part.problem.limit if price else 0.0
        count = sum(map(len, part.kept))
        before, shrunk = -math.inf, False
        for sweep in range(_SWEEPS):
            upper = best.target(spare, target_bound) + paid
            assignment = dual.sweep(sweep % 2 == 0, upper + EXACT / 100 * abs(upper))
            if sweep % 10 in (0, 1, 4, 9):
                best.offer(expanded(part.kept, assignment))
            part.bound = max(part.bound, dual.bound - paid)
            left = sum(int(alive.sum()) for alive in dual.alive)
            if part.bound >= best.target(max(spare, EXACT), target_bound) or not all(
                alive.any() for alive in dual.alive
            ):
                return replace(part, bound=min(part.bound, best.cost), network=None)
            if shrunk := left < count / 4:
                break
            if sweep % 10 == 9:
                if part.bound - before <= _STALL * (best.cost - part.bound) or effort.over:
                    break
                before = part.bound
            if sweep + 1 >= sweeps / 2:
                break  # by now it might have been eliminated
            if sweep in _LOOKS and left < count:
                rest = part.restricted(_alive(dual), effort)
                if rest.network is not None and sweeps_to_eliminate(rest.problem, rest.network) <= sweep + 1:
                    return rest
        part = part.restricted(_alive(dual), effort)
        if not shrunk:
            return part
    return part


def _alive(dual: DualBound) -> list[Index]:
    return [np.flatnonzero(alive) for alive in dual.alive]


def _most_connected(problem: Problem, left: tuple[int, ...]) -> int:
    """The vertex with most edges among those that no step could eliminate."""
    inside = set(left)
    degree = Counter(vertex for edge in problem.pairs if inside.issuperset(edge) for vertex in edge)
    return max((vertex for vertex in left if len(problem.unary[vertex]) > 1), key=lambda vertex: degree[vertex])
