"""A Markov chain over picks like FlexFlow's search, to compare with: no bound, and no end of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.solver import Problem
from weft.utils import rng

_BATCH = 256


@dataclass(frozen=True, slots=True)
class Walk:
    """The best pick that was met, and (CPU seconds, cost) of each that was better than all before (at most one a batch
    of proposals)."""

    pick: tuple[int, ...]
    cost: float
    proposals: int
    history: tuple[tuple[float, float], ...]


def markov_chain(problem: Problem, seconds: float, seed: int = 0, start: Sequence[int] | None = None) -> Walk:
    """Walks for ``seconds`` of CPU: a vertex and a configuration are drawn, the change in cost is summed over the
    vertex and its edges alone, and it is made with probability min(1, exp(-change / heat)). The heat falls from a
    ten-thousandth to a ten-millionth of the cost. It starts from ``start`` (FlexFlow starts from data parallelism), or
    with the cheapest configuration of each vertex by itself. Weights are ignored."""
    started = time.process_time()
    unary = [costs.tolist() for costs in problem.unary]
    around: list[list[tuple[int, list[list[float]]]]] = [[] for _ in unary]
    known: dict[int, tuple[list[list[float]], list[list[float]]]] = {}
    for (i, j), table in problem.pairs.items():
        rows, columns = known.setdefault(id(table), (table.tolist(), table.T.tolist()))
        around[j].append((i, rows))
        around[i].append((j, columns))
    picks = [costs.index(min(costs)) for costs in unary] if start is None else list(start)
    cost = problem.cost(picks)
    if math.isinf(cost):
        raise PlanError("the chain has no allowed pick to start from: give one that is allowed")
    best, chosen, history = cost, list(picks), [(time.process_time() - started, cost)]
    draw, proposals, low = rng.generator(seed, "markov chain"), 0, cost
    hot, cold = 1e-4 * abs(cost), 1e-7 * abs(cost)
    started = time.process_time()
    while (spent := time.process_time() - started) < seconds:
        heat = hot * (cold / hot) ** (spent / seconds) if hot else 1.0
        vertices = draw.integers(len(unary), size=_BATCH).tolist()
        places, chances = draw.random(_BATCH).tolist(), draw.random(_BATCH).tolist()
        proposals += _BATCH
        for vertex, place, chance in zip(vertices, places, chances, strict=True):
            costs, old = unary[vertex], picks[vertex]
            new = int(place * len(costs))
            change = costs[new] - costs[old]
            for other, table in around[vertex]:
                row = table[picks[other]]
                change += row[new] - row[old]
            if change <= 0.0 or chance < math.exp(-change / heat):
                picks[vertex] = new
                cost += change
                if cost < best:
                    best, chosen = cost, list(picks)
        if best < low:
            low = best
            history.append((time.process_time() - started, best))
    return Walk(tuple(chosen), problem.cost(chosen), proposals, tuple(history))
