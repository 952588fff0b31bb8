"""The optimum within a limit on the weights, from the tables of an elimination that priced the weights.

An elimination with costs ``cost + price * weight`` gives for every part of a pick the least that the rest can add. Read
from its root to its leaves, it prices each choice by its excess over the best: a pick's cost is at least the priced
optimum, less ``price * limit``, plus its excess. So only picks whose excess is below (best known cost - that bound)
matter. They are built side by side; of those that agree on all that later choices can see, only the ones that no other
beats in both cost and weight stay. Where more than ``rows`` stay, those of least excess do, and the bound falls to the
least excess that was dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.plan.solve.classes import Classes, Part
from weft.plan.solve.elimination import Elimination
from weft.plan.solve.problem import Index, Table
from weft.plan.solve.step import Step


@dataclass(frozen=True, slots=True)
class Found:
    """The best pick below the slack, if there is one, and the least excess of what was dropped (inf: nothing was)."""

    pick: list[int] | None
    dropped: float


def beam(
    done: Elimination,
    weights: Sequence[Table],
    limit: float,
    price: float,
    slack: float,
    rows: int,
    deadline: float = math.inf,
) -> Found:
    """The cheapest pick within the limit whose excess is at most ``slack``; at the deadline nothing."""
    steps = _preorder(done.steps)
    seen = _seen(done.steps, done.classes)
    last = {vertex: at for at, place in enumerate(steps) for vertex in done.steps[place].scope}
    rest = math.fsum(float(table.min()) for table in weights)
    columns: dict[int, Index] = {}
    excess, weight = np.zeros(1), np.zeros(1)
    trail: list[tuple[int, NDArray[np.int32], NDArray[np.int32]]] = []
    dropped = math.inf
    for at, place in enumerate(steps):
        if time.monotonic() > deadline:
            return Found(None, 0.0)
        vertex = done.steps[place].vertex
        rest -= float(weights[vertex].min())
        total = excess[:, None] + _excess(done, place, columns, seen)
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
        return Found(None, dropped)
    return Found(_back(trail, int((excess - price * weight).argmin())), dropped)


def _back(trail: list[tuple[int, NDArray[np.int32], NDArray[np.int32]]], row: int) -> list[int]:
    picks = [0] * len(trail)
    for vertex, parents, choices in reversed(trail):
        picks[vertex] = int(choices[row])
        row = int(parents[row])
    return picks


def _preorder(steps: Sequence[Step]) -> list[int]:
    """Steps from the last eliminated vertex down its tree, small branches first: few vertices wait at a time."""
    when = {step.vertex: place for place, step in enumerate(steps)}
    below: list[list[int]] = [[] for _ in steps]
    sizes = [1] * len(steps)
    roots = []
    for place, step in enumerate(steps):
        if step.scope:
            parent = min(when[vertex] for vertex in step.scope)
            below[parent].append(place)
            sizes[parent] += sizes[place]  # a parent comes after all its children
        else:
            roots.append(place)
    found: list[int] = []
    waiting = roots
    while waiting:
        place = waiting.pop()
        found.append(place)
        waiting += sorted(below[place], key=lambda child: -sizes[child])
    return found


def _seen(steps: Sequence[Step], classes: Classes) -> dict[int, Part]:
    """For each vertex the classes that the steps of others tell apart."""
    seen: dict[int, Part] = {}
    for step in steps:
        for vertex, part in zip(step.scope, step.plan.parts[1:], strict=True):
            seen[vertex] = classes.join(seen[vertex], part) if vertex in seen else part
    return seen


def _excess(done: Elimination, place: int, columns: dict[int, Index], seen: dict[int, Part]) -> Table:
    """For each row so far and each configuration of the step's vertex, what it adds to the excess."""
    step, (costs, left) = done.steps[place], done.results[place]
    if not step.scope:
        return (costs - left)[None, :]
    places = [columns[vertex] for vertex in step.scope]
    key = _key(places, [seen[vertex].count for vertex in step.scope], len(places[0]))
    _, same, row = np.unique(key, return_index=True, return_inverse=True)
    chosen = {vertex: seen[vertex].first[columns[vertex][same]] for vertex in step.scope}
    total = np.broadcast_to(costs, (len(same), len(costs)))
    for _, scope, table, form in step.inputs:
        axis = scope.index(step.vertex)
        others = [
            part.index[chosen[vertex]] for vertex, part in zip(scope, form.parts, strict=True) if vertex != step.vertex
        ]
        total = total + np.moveaxis(done.tables[table], axis, -1)[tuple(others)][:, form.parts[axis].index]
    parts = zip(step.scope, step.plan.parts[1:], strict=True)
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
