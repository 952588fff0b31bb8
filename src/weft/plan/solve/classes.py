"""Which configurations of a vertex a table cannot tell apart, and tables that keep one entry for each class of them.

An edge cost depends on how one tensor lies, not on the whole configuration: of 300 configurations of a matrix product
perhaps 56 differ for its output. Tables are indexed by these classes. Where two tables over one vertex meet, their
classes are refined to the pairs that occur.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cached_property

import numpy as np

from weft.plan.solve.problem import Index, Table


class Part:
    """A partition of a vertex's configurations. Equal partitions are one object (see `Classes`)."""

    def __init__(self, labels: tuple[int, ...], count: int) -> None:
        self.labels = labels  # the class of each configuration; classes are numbered as they first occur
        self.count = count

    @cached_property
    def index(self) -> Index:
        return np.array(self.labels, dtype=np.intp)

    @cached_property
    def first(self) -> Index:
        """The first configuration of each class."""
        found = np.empty(self.count, dtype=np.intp)
        found[self.index[::-1]] = np.arange(len(self.labels) - 1, -1, -1)
        return found

    def least(self, costs: Table) -> Table:
        """The least cost in each class."""
        if self.count == len(costs):
            return costs  # each its own class, hence in order
        if self.count == 1:
            return costs[costs.argmin() :][:1]
        order, starts = self._sorted
        least: Table = np.minimum.reduceat(costs[order], starts)
        return least

    @cached_property
    def _sorted(self) -> tuple[Index, Index]:
        order = np.argsort(self.index, kind="stable")
        return order, np.searchsorted(self.index[order], np.arange(self.count))


class Classes:
    """Makes partitions, each only once, so that equal ones are found by identity."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, ...], Part] = {}
        self._joins: dict[tuple[Part, Part], Part] = {}

    def part(self, keys: Iterable[Hashable]) -> Part:
        """Configurations with equal keys are one class."""
        numbers: dict[Hashable, int] = {}
        labels = tuple([numbers.setdefault(key, len(numbers)) for key in keys])
        part = self._parts.get(labels)
        if part is None:
            part = self._parts[labels] = Part(labels, len(numbers))
        return part

    def join(self, one: Part, other: Part) -> Part:
        """The coarsest partition that tells apart what either does."""
        if one is other or one.count == len(one.labels):
            return one
        if other.count == len(other.labels):
            return other
        joined = self._joins.get((one, other))
        if joined is None:
            joined = self.part(zip(one.labels, other.labels, strict=True))
            self._joins[one, other] = self._joins[other, one] = joined
        return joined

    def compressed(self, table: Table) -> tuple[Table, Part, Part]:
        """The distinct rows and columns of a table, and the classes of either."""
        rows = self.part(_rows(table))
        if rows.count < len(table):
            table = table[rows.first]
        columns = self.part(_rows(np.ascontiguousarray(table.T)))
        if columns.count < table.shape[1]:
            table = table[:, columns.first]
        return table, rows, columns


def _rows(table: Table) -> list[bytes]:
    data, length = table.tobytes(), table.shape[1] * table.itemsize
    return [data[start : start + length] for start in range(0, len(data), length)]
