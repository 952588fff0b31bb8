"""In which order vertices are eliminated, and how each is: decided from the classes alone, before any table is summed.

Eliminating a vertex sums the tables over it, takes the least over its configurations, and leaves a table over its
neighbours. The vertex whose sum has the fewest entries comes next (entries of classes, not configurations). Of equals
the one that was left alone longest: so equal layers shrink side by side, and what is computed for one serves all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.solve.classes import Classes, Part
from weft.plan.solve.step import Factor, Form, Plan, Step

MANY = 24  # vertices in more tables than this are weighed only when nothing else is left


@dataclass(frozen=True, slots=True)
class Order:
    """All steps, or those before the first whose table would exceed what was allowed."""

    steps: tuple[Step, ...]
    tables: int  # how many there are in all, the given ones first
    left: tuple[int, ...]  # the vertices that no step eliminates
    work: int  # entries summed, were no two steps equal
    entries: int
    width: int


_EMPTY = Plan([], [], Classes(), 0)


def order(
    count: int, scopes: Sequence[tuple[int, ...]], parts: Sequence[tuple[Part, ...]], classes: Classes, entries: int
) -> Order:
    """The order of elimination of a graph with tables over ``scopes``, whose axes have these classes. It ends before a
    step whose table would exceed ``entries``, or whose sum would 64 times that."""
    return _Search(count, scopes, parts, classes).run(entries)


class _Search:
    def __init__(
        self, count: int, scopes: Sequence[tuple[int, ...]], parts: Sequence[tuple[Part, ...]], classes: Classes
    ) -> None:
        self.classes = classes
        self.forms: dict[tuple[Part, ...], Form] = {}
        self.plans: dict[tuple[int, ...], Plan] = {}
        self.at: list[list[Factor]] = [[] for _ in range(count)]
        self.messages: list[list[tuple[int, Form]]] = [[] for _ in range(count)]
        self.tables = 0
        self.current: list[tuple[Plan, tuple[int, ...]]] = [(_EMPTY, ())] * count
        self.many: float = MANY
        for scope, axes in zip(scopes, parts, strict=True):
            self.add(scope, self.form(axes))

    def form(self, parts: tuple[Part, ...]) -> Form:
        form = self.forms.get(parts)
        if form is None:
            form = self.forms[parts] = Form(parts, len(self.forms))
        return form

    def add(self, scope: tuple[int, ...], form: Form) -> int:
        place = self.tables
        self.tables += 1
        if len(scope) == 1:
            self.messages[scope[0]].append((place, form))
        else:
            for vertex in scope:
                self.at[vertex].append((form.number, scope, place, form))
        return place

    def rank(self, vertex: int) -> float:
        """The entries that eliminating the vertex would sum now."""
        if len(self.at[vertex]) > self.many:
            return math.inf
        factors = self.at[vertex]
        factors.sort()
        local = {vertex: 0}
        key: list[int] = []
        for number, scope, _, _ in factors:
            key.append(number)
            for other in scope:
                key.append(local.setdefault(other, len(local)))
        plan = self.plans.get(found := tuple(key))
        if plan is None:
            places = [tuple([local[other] for other in factor[1]]) for factor in factors]
            plan = self.plans[found] = Plan([factor[3] for factor in factors], places, self.classes, len(local))
        self.current[vertex] = plan, tuple(local)[1:]
        return plan.work

    def run(self, entries: int) -> Order:
        latest = list(range(len(self.at)))  # when each vertex was last ranked; -1 once it is gone
        heap = [(self.rank(vertex), vertex, vertex) for vertex in latest]
        heapq.heapify(heap)
        stamp = len(latest)
        steps: list[Step] = []
        while heap:
            rank, stamped, vertex = heapq.heappop(heap)
            if latest[vertex] != stamped:
                continue
            if rank == math.inf:  # nothing but vertices in many tables is left
                self.many = math.inf
                heap = [(self.rank(other), latest[other], other) for other in range(len(latest)) if latest[other] >= 0]
                heapq.heapify(heap)
                continue
            plan, scope = self.current[vertex]
            if plan.size > entries or plan.work > 64 * entries:
                break
            latest[vertex] = -1
            steps.append(self.eliminate(vertex, plan, scope))
            for other in scope:
                heapq.heappush(heap, (self.rank(other), stamp, other))
                latest[other], stamp = stamp, stamp + 1
        left = tuple(vertex for vertex, at in enumerate(latest) if at >= 0)
        work = sum(step.plan.work for step in steps)
        size = max((step.plan.size for step in steps), default=1)
        width = max((len(step.plan.parts) for step in steps), default=0)
        return Order(tuple(steps), self.tables, left, work, size, width)

    def eliminate(self, vertex: int, plan: Plan, scope: tuple[int, ...]) -> Step:
        factors = tuple(self.at[vertex])
        for other in scope:
            self.at[other] = [factor for factor in self.at[other] if vertex not in factor[1]]
        output = -1
        if scope:
            if plan.form is None:
                plan.form = self.form(plan.parts[1:])
            output = self.add(scope, plan.form)
        self.messages[vertex].sort()
        return Step(vertex, factors, tuple(self.messages[vertex]), scope, plan, output)
