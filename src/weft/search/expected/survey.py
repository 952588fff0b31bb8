"""Which subnets to measure, so that every part is seen with every combination of the choices that it depends on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.errors import SearchError
from weft.keys import generator
from weft.search.expected.meter import JOINT, Meter, Run, Unit, around_of, shapes_of
from weft.search.expected.noted import Noted
from weft.search.expected.table import LIMIT, Table, Values, closed, combinations, grid
from weft.space import Subnet, Value
from weft.space.counter import Counter, TooManyCases
from weft.supernet import Chain
from weft.supernet.elastic.mixture import choice_options

TRIES = 64  # random fillings of a partial subnet before the exact, slower way
TIMES = 4  # subnets that are measured in search of one combination that a module is to be seen with
CHECKS = 16  # random subnets that must agree with the tables before they are believed
Key = tuple[Value | None, ...]
_SIZES = ""  # in the place of a layer: the sizes of what enters the block of this number


class Survey:
    """Measures subnets until every part has been seen with every combination of the choices that it depends on."""

    def __init__(self, chain: Chain, meter: Meter) -> None:
        self.chain, self.meter, self.rules = chain, meter, chain.space.rules
        self.seen: dict[Subnet, dict[Unit, Any]] = {}
        self._modules: dict[Subnet, set[Unit]] = {}
        self._names: dict[Unit, tuple[str, ...]] = {}
        self._blamed: dict[Unit, set[str]] = defaultdict(set)
        self._filed: dict[Unit, dict[Key, float]] = {}
        self._scopes: dict[tuple[str, tuple[str, ...]], _Scope] = {}
        self._ways: dict[int, tuple[str, ...]] = {}
        self._entered: dict[tuple[Unit, tuple[str, ...]], set[Key]] = {}
        self._tried: dict[Any, int] = defaultdict(int)
        self._rng = generator("expected", chain.space.id)
        self._counter = Counter(self.rules)

    def cover(self, most: int | None = None) -> None:
        """Measures what is needed; raises SearchError where that is more than ``most`` subnets."""
        space = self.chain.space
        if not space.choices:
            self._see(space.subnet())
            return
        first, last = space.first(), space.last()
        for subnet in (first, last, *(self._between(last, first, {name}) for name in space.choices)):
            if subnet is not None:
                self._see(subnet)
        checked = 0
        while checked < CHECKS:
            if most is not None and len(self.seen) >= most:
                raise SearchError(f"{self.meter.metric} of {most} subnets do not tell those of all others")
            gap = self._gap()
            taught = self._see(gap or space.sample(self._rng))
            checked = 0 if gap or taught else checked + 1

    def tables(self) -> list[Table]:
        """One for each part, with NaN for combinations that no subnet has."""
        found = []
        for unit, names in self._parts():
            scope, filed = self._scope(unit[0], names), self._filed[unit]
            cells = [0.0 if key is None else filed.get(key, math.nan) for key in scope.cells]
            found.append(Table(scope.names, np.array(cells, dtype=np.float64).reshape(scope.shape)))
        return found

    def _see(self, subnet: Subnet) -> bool:
        """Measures the subnet; says whether this taught that a part is there, or depends on a choice."""
        if subnet in self.seen:
            return False
        runs = self.meter.runs(subnet)
        self.seen[subnet] = self._facts(subnet, runs)
        self._modules[subnet] = {unit for run in runs for unit in run.entered}
        before = dict(self._names)
        for unit in self._modules[subnet]:
            for names in self.meter.own(unit):
                known = (unit, names) in self._entered
                keys = self._entered.setdefault((unit, names), set())
                for other in [subnet] if known else self.seen:
                    if unit in self._modules[other]:
                        keys.add(tuple(other.values.get(name) for name in names))
        for unit in dict.fromkeys((*self.seen[subnet], *self._names)):  # sizes come first, since parts follow them
            self._file(unit)
        return before != self._names

    def _facts(self, subnet: Subnet, runs: Sequence[Run]) -> dict[Unit, Any]:
        """The sizes of what enters each block (unless they make no difference), and the cost of each part."""
        facts: dict[Unit, Any] = {}
        if self.meter.metric != "parameters":
            after = {
                layer.block: shapes_of(run.carry) for layer, run in zip(self.chain.route(subnet), runs, strict=True)
            }
            sizes: Any = ()
            for index in range(len(self.chain.blocks)):
                facts[_SIZES, str(index)] = sizes
                sizes = after.get(index, sizes)
        return facts | {unit: cost for run in runs for unit, cost in run.costs.items()}

    def _parts(self) -> list[tuple[Unit, tuple[str, ...]]]:
        return [(unit, names) for unit, names in self._names.items() if unit[0] != _SIZES]

    def _file(self, unit: Unit) -> None:
        """Keeps what the part costs by the choices that it depends on; where that is contradictory, there are more."""
        while True:
            wanted = self._known_names(unit) | self._blamed[unit]
            names = tuple(name for name in self.rules.choices if name in wanted)
            if names != self._names.get(unit):
                self._names[unit], self._filed[unit], subnets = names, {}, list(self.seen)
            else:
                subnets = [next(reversed(self.seen))]
            for subnet in subnets:
                if self._uses(subnet, unit[0]):
                    cost, key = self._cost(subnet, unit)
                    if self._filed[unit].setdefault(key, cost) != cost:
                        self._blamed[unit] |= self._blame(unit, subnet)
                        break
            else:
                return

    def _known_names(self, unit: Unit) -> set[str]:
        """What a part reads, and what the sizes of the layer's inputs follow."""
        if unit[0] == _SIZES:
            return set()
        own = self.meter.names(unit)
        every = own.union(self._names.get((_SIZES, str(self.chain.layers[unit[0]].block)), ()))
        return every if combinations(self.rules, every) <= JOINT else own

    def _cost(self, subnet: Subnet, unit: Unit) -> tuple[Any, Key]:
        return self.seen[subnet].get(unit, 0.0), tuple(subnet.values.get(name) for name in self._names[unit])

    def _uses(self, subnet: Subnet, layer: str) -> bool:
        return layer == _SIZES or any(used.name == layer for used in self.chain.route(subnet))

    def _blame(self, unit: Unit, second: Subnet) -> set[str]:
        """Choices that change the cost: of those in which a subnet differs from the most similar one that should cost
        the same, found by halving the way between the two."""
        cost, key = self._cost(second, unit)
        others = [other for other in self.seen if self._uses(other, unit[0])]
        others = [other for other in others if self._cost(other, unit)[1] == key and self._cost(other, unit)[0] != cost]
        first = min(others, key=lambda other: len(self._differing(other, second)))
        differ = self._differing(first, second)
        reads = self.meter.reads[unit[0]]
        likely = set().union(*reads.values()) & set(differ) if reads else set(differ)
        # A part is often like others: its neighbours in a module, or the same part of another layer.
        alike = [
            names for other, names in self._blamed.items() if other[1] == unit[1] or around_of(other) == around_of(unit)
        ]
        found = set().union(*alike) & likely - set(self._names[unit])
        if found:
            return found
        low, high, cost = 0, len(differ), self._cost(first, unit)[0]
        tried: set[int] = set()
        while left := sorted(set(range(low + 1, high)) - tried, key=lambda at: abs(2 * at - low - high)):
            tried.add(left[0])
            between = self._between(first, second, set(differ[: left[0]]))
            if between is not None and self._uses(between, unit[0]):
                if self._facts(between, self.meter.runs(between)).get(unit, 0.0) == cost:
                    low = left[0]
                else:
                    high = left[0]
        found = set(differ[low:high]) - set(self._names[unit])
        if not found:
            raise SearchError(
                f"the {self.meter.metric} of layer '{unit[0]}' differ between two runs of what should be the same "
                f"('{first}' and '{second}'): only what follows from the subnet can be expected"
            )
        return found

    def _differing(self, first: Subnet, second: Subnet) -> list[str]:
        return [name for name in self.rules.choices if first.values.get(name) != second.values.get(name)]

    def _between(self, first: Subnet, second: Subnet, changed: set[str]) -> Subnet | None:
        def pick(name: str, choice: Any) -> Value:
            ordered = (second, first) if name in changed else (first, second)
            held = [subnet.values[name] for subnet in ordered if name in subnet.values]
            value: Value = held[0] if held else choice.options[0] if choice.options else choice.sample(self._rng)
            return value

        values = self.rules.settle(pick)
        return None if self.rules.broken(values) else self.rules.subnet(values)

    def _gap(self) -> Subnet | None:
        """A subnet with combinations that have not been seen, as many as fit together; None where none is left.

        To be seen are every layer, every module with all that it asks for, and every part with all that its cost
        follows.
        """
        used = {layer.name for subnet in self.seen for layer in self.chain.route(subnet)}
        done: dict[tuple[str, tuple[str, ...]], set[Key]] = {}
        done.update({(name, ()): {()} if name in used else set() for name in self.chain.layers})
        parts = [((unit, names), self._filed[unit].keys()) for unit, names in self._parts()]
        for (unit, names), keys in (*self._entered.items(), *parts):
            place = (unit[0], names)
            done[place] = done[place] & keys if place in done else set(keys)
        open_: list[tuple[_Scope, Key]] = []
        for place, seen in done.items():
            scope = self._scope(*place)
            open_ += [(scope, key) for key in scope.ways if key not in seen and self._tried[(*place, key)] < TIMES]
        open_.sort(key=lambda pair: -len(pair[0].ways))
        while open_:
            scope, key = open_[0]
            for way in scope.ways[key][:TRIES]:
                subnet = self._complete(self._joined(way, open_[1:])) or self._complete(way)
                if subnet is not None:
                    used = {layer.name for layer in self.chain.route(subnet)}
                    for other, wanted in open_:
                        if other.layer in used and wanted == tuple(subnet.values.get(name) for name in other.reads):
                            self._tried[other.layer, other.reads, wanted] += 1
                    return subnet
            self._tried[scope.layer, scope.reads, key] = TIMES
            del open_[0]
        return None

    def _joined(self, way: Values, others: Sequence[tuple[_Scope, Key]]) -> Values:
        joined, done = dict(way), set[int]()
        for scope, key in others:
            if id(scope) not in done:
                for other in scope.ways[key]:
                    if all(joined.get(name, value) == value for name, value in other.items()):
                        joined.update(other)
                        done.add(id(scope))
                        break
        return joined

    def _complete(self, given: Values) -> Subnet | None:
        """A valid subnet with the given values; None where there is none."""

        def fill(name: str, choice: Any) -> Value:
            value: Value = given[name] if name in given else choice.sample(self._rng)
            return value

        for _ in range(TRIES if self.rules.constraints else 1):
            values = self.rules.settle(fill)
            if given.keys() <= values.keys() and self.rules.broken(values) is None:
                return self.rules.subnet(values)
        try:
            return self._complete_surely(given) if self.rules.constraints else None
        except TooManyCases:
            return None

    def _complete_surely(self, given: Values) -> Subnet | None:
        state, values = self._counter.start(), Values()
        for name, choice in self.rules.choices.items():
            if not self.rules.is_active(name, values):
                continue
            options = [given[name]] if name in given else list(choice.options or (choice.sample(self._rng),))
            for option in options:
                after = self._counter.assign(state, name, option) if state is not None else None
                if self._counter.weight(after):
                    values[name], state = option, after
                    break
            else:
                return None
        return self.rules.subnet(values) if given.keys() <= values.keys() and not self.rules.broken(values) else None

    def _scope(self, layer: str, reads: tuple[str, ...]) -> _Scope:
        if (layer, reads) not in self._scopes:
            self._scopes[layer, reads] = self._make_scope(layer, reads)
        return self._scopes[layer, reads]

    def _make_scope(self, layer: str, reads: tuple[str, ...]) -> _Scope:
        block = self.chain.blocks[self.chain.layers[layer].block]
        names = closed(self.rules, (*reads, *self._activity(self.chain.layers[layer].block)))
        for name in names:
            choice_options(self.chain.space, name)
        if combinations(self.rules, names) > LIMIT:
            raise SearchError(
                f"the {self.meter.metric} of layer '{layer}' depend on {', '.join(names)}: "
                f"{combinations(self.rules, names):,} combinations, more than {LIMIT:,}. Let it depend on fewer choices"
            )
        cells: list[Key | None] = []
        ways: dict[Key, list[Values]] = {}
        for values in grid(self.rules, names):
            if block.pick(self.rules.subnet(values)) != layer:
                cells.append(None)
                continue
            key = tuple(values.get(name) for name in reads)
            cells.append(key)
            if self.rules.broken(values) is None:
                ways.setdefault(key, []).insert(0, values)  # the last first: with the deepest way the most goes along
        shape = tuple(len(choice_options(self.chain.space, name)) for name in names)
        return _Scope(layer, reads, names, shape, cells, ways)

    def _activity(self, index: int) -> tuple[str, ...]:
        """The choices that say which layer of the block is used: whatever the block asks for when it picks."""
        if index not in self._ways:
            block, names = self.chain.blocks[index], set[str]()
            while True:
                asked: set[str] = set()
                for values in grid(self.rules, closed(self.rules, names)):
                    try:
                        block.pick(self.rules.subnet(Noted(values, self.rules.choices, asked.add)))
                    except Exception:  # of a name that is not there yet
                        if not asked & self.rules.choices.keys() - names:
                            raise
                new = asked & self.rules.choices.keys() - names
                if not new:
                    break
                names |= new
            self._ways[index] = closed(self.rules, names)
        return self._ways[index]


@dataclass(frozen=True, slots=True, eq=False)
class _Scope:
    """What a part of a layer depends on: choices, the key of each combination, and values that lead to each key."""

    layer: str
    reads: tuple[str, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    cells: list[Key | None]  # None where the layer is not used
    ways: dict[Key, list[Values]]
