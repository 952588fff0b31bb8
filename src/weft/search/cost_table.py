"""Tables of numbers over few choices: sums of them, what constraints forbid, and the least that a sum can be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.elastic.sizes import active_values, with_conditions
from weft.space import Space, Value
from weft.space.subnet import FrozenSpace

LIMIT = 1 << 14  # combinations of options that one table may have
CLIQUE = 1 << 22  # combinations that the elimination of one choice may have
Array = npt.NDArray[np.float64]
Values = Mapping[str, Value]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Numbers by the options of a few choices: one axis a choice, in the order of the space."""

    names: tuple[str, ...]
    values: Array

    def at(self, options: Mapping[str, Sequence[Value]], values: Values) -> float:
        """The number for these values; an inactive choice makes no difference, so that any option of it will do."""
        given = [(options[name], values.get(name)) for name in self.names]
        return float(self.values[tuple(0 if value is None else own.index(value) for own, value in given)])

    def broadcast(self, names: Sequence[str]) -> Array:
        """The values with an axis for each of these names, which contain the table's own in the same order."""
        sizes = dict(zip(self.names, self.values.shape, strict=True))
        return self.values.reshape([sizes.get(name, 1) for name in names])


def combinations(rules: FrozenSpace, names: Sequence[str]) -> Iterator[dict[str, Value]]:
    """The active values of every combination of options of these choices, the last choice varying fastest.

    The names must contain those that their conditions read.
    """
    for options in itertools.product(*(rules.choices[name].options or () for name in names)):
        yield active_values(rules, names, dict(zip(names, options, strict=True)))


def count_combinations(rules: FrozenSpace, names: Iterable[str]) -> int:
    """How many combinations of options there are; a choice of real numbers counts as one."""
    return math.prod(len(rules.choices[name].options or ("",)) for name in names)


def make_table(rules: FrozenSpace, names: Iterable[str], number: Callable[[dict[str, Value]], float]) -> Table:
    """The table of a function of the active values of these choices."""
    names = with_conditions(rules, names)
    shape = [len(rules.choices[name].options or ()) for name in names]
    numbers = [number(values) for values in combinations(rules, names)]
    return Table(names, np.array(numbers, dtype=np.float64).reshape(shape))


def drop_unused_choices(table: Table) -> Table:
    """Without the choices that make no difference; NaN stands for any number, but an option that has nothing but NaN
    differs from the others."""
    names, values = list(table.names), table.values
    for name in table.names:
        axis = names.index(name)
        low, high = np.fmin.reduce(values, axis), np.fmax.reduce(values, axis)
        missing = np.isnan(values).all(axis=tuple(other for other in range(values.ndim) if other != axis))
        if np.array_equal(low, high, equal_nan=True) and missing.all() == missing.any():
            names.remove(name)
            values = low
    return Table(tuple(names), np.asarray(values))


def replace_nan(table: Table) -> Table:
    """With the mean of the other numbers in the place of NaN."""
    known = table.values[~np.isnan(table.values)]
    return Table(table.names, np.where(np.isnan(table.values), known.mean() if known.size else 0.0, table.values))


def extend_by_constraints(rules: FrozenSpace, table: Table) -> Table:
    """With all choices that constraints connect to those of the table, so that forbidden combinations can be left out;
    as it is where these have too many combinations."""
    names = set(table.names)
    while True:
        more = names.union(*(one.meaning.names for one in rules.constraints if one.meaning.names & names))
        if more == names:
            break
        names = set(with_conditions(rules, more))
    ordered = tuple(name for name in rules.choices if name in names)
    if any(rules.choices[name].options is None for name in ordered) or count_combinations(rules, ordered) > LIMIT:
        return table
    shape = [len(rules.choices[name].options or ()) for name in ordered]
    return Table(ordered, np.broadcast_to(table.broadcast(ordered), shape))


def merge_tables(tables: Sequence[Table]) -> list[Table]:
    """Fewer tables with the same sum: one whose choices are among another's is added to that."""
    kept: list[Table] = []
    for table in sorted(tables, key=lambda table: -len(table.names)):
        for at, other in enumerate(kept):
            if set(table.names) <= set(other.names):
                kept[at] = Table(other.names, other.values + table.broadcast(other.names))
                break
        else:
            kept.append(table)
    return kept


def allowed_mask(rules: FrozenSpace, names: Sequence[str]) -> Array | None:
    """1 for the combinations of options that no constraint over them forbids; None where none is forbidden."""
    within = tuple(constraint for constraint in rules.constraints if constraint.meaning.names <= set(names))
    if not within or tuple(names) != with_conditions(rules, names):
        return None
    some = FrozenSpace(rules.choices, rules.conditions, within, rules.layout)
    mask = make_table(rules, names, lambda values: float(some.broken(values) is None)).values
    return None if mask.all() else mask


def constraint_tables(rules: FrozenSpace) -> list[Table]:
    """Tables of 0 where a constraint holds and infinity where not; none for a constraint of too many combinations."""
    found = []
    for constraint in rules.constraints:
        names = with_conditions(rules, constraint.meaning.names)
        if count_combinations(rules, names) > LIMIT or any(rules.choices[name].options is None for name in names):
            continue
        one = FrozenSpace(rules.choices, rules.conditions, (constraint,), rules.layout)
        found.append(make_table(rules, names, lambda values, one=one: math.inf if one.broken(values) else 0.0))  # type: ignore[misc]
    return found


def elimination_order(tables: Sequence[Table], order: Sequence[str]) -> list[tuple[str, tuple[str, ...]]] | None:
    """The choices of the tables in the order in which to minimize over them, each with the choices that it shares a
    table with at that step.

    None where a step has too many combinations. ``order`` is that of the space.
    """
    size = {name: count for table in tables for name, count in zip(table.names, table.values.shape, strict=True)}
    place = {name: at for at, name in enumerate(order)}
    neighbours: dict[str, set[str]] = {name: set() for name in size}
    for table in tables:
        for name in table.names:
            neighbours[name] |= set(table.names)
    plan = []
    while neighbours:
        count = {name: math.prod(size[other] for other in scope) for name, scope in neighbours.items()}
        name = min(neighbours, key=lambda name: (count[name], place[name]))
        if count[name] > CLIQUE:
            return None
        scope = neighbours.pop(name)
        plan.append((name, tuple(sorted(scope, key=place.__getitem__))))
        for other in scope - {name}:
            neighbours[other] = (neighbours[other] | scope) - {name}
    return plan


def reachable_range(space: Space, tables: Sequence[Table]) -> tuple[float, float]:
    """The least and the most that the tables sum to for a valid subnet, or bounds on them."""
    required, order = constraint_tables(space.rules), list(space.rules.choices)
    negative = [Table(one.names, -one.values) for one in tables]
    return _lowest(tables, required, order), -_lowest(negative, required, order)


def _lowest(tables: Sequence[Table], required: Sequence[Table], order: Sequence[str]) -> float:
    """The least sum of the tables, or a bound where a step has too many combinations."""
    left = [*tables, *required]
    plan = elimination_order(left, order)
    if plan is None:
        return float(sum(table.values.min() for table in tables))
    for name, scope in plan:
        total = sum((table.broadcast(scope) for table in left if name in table.names), np.zeros([1] * len(scope)))
        rest = tuple(other for other in scope if other != name)
        left = [table for table in left if name not in table.names] + [Table(rest, total.min(scope.index(name)))]
    return float(sum(table.values.sum() for table in left))
