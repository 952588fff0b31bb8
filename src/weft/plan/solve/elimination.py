"""The exact optimum by eliminating one vertex after another, equal tables once, and the pick read back in reverse.

No picks are carried along and no back-pointers kept: once the neighbours of a vertex are picked, its own best
configuration is found again from the tables that were summed, in one row of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.plan.solve.classes import Classes
from weft.plan.solve.edges import Edges
from weft.plan.solve.minimum import lowest
from weft.plan.solve.order import Order, order
from weft.plan.solve.problem import Table
from weft.plan.solve.step import Step

Result = tuple[Table, Table]  # a vertex's own costs with its messages, and the table that its elimination leaves


class Network:
    """The edges of a problem and the order in which its vertices are eliminated."""

    def __init__(self, count: int, edges: Edges, entries: int) -> None:
        self.edges = edges
        # An edge that only one end makes a difference to is a vector of that end.
        axes = {edge: edge.told for edge in set(edges.tables)}
        flat = {edge: edge.table if len(told) == 2 else edge.table.reshape(-1) for edge, told in axes.items()}
        self.tables = [flat[edge] for edge in edges.tables]
        scopes, parts = [], []
        for pair, edge in zip(edges.pairs, edges.tables, strict=True):
            scopes.append(tuple([pair[axis] for axis in axes[edge]]))
            parts.append(tuple([(edge.rows, edge.columns)[axis] for axis in axes[edge]]))
        self.order: Order = order(count, scopes, parts, edges.classes, entries)

    @property
    def fits(self) -> bool:
        """Whether the order eliminates all vertices."""
        return not self.order.left


@dataclass(frozen=True, slots=True)
class Elimination:
    """The least cost, and for each step what was summed: enough to read back any pick."""

    value: float
    steps: tuple[Step, ...]
    results: tuple[Result, ...]
    tables: list[Table]
    classes: Classes

    def pick(self) -> list[int]:
        """A pick of that cost."""
        picks = [0] * len(self.steps)
        known: dict[tuple[int, ...], int] = {}
        for step, (costs, left) in zip(reversed(self.steps), reversed(self.results), strict=True):
            # Steps with one result had equal tables, so that equal neighbours lead to an equal pick.
            key = (id(left), *[picks[other] for other in step.scope])
            best = known.get(key)
            if best is None:
                best = known[key] = int(self.costs(step, costs, picks).argmin())
            picks[step.vertex] = best
        return picks

    def costs(self, step: Step, costs: Table, picks: Sequence[int]) -> Table:
        """For each configuration of the step's vertex the least cost of all eliminated up to it, given the picks."""
        for _, scope, place, form in step.inputs:
            row = self.tables[place][
                tuple(
                    [
                        slice(None) if v == step.vertex else p.labels[picks[v]]
                        for v, p in zip(scope, form.parts, strict=True)
                    ]
                )
            ]
            costs = costs + row[form.parts[scope.index(step.vertex)].index]
        return costs


def eliminate(network: Network, unary: Sequence[Table]) -> Elimination:
    """The optimum of the network with these costs of its vertices (equal ones should be one object, see `same`)."""
    tables = network.tables + [_NONE] * (network.order.tables - len(network.tables))
    known: dict[tuple[object, ...], Result] = {}
    results: list[Result] = []
    value = 0.0
    for step in network.order.steps:
        own = unary[step.vertex]
        result = known.get(key := _key(step, own, tables))
        if result is None:
            for place, form in step.messages:
                own = own + tables[place][form.parts[0].index]
            result = known[key] = (own, _left(step, own, tables))
        results.append(result)
        if step.output >= 0:
            tables[step.output] = result[1]
        else:
            value += float(result[1])
    return Elimination(value, network.order.steps, tuple(results), tables, network.edges.classes)


def effort(network: Network, unary: Sequence[Table]) -> int:
    """How many entries an elimination sums, equal steps once."""
    tables: list[object] = [*network.tables, *[None] * (network.order.tables - len(network.tables))]
    known: dict[tuple[object, ...], object] = {}
    total = 0
    for step in network.order.steps:
        key = _key(step, unary[step.vertex], tables)
        if key not in known:
            known[key] = object()
            total += step.plan.work
        if step.output >= 0:
            tables[step.output] = known[key]
    return total


def _key(step: Step, own: Table, tables: Sequence[object]) -> tuple[object, ...]:
    """Steps with one key have one result: all that they sum is the same object."""
    messages = [id(tables[place]) for place, _ in step.messages]
    return (step.plan, id(own), *messages, *[id(tables[factor[2]]) for factor in step.inputs])


def _left(step: Step, own: Table, tables: list[Table]) -> Table:
    plan = step.plan
    if step.output < 0:
        return own.min()  # type: ignore[no-any-return]
    terms = [wire(tables[factor[2]]) for wire, factor in zip(plan.wires, step.inputs, strict=True)]
    terms.append(plan.parts[0].least(own).reshape((-1,) + (1,) * (len(plan.shape) - 1)))
    return lowest(terms, plan.shape)


def same(vectors: Sequence[Table]) -> list[Table]:
    """The same vectors, equal ones as one object."""
    known: dict[bytes, Table] = {}
    return [known.setdefault(vector.tobytes(), vector) for vector in vectors]


_NONE: Table = np.empty(0)
