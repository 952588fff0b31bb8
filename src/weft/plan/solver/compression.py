"""Which configurations of a vertex a table cannot tell apart, and tables that keep one entry for each class of them.

An edge cost depends on how one tensor lies, not on the whole configuration: of 300 configurations of a matrix product
perhaps 56 differ for its output. Tables are indexed by these classes. Where two tables over one vertex meet, their
classes are refined to the pairs that occur. Equal tables are kept once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.errors import PlanError
from weft.plan.solver.problem import Index, Table


class Partition:
    """A partition of a vertex's configurations. Equal partitions are one object (see `PartitionCache`)."""

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


class PartitionCache:
    """Makes partitions, each only once, so that equal ones are found by identity."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, ...], Partition] = {}
        self._joins: dict[tuple[Partition, Partition], Partition] = {}

    def part(self, keys: Iterable[Hashable]) -> Partition:
        """Configurations with equal keys are one class."""
        numbers: dict[Hashable, int] = {}
        labels = tuple([numbers.setdefault(key, len(numbers)) for key in keys])
        part = self._parts.get(labels)
        if part is None:
            part = self._parts[labels] = Partition(labels, len(numbers))
        return part

    def join(self, one: Partition, other: Partition) -> Partition:
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

    def compress(self, table: Table) -> tuple[Table, Partition, Partition]:
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


@dataclass(frozen=True, slots=True, eq=False)
class CompressedTable:
    """The distinct rows and columns of a table, and the class of each row and column that it had."""

    table: Table
    rows: Partition
    columns: Partition

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which the table tells anything apart; a table of one entry is told along its first."""
        return tuple(axis for axis in (0, 1) if self.table.shape[axis] > 1) or (0,)


@dataclass(frozen=True, slots=True, eq=False)
class CompressedEdges:
    """The pairs of vertices, and for each the compressed table: one object for all pairs with equal tables."""

    pairs: tuple[tuple[int, int], ...]
    tables: tuple[CompressedTable, ...]
    classes: PartitionCache


def compress(pairs: Mapping[tuple[int, int], Table]) -> CompressedEdges:
    """Compresses all tables; raises `PlanError` for costs that are not finite."""
    classes = PartitionCache()
    met: dict[int, CompressedTable] = {}
    alike: dict[tuple[tuple[int, ...], bytes], list[tuple[Table, CompressedTable]]] = {}
    for pair, table in pairs.items():
        if id(table) in met:
            continue
        # Comparing a large table with one that has equal samples is faster than hashing all of it.
        others = alike.setdefault((table.shape, table[:: len(table) // 8 + 1].tobytes()), [])
        found = next((known for other, known in others if (other == table).all()), None)
        if found is None:
            if not np.isfinite(table).all():
                raise PlanError(f"edge {pair} has a cost that is not a finite number")
            found = CompressedTable(*classes.compress(table))
            others.append((table, found))
        met[id(table)] = found
    return CompressedEdges(tuple(pairs), tuple([met[id(table)] for table in pairs.values()]), classes)
