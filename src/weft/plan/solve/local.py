"""A pick made better by changing one vertex at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.plan.solve.problem import Problem, Table

Neighbours = list[list[tuple[int, Table]]]


def neighbours(problem: Problem) -> Neighbours:
    """For each vertex its neighbours, each with the table whose rows are the neighbour's configurations."""
    found: Neighbours = [[] for _ in problem.unary]
    for (i, j), table in problem.pairs.items():
        found[j].append((i, table))
        found[i].append((j, table.T))
    return found


def polished(problem: Problem, pick: Sequence[int], around: Neighbours, rounds: int = 8) -> list[int]:
    """A pick that no change of one vertex betters within the limit (or the last after some rounds). Its cost is never
    above that of ``pick``; a pick over the limit stays over it unless a change brings it below."""
    picks = list(pick)
    weight = problem.weight(picks)
    room = max(problem.limit, weight)
    stale = set(range(len(picks)))
    blocked: set[int] = set()  # those that would change, were there more room
    for _ in range(rounds):
        for vertex in sorted(stale):
            stale.discard(vertex)
            costs = problem.unary[vertex]
            for other, table in around[vertex]:
                costs = costs + table[picks[other]]
            old, new = picks[vertex], int(costs.argmin())
            extra = 0.0
            if problem.weights is not None:
                weights = problem.weights[vertex]
                allowed = weights - weights[old] + weight <= room
                if not allowed[new]:
                    blocked.add(vertex)
                    new = int(np.where(allowed, costs, np.inf).argmin())
                extra = float(weights[new] - weights[old])
            if costs[new] < costs[old]:
                picks[vertex] = new
                weight += extra
                stale.update(other for other, _ in around[vertex])
                if extra < 0:
                    stale |= blocked
                    blocked.clear()
        if not stale:
            break
    return picks
