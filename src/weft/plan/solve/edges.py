"""The edges of a problem, each table compressed to classes, equal tables only once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.solve.classes import Classes, Part
from weft.plan.solve.problem import Table


@dataclass(frozen=True, slots=True, eq=False)
class Compressed:
    """The distinct rows and columns of a table, and the class of each row and column that it had."""

    table: Table
    rows: Part
    columns: Part

    @property
    def told(self) -> tuple[int, ...]:
        """The axes along which the table tells anything apart; a table of one entry is told along its first."""
        return tuple(axis for axis in (0, 1) if self.table.shape[axis] > 1) or (0,)


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """The pairs of vertices, and for each the compressed table: one object for all pairs with equal tables."""

    pairs: tuple[tuple[int, int], ...]
    tables: tuple[Compressed, ...]
    classes: Classes


def compressed(pairs: Mapping[tuple[int, int], Table]) -> Edges:
    """Compresses all tables; raises `PlanError` for costs that are not numbers."""
    classes = Classes()
    met: dict[int, Compressed] = {}
    alike: dict[tuple[tuple[int, ...], bytes], list[tuple[Table, Compressed]]] = {}
    for pair, table in pairs.items():
        if id(table) in met:
            continue
        # Comparing a large table with one that has equal samples is faster than hashing all of it.
        others = alike.setdefault((table.shape, table[:: len(table) // 8 + 1].tobytes()), [])
        found = next((known for other, known in others if (other == table).all()), None)
        if found is None:
            if not table.min() > -math.inf:
                raise PlanError(
                    f"edge {pair} has a cost that is not a number or -inf; only finite costs and inf can be summed"
                )
            found = Compressed(*classes.compressed(table))
            others.append((table, found))
        met[id(table)] = found
    return Edges(tuple(pairs), tuple([met[id(table)] for table in pairs.values()]), classes)
