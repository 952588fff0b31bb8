"""The exact optimum by eliminating one vertex after another, equal tables once, and the assignment read back in
reverse.

No choices are carried along and no back-pointers kept: once the neighbours of a vertex have their configurations, its
own best one is found again from the tables that were summed, in one row of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.plan.solver.compression import CompressedEdges, PartitionCache, compress
from weft.plan.solver.ordering import EliminationOrder, EliminationStep, OrderSearch
from weft.plan.solver.problem import Problem, Table

Result = tuple[Table, Table]  # a vertex's own costs with its messages, and the table that its elimination leaves


class Network:
    """The edges of a problem and the order in which its vertices are eliminated."""

    def __init__(self, count: int, edges: CompressedEdges, entries: int) -> None:
        self.edges = edges
        # An edge that only one end makes a difference to is a vector of that end.
        axes = {edge: edge.axes for edge in set(edges.tables)}
        flat = {edge: edge.table if len(own) == 2 else edge.table.reshape(-1) for edge, own in axes.items()}
        self.tables = [flat[edge] for edge in edges.tables]
        scopes, parts = [], []
        for pair, edge in zip(edges.pairs, edges.tables, strict=True):
            scopes.append(tuple([pair[axis] for axis in axes[edge]]))
            parts.append(tuple([(edge.rows, edge.columns)[axis] for axis in axes[edge]]))
        self.order: EliminationOrder = OrderSearch(count, scopes, parts, edges.classes).run(entries)

    @classmethod
    def of(cls, problem: Problem, entries: int) -> Network:
        """That of a problem, with tables of at most so many entries."""
        return cls(len(problem.unary), compress(problem.pairs), entries)

    @property
    def fits(self) -> bool:
        """Whether the order eliminates all vertices."""
        return not self.order.left


@dataclass(frozen=True, slots=True)
class Elimination:
    """The least cost, and for each step what was summed: enough to read back any assignment."""

    value: float
    steps: tuple[EliminationStep, ...]
    results: tuple[Result, ...]
    tables: list[Table]
    classes: PartitionCache

    def assignment(self) -> list[int]:
        """An assignment of that cost."""
        assignment = [0] * len(self.steps)
        known: dict[tuple[int, ...], int] = {}
        for step, (costs, left) in zip(reversed(self.steps), reversed(self.results), strict=True):
            # Steps with one result had equal tables, so that equal neighbours lead to an equal assignment.
            key = (id(left), *[assignment[other] for other in step.scope])
            best = known.get(key)
            if best is None:
                best = known[key] = int(self.costs(step, costs, assignment).argmin())
            assignment[step.vertex] = best
        return assignment

    def costs(self, step: EliminationStep, costs: Table, assignment: Sequence[int]) -> Table:
        """For each configuration of the step's vertex the least cost of all eliminated up to it, given the
        assignments."""
        for _, scope, number, table_layout in step.inputs:
            parts = dict(zip(scope, table_layout.parts, strict=True))
            at = tuple([slice(None) if v == step.vertex else part.labels[assignment[v]] for v, part in parts.items()])
            costs = costs + self.tables[number][at][parts[step.vertex].index]
        return costs


def eliminate(network: Network, unary: Sequence[Table]) -> Elimination:
    """The optimum of the network with these costs of its vertices (equal ones should be one object, see
    `share_equal`)."""
    tables = network.tables + [np.empty(0)] * (network.order.tables - len(network.tables))
    known: dict[tuple[object, ...], Result] = {}
    results: list[Result] = []
    value = 0.0
    for step in network.order.steps:
        own = unary[step.vertex]
        result = known.get(key := _key(step, own, tables))
        if result is None:
            for number, table_layout in step.messages:
                own = own + tables[number][table_layout.parts[0].index]
            result = known[key] = (own, _left(step, own, tables))
        results.append(result)
        if step.output >= 0:
            tables[step.output] = result[1]
        else:
            value += float(result[1])
    return Elimination(value, network.order.steps, tuple(results), tables, network.edges.classes)


def elimination_work(network: Network, unary: Sequence[Table]) -> int:
    """How many entries an elimination sums, equal steps once."""
    tables: list[object] = [*network.tables, *[None] * (network.order.tables - len(network.tables))]
    known: dict[tuple[object, ...], object] = {}
    total = 0
    for step in network.order.steps:
        key = _key(step, unary[step.vertex], tables)
        if key not in known:
            known[key] = object()
            total += step.layout.work
        if step.output >= 0:
            tables[step.output] = known[key]
    return total


def _key(step: EliminationStep, own: Table, tables: Sequence[object]) -> tuple[object, ...]:
    """Steps with one key have one result: all that they sum is the same object."""
    messages = [id(tables[number]) for number, _ in step.messages]
    return (step.layout, id(own), *messages, *[id(tables[factor[2]]) for factor in step.inputs])


def _left(step: EliminationStep, own: Table, tables: list[Table]) -> Table:
    layout = step.layout
    if step.output < 0:
        return own.min()  # type: ignore[no-any-return]
    terms = [view(tables[factor[2]]) for view, factor in zip(layout.views, step.inputs, strict=True)]
    terms.append(layout.parts[0].least(own).reshape((-1,) + (1,) * (len(layout.shape) - 1)))
    return min_sum(terms, layout.shape)


def share_equal(vectors: Sequence[Table]) -> list[Table]:
    """The same vectors, equal ones as one object."""
    known: dict[bytes, Table] = {}
    return [known.setdefault(vector.tobytes(), vector) for vector in vectors]


BLOCK = 1 << 15  # entries summed at a time: 256 KiB


def min_sum(terms: list[Table], shape: tuple[int, ...]) -> Table:
    """The least over axis 0 of the sum of ``terms``, each of which broadcasts to ``shape``; no array of that shape is
    made. Terms are used up."""
    out = np.empty(shape[1:])
    _write_min_sum(terms, shape, out)
    return out


def _write_min_sum(terms: list[Table], shape: tuple[int, ...], out: Table) -> None:
    terms = _merged(terms)
    if len(terms) == 1:
        np.minimum.reduce(terms[0], axis=0, out=out)
        return
    size = math.prod(shape[1:])
    if size > BLOCK and len(shape) > 2:
        _sliced(terms, shape, out)
        return
    step = max(1, BLOCK // size)
    if step >= shape[0]:
        np.minimum.reduce(sum(terms[1:], start=terms[0]), axis=0, out=out)
        return
    block = np.empty((step, *shape[1:]))
    for start in range(0, shape[0], step):
        part = block[: min(step, shape[0] - start)]
        np.add(terms[0][start : start + step], terms[1][start : start + step], out=part)
        for term in terms[2:]:
            part += term[start : start + step]
        if start == 0:
            np.minimum.reduce(part, axis=0, out=out)
        elif len(part) == 1:
            np.minimum(out, part[0], out=out)
        else:
            np.minimum(out, np.minimum.reduce(part, axis=0), out=out)


def _sliced(terms: list[Table], shape: tuple[int, ...], out: Table) -> None:
    # An axis that only one term has is fixed first: then that term is small, and is added to another beforehand.
    axis = min(range(1, len(shape) - 1), key=lambda axis: sum(term.shape[axis] > 1 for term in terms))
    rest = math.prod(shape[1:]) // shape[axis]
    if rest >= BLOCK // 16:
        for number in range(shape[axis]):
            fixed: list[Table] = [np.take(term, 0 if term.shape[axis] == 1 else number, axis=axis) for term in terms]
            _write_min_sum(fixed, shape[:axis] + shape[axis + 1 :], out[(slice(None),) * (axis - 1) + (number,)])
        return
    step = max(1, BLOCK // rest)
    for start in range(0, shape[axis], step):
        cut = (slice(None),) * (axis - 1) + (slice(start, start + step),)
        taken = [term if term.shape[axis] == 1 else term[(slice(None), *cut)] for term in terms]
        part = out[cut]
        _write_min_sum(taken, (shape[0], *part.shape), part)


def _merged(terms: list[Table]) -> list[Table]:
    """A term whose axes another one has too is added to it once, instead of in every block."""
    if len(terms) == 1:
        return terms
    left = sorted(terms, key=lambda term: term.size)
    kept: list[Table] = []
    while left:
        term = left.pop(0)
        for number, other in enumerate(left):
            if all(length in (1, wide) for length, wide in zip(term.shape, other.shape, strict=True)):
                left[number] = other + term
                break
        else:
            kept.append(term)
    return kept
