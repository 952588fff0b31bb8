"""Tables of numbers over few choices: sums of them, what constraints forbid, and the least that a sum can be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.elastic.mixture import choice_options
from weft.space import Space, Subnet, Value
from weft.space.counting import TooManyCases
from weft.space.subnet import FrozenSpace

LIMIT = 1 << 14  # combinations of options that one table may have
CLIQUE = 1 << 22  # and that may come together where the range is worked out
Array = npt.NDArray[np.float64]
Values = dict[str, Value]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Numbers by the options of a few choices: one axis a choice, in the order of the space."""

    names: tuple[str, ...]
    values: Array

    def along(self, names: Sequence[str]) -> Array:
        """The values with an axis for each of these names, which hold its own in the same order."""
        sizes = dict(zip(self.names, self.values.shape, strict=True))
        return self.values.reshape([sizes.get(name, 1) for name in names])


def closed(rules: FrozenSpace, names: Iterable[str]) -> tuple[str, ...]:
    """The names and all that their conditions read, in the order of the space."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += rules.conditions[name].names if name in rules.conditions else ()
    return tuple(name for name in rules.choices if name in found)


def grid(rules: FrozenSpace, names: Sequence[str], settled: Values | None = None) -> Iterator[tuple[Values, Values]]:
    """All combinations of options of these choices, the last varying fastest, and for each the values that are active.

    The choices must be closed, together with those that are settled, which are among the active ones."""
    order = [name for name in rules.choices if name in settled or name in names] if settled else names
    for combination in itertools.product(*(rules.choices[name].options or () for name in names)):
        raw = dict(zip(names, combination, strict=True))
        every, values = {**settled, **raw} if settled else raw, Values()
        for name in order:
            if rules.is_active(name, values):
                values[name] = every[name]
        yield raw, values


def combinations(rules: FrozenSpace, names: Iterable[str]) -> int:
    """How many combinations of options there are; real choices raise SpaceError elsewhere and count as one here."""
    return math.prod(len(rules.choices[name].options or ("",)) for name in names)


def tabled(rules: FrozenSpace, names: Iterable[str], number: Callable[[Values], float]) -> Table:
    """The table of a function of these choices."""
    names = closed(rules, names)
    shape = [len(rules.choices[name].options or ()) for name in names]
    return Table(names, np.array([number(values) for _, values in grid(rules, names)], dtype=np.float64).reshape(shape))


def constraint_tables(rules: FrozenSpace) -> tuple[list[Table], bool]:
    """Tables of 0 where a constraint holds and infinity where not; and whether there is one for every constraint."""
    found, complete = [], True
    for constraint in rules.constraints:
        names = closed(rules, constraint.meaning.names)
        if combinations(rules, names) > LIMIT or any(rules.choices[name].options is None for name in names):
            complete = False
            continue
        one = FrozenSpace(rules.choices, rules.conditions, (constraint,), rules.layout)
        found.append(tabled(rules, names, lambda values, one=one: math.inf if one.broken(values) else 0.0))  # type: ignore[misc]
    return found, complete


def elimination(tables: Sequence[Table], order: Sequence[str]) -> list[tuple[str, tuple[str, ...]]] | None:
    """The choices of the tables in the order in which to eliminate them, each with all that it is tied to by then.

    None where too many combinations come together. ``order`` is that of the space.
    """
    size = {name: count for table in tables for name, count in zip(table.names, table.values.shape, strict=True)}
    place = {name: at for at, name in enumerate(order)}
    tied: dict[str, set[str]] = {name: set() for name in size}
    for table in tables:
        for name in table.names:
            tied[name] |= set(table.names)
    plan = []
    while tied:
        count = {name: math.prod(size[other] for other in scope) for name, scope in tied.items()}
        name = min(tied, key=lambda name: (count[name], place[name]))
        if count[name] > CLIQUE:
            return None
        scope = tied.pop(name)
        plan.append((name, tuple(sorted(scope, key=place.__getitem__))))
        for other in scope - {name}:
            tied[other] = (tied[other] | scope) - {name}
    return plan


def _lowest(tables: Sequence[Table], order: Sequence[str]) -> float | None:
    """The least sum of the tables; None where too many choices come together."""
    plan, left = elimination(tables, order), list(tables)
    if plan is None:
        return None
    for name, scope in plan:
        total = sum((table.along(scope) for table in left if name in table.names), np.zeros([1] * len(scope)))
        rest = tuple(other for other in scope if other != name)
        left = [table for table in left if name not in table.names] + [Table(rest, total.min(scope.index(name)))]
    return float(sum(table.values.sum() for table in left))


def reachable(space: Space, tables: Sequence[Table]) -> tuple[float, float]:
    """The least and the most that the tables come to for a valid subnet, or bounds on them."""
    rules = space.rules
    required, complete = constraint_tables(rules)
    ends = []
    for sign in (1, -1):
        signed = [Table(table.names, sign * table.values) for table in tables]
        found = _lowest([*signed, *required], list(rules.choices)) if complete or not _is_small(space) else None
        if found is not None:
            ends.append(sign * found)
        elif _is_small(space):
            ends.append(sign * min(_at(space, signed, subnet) for subnet in space.enumerate(LIMIT)))
        else:
            ends.append(sign * sum(float(table.values.min()) for table in signed))
    return ends[0], ends[1]


def _is_small(space: Space) -> bool:
    try:
        return 0 < space.size() <= LIMIT
    except TooManyCases:
        return False


def _at(space: Space, tables: Sequence[Table], subnet: Subnet) -> float:
    place = {name: choice_options(space, name).index(value) for name, value in subnet.values.items()}
    return float(sum(table.values[tuple(place.get(name, 0) for name in table.names)] for table in tables))


def reduced(table: Table) -> Table:
    """Without the choices that make no difference; combinations that no subnet has (NaN) agree with everything."""
    names, values = list(table.names), table.values
    for name in table.names:
        axis = names.index(name)
        low, high = np.fmin.reduce(values, axis), np.fmax.reduce(values, axis)
        if np.array_equal(low, high, equal_nan=True):
            names.remove(name)
            values = low
    return Table(tuple(names), np.asarray(values))


def filled(table: Table) -> Table:
    """With a number, the mean of the others, for combinations that no subnet has."""
    seen = table.values[~np.isnan(table.values)]
    return Table(table.names, np.where(np.isnan(table.values), seen.mean() if seen.size else 0.0, table.values))


def with_tied(rules: FrozenSpace, table: Table) -> Table:
    """With all choices that constraints tie to those of the table, so that forbidden combinations can be left out."""
    names = set(table.names)
    if not any(constraint.meaning.names & names for constraint in rules.constraints):
        return table
    while True:
        more = set(closed(rules, names))
        for constraint in rules.constraints:
            if constraint.meaning.names & more:
                more |= constraint.meaning.names
        if more == names:
            break
        if combinations(rules, more) > LIMIT or any(rules.choices[name].options is None for name in more):
            break
        names = more
    ordered = tuple(name for name in rules.choices if name in names)
    shape = [len(rules.choices[name].options or ()) for name in ordered]
    return Table(ordered, np.broadcast_to(table.along(ordered), shape))


def merged(tables: Sequence[Table]) -> list[Table]:
    """Fewer tables with the same sum: one whose choices are among another's is added to that."""
    kept: list[Table] = []
    for table in sorted(tables, key=lambda table: -len(table.names)):
        for at, other in enumerate(kept):
            if set(table.names) <= set(other.names):
                kept[at] = Table(other.names, other.values + table.along(other.names))
                break
        else:
            kept.append(table)
    return kept


def allowed_mask(rules: FrozenSpace, names: Sequence[str]) -> Array | None:
    """1 for the combinations of options that no constraint over them forbids; None where none does."""
    within = [constraint for constraint in rules.constraints if constraint.meaning.names <= set(names)]
    if not within or tuple(names) != closed(rules, names):
        return None
    some = FrozenSpace(rules.choices, rules.conditions, tuple(within), rules.layout)
    mask = tabled(rules, names, lambda values: float(some.broken(values) is None)).values
    return None if mask.all() else mask
