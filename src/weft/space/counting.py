"""A counter of valid subnets by recursive conditioning: branch on the most connected choice, split, multiply."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from weft.errors import SpaceError
from weft.space.choice import Floats
from weft.space.expression import Expr, Value
from weft.space.subnet import FrozenSpace

MAX_CASES = 1_000_000
MAX_KNOWN = 100_000  # remembered weights, which counts for a counter that is used again and again
Weight = int | float | Fraction


class TooManyCases(SpaceError):
    """Counting would take too long: too many choices are tied together."""


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What is left to decide: choices without a value, and the rules as far as they are not yet settled."""

    free: tuple[str, ...]  # in the order of the space
    open: Mapping[str, Expr]  # conditions of free choices that are neither true nor false yet
    required: tuple[Expr, ...]
    either: frozenset[str] = frozenset()  # free choices whose condition hangs on a real number


class Counter:
    """Weighs what is left of a space: the number of valid subnets or, with `probabilities`, the share of uniform draws
    (of each active choice by itself) that satisfy the constraints.

    A rule that reads a real choice is taken to be satisfiable, since reals cannot be enumerated.
    """

    def __init__(self, rules: FrozenSpace, probabilities: bool = False) -> None:
        self._rules = rules
        self._probabilities = probabilities
        self._cases = 0
        self._known: dict[object, Weight] = {}

    def start(self) -> State | None:
        """Nothing decided yet; None where a constraint is false by itself."""
        conditions, required = self._rules.conditions, [constraint.meaning for constraint in self._rules.constraints]
        if any(not rule.names and not rule.value({}) for rule in required):
            return None
        opened = {name: rule for name, rule in conditions.items() if rule.names}
        state: State | None = State(tuple(self._rules.choices), opened, tuple(rule for rule in required if rule.names))
        for name, rule in conditions.items():
            if state is not None and not rule.names and not rule.value({}):
                state = self.assign(state, name, None)
        return state

    def assign(self, state: State, name: str, value: Value | None) -> State | None:
        """The state once the choice has this value (None: is inactive); None where a constraint is broken."""
        decided, free = [(name, value)], dict.fromkeys(state.free)
        opened, required = dict(state.open), state.required
        while decided:
            name, value = decided.pop()
            free.pop(name, None)
            for other, rule in list(opened.items()):
                if name in rule.names:
                    left = rule if value is None else rule.partial({name: value})
                    if value is not None and left.names:
                        opened[other] = left
                        continue
                    del opened[other]
                    if value is None or not left.value({}):
                        decided.append((other, None))
            kept = []
            for rule in required:
                if name in rule.names:
                    rule = Expr.of(True) if value is None else rule.partial({name: value})
                    if not rule.names and not rule.value({}):
                        return None
                if rule.names:
                    kept.append(rule)
            required = tuple(kept)
        return State(tuple(free), opened, required, state.either.intersection(free))

    def weight(self, state: State | None) -> Weight:
        """How much of the space is left in this state; 0 where nothing is. Raises TooManyCases rather than hang."""
        self._cases = 0
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        try:
            return self._product(state)
        except RecursionError:
            raise TooManyCases("counting the subnets goes too deep: too many choices are tied in one chain") from None

    def _product(self, state: State | None) -> Weight:
        if state is None:
            return 0
        total: Weight = 1
        for part in self._parts(self._relaxed(state)):
            weight = self._weigh(part)
            if not weight:
                return 0
            total = math.inf if math.inf in (total, weight) else total * weight
        return total

    def _weigh(self, part: State) -> Weight:
        if not part.open and not part.required and len(part.free) == 1:
            options = self._rules.choices[part.free[0]].options
            if self._probabilities:
                return 1
            return math.inf if options is None else len(options) + len(part.either)
        # Rules are folded as far as they are known, so states that differ in the past but not in the future meet here:
        # a sum of many terms under a bound costs as many cases as it has different partial sums.
        conditions = tuple((name, rule.program) for name, rule in part.open.items())
        key = (part.free, part.either, conditions, tuple(rule.program for rule in part.required))
        if key not in self._known:
            name = self._most_connected(part)
            options = self._rules.choices[name].options or ()
            share: Weight = Fraction(1, len(options)) if self._probabilities else 1
            total: Weight = 0
            for value in (*options, None) if name in part.either else options:
                self._cases += 1
                if self._cases > MAX_CASES:
                    raise TooManyCases(f"counting the subnets takes more than {MAX_CASES:,} cases{self._widest()}")
                weight = self._product(self.assign(part, name, value))
                total = math.inf if math.inf in (total, weight) else total + weight * share
            self._known[key] = total
        return self._known[key]

    def _widest(self) -> str:
        widest = max(self._rules.constraints, key=lambda constraint: len(constraint.meaning.names), default=None)
        return f"; {widest} ties {len(widest.meaning.names)} choices together" if widest else ""

    def _most_connected(self, part: State) -> str:
        """Of the choices that are known to be active. There is one, since conditions look back in the order only."""
        links: dict[str, set[str]] = {name: set() for name in part.free if name not in part.open}
        for scope in _scopes(part):
            for name in scope & links.keys():
                links[name] |= scope
        return max(links, key=lambda name: len(links[name]))

    def _relaxed(self, state: State) -> State:
        """Without the rules that read a real choice which is active but has no value."""
        either, opened, required = state.either, dict(state.open), state.required
        while True:
            reals = {n for n in state.free if n not in opened and isinstance(self._rules.choices[n], Floats)}
            loose = {name for name, rule in opened.items() if rule.names & reals}
            required = tuple(rule for rule in required if not rule.names & reals)
            if not loose:
                return State(state.free, opened, required, either)
            either |= loose
            opened = {name: rule for name, rule in opened.items() if name not in loose}

    def _parts(self, state: State) -> list[State]:
        """The connected components: no rule reads choices of two of them."""
        root = {name: name for name in state.free}

        def find(name: str) -> str:
            while root[name] != name:
                root[name] = root[root[name]]
                name = root[name]
            return name

        for scope in _scopes(state):
            first, *others = scope
            for other in others:
                root[find(other)] = find(first)
        groups: dict[str, list[str]] = {}
        for name in state.free:
            groups.setdefault(find(name), []).append(name)
        if len(groups) == 1:
            return [state]
        required: dict[str, list[Expr]] = {}
        for rule in state.required:
            required.setdefault(find(next(iter(rule.names))), []).append(rule)
        return [
            State(
                tuple(names),
                {name: state.open[name] for name in names if name in state.open},
                tuple(required.get(group, ())),
                state.either.intersection(names),
            )
            for group, names in groups.items()
        ]


def _scopes(state: State) -> Iterable[frozenset[str]]:
    for name, rule in state.open.items():
        yield rule.names | {name}
    for rule in state.required:
        yield rule.names
