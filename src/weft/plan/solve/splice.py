"""Picks that follow one way in the first layers and another in the rest, where no price leads to just the limit.

Where all layers of a model change together from a heavy way to a light one as weight gets dearer, the best pick at any
price is far from the limit. Between them lie picks that change at some layer, and pay once for the change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weft.plan.solve.elimination import same
from weft.plan.solve.problem import Problem, Table

_FACTORS = ((0.7, 1.4), (0.5, 2.0), (0.9, 1.1))


def spliced(problem: Problem, one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The cheapest pick within the limit that follows one allowed pick in the first layers and the other from there on
    (``one`` if there is none)."""
    place = places(problem)
    best, least = list(one), problem.cost(one) if problem.weight(one) <= problem.limit else np.inf
    for first, then in ((one, other), (other, one)):
        # At [t] the sums for the pick that follows ``first`` in the places below t.
        change, load, forbidden = np.zeros((3, len(place) + 1))
        for vertex, costs in enumerate(problem.unary):
            change[place[vertex] + 1] += costs[first[vertex]] - costs[then[vertex]]
            if problem.weights is not None:
                weights = problem.weights[vertex]
                load[place[vertex] + 1] = weights[first[vertex]] - weights[then[vertex]]
        for (i, j), table in problem.pairs.items():
            early, late = sorted((place[i], place[j]))
            mixed = table[first[i], then[j]] if place[i] < place[j] else table[then[i], first[j]]
            if np.isinf(mixed):
                forbidden[early + 1] += 1
                forbidden[late + 1] -= 1
                mixed = 0.0
            change[early + 1] += mixed - table[then[i], then[j]]
            change[late + 1] += table[first[i], first[j]] - mixed
        allowed = (problem.weight(then) + load.cumsum() <= problem.limit) & (forbidden.cumsum() == 0)
        cut = int(np.where(allowed, change.cumsum(), np.inf).argmin())
        pick = [first[v] if place[v] < cut else then[v] for v in range(len(place))]
        if problem.weight(pick) <= problem.limit and (cost := problem.cost(pick)) < least:
            best, least = pick, cost
    return best


def changed(
    problem: Problem,
    least: Callable[[list[Table]], list[int]],
    price: float,
    best: list[int],
    enough: Callable[[float], bool],
) -> list[int]:
    """The cheapest pick met, ``best`` or one with a low price of weight up to some layer and a high one from there on
    (or the other way round), the layer moved until the limit is just kept. ``least`` gives the best pick for given
    costs. Ends when a cost is ``enough``."""
    place, cost = places(problem), problem.cost(best)
    weights = problem.weights or ()
    for low, high in _FACTORS:
        for first, then in ((low, high), (high, low)):
            start, end = 0, len(place)
            while end - start > 1 and not enough(cost):
                cut = (start + end) // 2
                costs = [
                    own + price * (first if at < cut else then) * weight
                    for own, weight, at in zip(problem.unary, weights, place, strict=True)
                ]
                pick = least(same(costs))
                kept = problem.weight(pick) <= problem.limit
                if kept and (found := problem.cost(pick)) < cost:
                    best, cost = pick, found
                if kept == (first < then):
                    start = cut
                else:
                    end = cut
    return best


def places(problem: Problem) -> list[int]:
    """Vertices in the order of their layers: as they are numbered, but those that read nothing next to a reader."""
    first = list(range(len(problem.unary)))
    reads = {j for _, j in problem.pairs}
    for i, j in sorted(problem.pairs, reverse=True):
        if i not in reads:
            first[i] = j
    places = [0] * len(first)
    for place, vertex in enumerate(sorted(range(len(first)), key=lambda vertex: (first[vertex], vertex))):
        places[vertex] = place
    return places
