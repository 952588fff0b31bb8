"""Assignments within a limit on the weights: by the price of a unit of weight, with a bound; and known ones changed.

For any price the least of ``cost + price * weight``, less ``price * limit``, is at most the optimum. Where all layers
of a model change together from a heavy way to a light one as weight gets more expensive, the best assignment at any
price is far from the limit. Between them lie assignments that change at some layer, and pay once for the change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.plan.solver.elimination import Elimination, share_equal
from weft.plan.solver.problem import EXACT, Effort, Problem, Table


@dataclass(frozen=True, slots=True)
class BoundedSolution:
    """An assignment within the limit, a bound on the optimum, and the price of a unit of weight that gave the bound."""

    assignment: list[int]
    cost: float
    bound: float
    price: float = 0.0
    elimination: Elimination | None = None
    entries: int = 0  # of the largest table that was made
    over: list[int] | None = None  # the best assignments at that price over and under the limit, where there are both
    under: list[int] | None = None


def near(cost: float, bound: float, gap: float) -> bool:
    """Whether the cost is at most ``gap`` above the bound, relative to it."""
    return cost - bound <= max(gap, EXACT) * abs(cost)


# What is known of the least cost, given the costs of all configurations.
Minimizer = Callable[[list[Table]], BoundedSolution]


def costs_at(problem: Problem, price: float) -> list[Table]:
    """What each configuration costs with its weight at this price."""
    if problem.weights is None or price == 0.0:
        return share_equal(problem.unary)
    return share_equal([costs + price * weights for costs, weights in zip(problem.unary, problem.weights, strict=True)])


def lagrangian(problem: Problem, minimum: Minimizer, effort: Effort) -> BoundedSolution:
    """The best bound that a price gives, and the best assignment met on the way to it; at the deadline those so far.
    Raises `OverLimit` where no assignment keeps the limit."""
    light, around = problem.lightest(), neighbours(problem)
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
        if point[0] + slope * point[1] >= line - 1e-12 * abs(line) or effort.over:
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


Neighbours = list[list[tuple[int, Table]]]


def neighbours(problem: Problem) -> Neighbours:
    """For each vertex its neighbours, each with the table whose rows are the neighbour's configurations."""
    found: Neighbours = [[] for _ in problem.unary]
    for (i, j), table in problem.pairs.items():
        found[j].append((i, table))
        found[i].append((j, table.T))
    return found


def local_search(problem: Problem, assignment: Sequence[int], around: Neighbours, rounds: int = 8) -> list[int]:
    """An assignment that no change of one vertex improves within the limit (or the last after some rounds). Its cost is
    never above that of ``assignment``; an assignment over the limit stays over it unless a change brings it below."""
    changed = list(assignment)
    weight = problem.weight(changed)
    room = max(problem.limit, weight)
    stale = set(range(len(changed)))
    blocked: set[int] = set()  # those that would change, were there more room
    for _ in range(rounds):
        for vertex in sorted(stale):
            stale.discard(vertex)
            costs = problem.unary[vertex]
            for other, table in around[vertex]:
                costs = costs + table[changed[other]]
            old, new = changed[vertex], int(costs.argmin())
            extra = 0.0
            if problem.weights is not None:
                weights = problem.weights[vertex]
                allowed = weights - weights[old] + weight <= room
                if not allowed[new]:
                    blocked.add(vertex)
                    new = int(np.where(allowed, costs, np.inf).argmin())
                extra = float(weights[new] - weights[old])
            if costs[new] < costs[old]:
                changed[vertex] = new
                weight += extra
                stale.update(other for other, _ in around[vertex])
                if extra < 0:
                    stale |= blocked
                    blocked.clear()
        if not stale:
            break
    return changed


def crossover(problem: Problem, one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The cheapest assignment within the limit that follows one assignment in the first layers and the other from there
    on (``one`` if there is none)."""
    position = layer_order(problem)
    best, least = list(one), problem.cost(one) if problem.weight(one) <= problem.limit else np.inf
    for first, then in ((one, other), (other, one)):
        # At [t] the sums for the assignment that follows ``first`` in the positions below t.
        change, load = np.zeros((2, len(position) + 1))
        for vertex, costs in enumerate(problem.unary):
            change[position[vertex] + 1] += costs[first[vertex]] - costs[then[vertex]]
            if problem.weights is not None:
                weights = problem.weights[vertex]
                load[position[vertex] + 1] = weights[first[vertex]] - weights[then[vertex]]
        for (i, j), table in problem.pairs.items():
            early, late = sorted((position[i], position[j]))
            mixed = table[first[i], then[j]] if position[i] < position[j] else table[then[i], first[j]]
            change[early + 1] += mixed - table[then[i], then[j]]
            change[late + 1] += table[first[i], first[j]] - mixed
        allowed = problem.weight(then) + load.cumsum() <= problem.limit
        cut = int(np.where(allowed, change.cumsum(), np.inf).argmin())
        assignment = [first[v] if position[v] < cut else then[v] for v in range(len(position))]
        if problem.weight(assignment) <= problem.limit and (cost := problem.cost(assignment)) < least:
            best, least = assignment, cost
    return best


def layer_order(problem: Problem) -> list[int]:
    """Vertices in the order of their layers: as they are numbered, but those that read nothing next to a reader."""
    first = list(range(len(problem.unary)))
    reads = {j for _, j in problem.pairs}
    for i, j in sorted(problem.pairs, reverse=True):
        if i not in reads:
            first[i] = j
    positions = [0] * len(first)
    for position, vertex in enumerate(sorted(range(len(first)), key=lambda vertex: (first[vertex], vertex))):
        positions[vertex] = position
    return positions
