"""Closes the gap between bound and assignment under a limit on the weights: by a beam search, and by cases.

The beam search starts from an elimination with costs ``cost + price * weight``, which gives for every part of an
assignment the least that the rest can add. Read from its root to its leaves, it prices each choice by its excess over
the best: an assignment's cost is at least the priced optimum, less ``price * limit``, plus its excess. So only
assignments whose excess is below (best known cost - that bound) matter. They are built side by side; of those that
agree on all that later choices can see, only the ones that no other beats in both cost and weight stay. Where more than
``rows`` stay, those of least excess do, and the bound falls to the least excess that was dropped.

A price bounds the optimum as if assignments could be mixed. If all layers read one tensor, half of one layout and half
of another is no assignment, and the bound is too low. So the problem is also divided by the configurations of one
vertex: of those in which the assignments over and under the limit differ, the one with the most edges. The case with
the lowest bound is next.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from weft.plan.solver.branch_and_bound import expanded, restricted
from weft.plan.solver.compression import Partition, PartitionCache
from weft.plan.solver.elimination import Elimination
from weft.plan.solver.lagrangian import BoundedSolution, Minimizer, costs_at, lagrangian, layer_order, near
from weft.plan.solver.ordering import EliminationStep
from weft.plan.solver.problem import Effort, Index, OverLimit, Problem, Table


def beam_search(
    done: Elimination,
    weights: Sequence[Table],
    limit: float,
    price: float,
    slack: float,
    rows: int,
    effort: Effort,
) -> tuple[list[int] | None, float]:
    """The cheapest assignment within the limit whose excess is at most ``slack``, if there is one, and the least excess
    of what was dropped (inf: nothing was); at the deadline nothing."""
    steps = _preorder(done.steps)
    seen = _seen(done.steps, done.classes)
    last = {vertex: at for at, number in enumerate(steps) for vertex in done.steps[number].scope}
    rest = math.fsum(float(table.min()) for table in weights)
    columns: dict[int, Index] = {}
    excess, weight = np.zeros(1), np.zeros(1)
    trail: list[tuple[int, NDArray[np.int32], NDArray[np.int32]]] = []
    dropped = math.inf
    for at, number in enumerate(steps):
        if effort.over:
            return None, 0.0
        vertex = done.steps[number].vertex
        rest -= float(weights[vertex].min())
        total = excess[:, None] + _excess(done, number, columns, seen)
        heavy = weight[:, None] + weights[vertex]
        row, choice = np.nonzero((total <= slack) & (heavy + rest <= limit))
        some, beyond = _least(total[row, choice], 8 * rows)  # before they are compared with each other
        row, choice = row[some], choice[some]
        excess, weight = total[row, choice], heavy[row, choice]
        columns = {other: column[row] for other, column in columns.items() if last[other] > at}
        if last.get(vertex, -1) > at:
            columns[vertex] = seen[vertex].index[choice]
        key = _key(list(columns.values()), [seen[other].count for other in columns], len(row))
        kept = _front(key, excess - price * weight, weight)
        some, least = _least(excess[kept], rows)
        dropped, kept = min(dropped, beyond, least), kept[some]
        excess, weight = excess[kept], weight[kept]
        columns = {other: column[kept] for other, column in columns.items()}
        trail.append((vertex, row[kept].astype(np.int32), choice[kept].astype(np.int32)))
    if not len(excess):
        return None, dropped
    return _back(trail, int((excess - price * weight).argmin())), dropped


def _back(trail: list[tuple[int, NDArray[np.int32], NDArray[np.int32]]], row: int) -> list[int]:
    assignment = [0] * len(trail)
    for vertex, parents, choices in reversed(trail):
        assignment[vertex] = int(choices[row])
        row = int(parents[row])
    return assignment


def _preorder(steps: Sequence[EliminationStep]) -> list[int]:
    """Steps from the last eliminated vertex down its tree, small branches first: few vertices wait at a time."""
    when = {step.vertex: number for number, step in enumerate(steps)}
    below: list[list[int]] = [[] for _ in steps]
    sizes = [1] * len(steps)
    roots = []
    for number, step in enumerate(steps):
        if step.scope:
            parent = min(when[vertex] for vertex in step.scope)
            below[parent].append(number)
            sizes[parent] += sizes[number]  # a parent comes after all its children
        else:
            roots.append(number)
    found: list[int] = []
    waiting = roots
    while waiting:
        number = waiting.pop()
        found.append(number)
        waiting += sorted(below[number], key=lambda child: -sizes[child])
    return found


def _seen(steps: Sequence[EliminationStep], classes: PartitionCache) -> dict[int, Partition]:
    """For each vertex the classes that the steps of others tell apart."""
    seen: dict[int, Partition] = {}
    for step in steps:
        for vertex, part in zip(step.scope, step.layout.parts[1:], strict=True):
            seen[vertex] = classes.join(seen[vertex], part) if vertex in seen else part
    return seen


def _excess(done: Elimination, number: int, columns: dict[int, Index], seen: dict[int, Partition]) -> Table:
    """For each row so far and each configuration of the step's vertex, what it adds to the excess."""
    step, (costs, left) = done.steps[number], done.results[number]
    if not step.scope:
        return (costs - left)[None, :]
    rows = [columns[vertex] for vertex in step.scope]
    key = _key(rows, [seen[vertex].count for vertex in step.scope], len(rows[0]))
    _, share_equal, row = np.unique(key, return_index=True, return_inverse=True)
    chosen = {vertex: seen[vertex].first[columns[vertex][share_equal]] for vertex in step.scope}
    total = np.broadcast_to(costs, (len(share_equal), len(costs)))
    for _, scope, table, table_layout in step.inputs:
        axis = scope.index(step.vertex)
        others = [
            part.index[chosen[vertex]]
            for vertex, part in zip(scope, table_layout.parts, strict=True)
            if vertex != step.vertex
        ]
        total = total + np.moveaxis(done.tables[table], axis, -1)[tuple(others)][:, table_layout.parts[axis].index]
    parts = zip(step.scope, step.layout.parts[1:], strict=True)
    least = left[tuple([part.index[chosen[vertex]] for vertex, part in parts])]
    return (total - least[:, None])[row]


def _key(columns: list[Index], counts: list[int], length: int) -> Index:
    """A number for each row, equal for rows that are equal in all columns."""
    key, size = np.zeros(length, dtype=np.intp), 1
    for column, count in zip(columns, counts, strict=True):
        if size * count >= 1 << 62:
            key = np.unique(key, return_inverse=True)[1]
            size = length
        key, size = key * count + column, size * count
    return key


def _front(key: Index, cost: Table, weight: Table) -> Index:
    """Of rows with equal keys those that no other beats in both cost and weight (of equals the first)."""
    if len(key) < 2:
        return np.arange(len(key))
    order = np.lexsort((weight, cost, key))
    rank = np.unique(weight, return_inverse=True)[1][order]
    sorted_key = key[order]
    group = np.concatenate([[0], np.cumsum(sorted_key[1:] != sorted_key[:-1])])
    # Within a group costs ascend, so a row stays if it is lighter than all before; each group starts below the last.
    fall = rank - group * (int(rank.max()) + 1)
    kept = np.ones(len(fall), dtype=bool)
    kept[1:] = fall[1:] < np.minimum.accumulate(fall)[:-1]
    return order[kept]


def _least(excess: Table, count: int) -> tuple[Index, float]:
    """The rows of least excess, at most ``count``, and the least excess of the others."""
    if len(excess) <= count:
        return np.arange(len(excess)), math.inf
    order = np.argpartition(excess, count)
    return order[:count], float(excess[order[count:]].min())


MakeMinimizer = Callable[[Problem], Minimizer]


def branch_on_vertex(
    problem: Problem, found: BoundedSolution, minimum: MakeMinimizer, effort: Effort
) -> BoundedSolution:
    """What was found with one price, with the bound raised and the cost lowered until they are within the gap, or to
    the deadline. ``minimum`` solves cases without the limit."""
    cases: list[tuple[float, int, list[Index]]] = []
    closed, made = found.cost, 0  # the least bound of all cases that are done with, how many there were
    node, kept = found, [np.arange(len(costs)) for costs in problem.unary]
    while True:
        if node.cost < found.cost:
            found = replace(found, assignment=node.assignment, cost=node.cost)
        vertex = _deciding(problem, node)
        if vertex is None or near(found.cost, node.bound, effort.gap):
            closed = min(closed, node.bound)
        else:
            for choice in kept[vertex]:
                made += 1
                case = [*kept[:vertex], np.array([choice]), *kept[vertex + 1 :]]
                heapq.heappush(cases, (_bound(problem, case, node, minimum, effort), made, case))
        solved = None
        while solved is None:
            if not cases or near(found.cost, cases[0][0], effort.gap) or effort.over:
                bound = min([closed, found.cost, *[least for least, _, _ in cases]])
                return replace(found, bound=max(found.bound, bound))
            least, _, kept = heapq.heappop(cases)
            part = restricted(problem, kept)
            with suppress(OverLimit):
                solved = lagrangian(part, minimum(part), effort)
        node = replace(
            solved,
            assignment=expanded(kept, solved.assignment),
            over=solved.over and expanded(kept, solved.over),
            under=solved.under and expanded(kept, solved.under),
            bound=max(least, solved.bound),
        )


def _bound(problem: Problem, case: list[Index], node: BoundedSolution, minimum: MakeMinimizer, effort: Effort) -> float:
    """The bound of a case at the price of what it is a case of."""
    if effort.over:
        return node.bound
    part = restricted(problem, case)
    try:
        return max(node.bound, minimum(part)(costs_at(part, node.price)).bound - node.price * problem.limit)
    except OverLimit:
        return math.inf


def _deciding(problem: Problem, found: BoundedSolution) -> int | None:
    """Of the vertices in which the assignments over and under the limit differ, that with the most edges; of equals the
    one in the middle."""
    if found.over is None or found.under is None:
        return None
    differ = [v for v, (one, other) in enumerate(zip(found.over, found.under, strict=True)) if one != other]
    if not differ:
        return None
    degree = Counter(vertex for edge in problem.pairs for vertex in edge)
    most = max(degree[vertex] for vertex in differ)
    order = layer_order(problem)
    ends = sorted((v for v in differ if degree[v] == most), key=order.__getitem__)
    return ends[len(ends) // 2]
