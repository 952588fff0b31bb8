"""The kinds of choice that a space is made of: a pick of options, of integers, or of a real interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from weft.errors import SpaceError
from weft.space.expression import Value, plain

MAX_OPTIONS = 100_000


class _Writable:
    """What `choice_from_json` reads."""

    __slots__ = ()
    kind: ClassVar[str]

    def to_json(self) -> dict[str, object]:
        values = ((entry.name, getattr(self, entry.name)) for entry in fields(self))  # type: ignore[arg-type]
        written = {name: list(value) if isinstance(value, tuple) else value for name, value in values}
        return {"kind": self.kind, **written}


class _Finite(_Writable):
    """A choice of options that can be listed."""

    __slots__ = ()
    options: tuple[Value, ...]

    def sample(self, rng: np.random.Generator) -> Value:
        return self.options[draw(rng, len(self.options))]

    def contains(self, value: object) -> bool:
        return self._find(value) is not None

    def canonical(self, value: object) -> Value:
        """The option that equals the value; SpaceError where none does."""
        option = self._find(value)
        if option is None:
            more = ", ..." if len(self.options) > 12 else ""
            raise SpaceError(f"{value!r} is not an option; options: {', '.join(map(repr, self.options[:12]))}{more}")
        return option

    def _find(self, value: object) -> Value | None:
        try:
            plain_value = plain(value)
        except SpaceError:
            return None
        for option in self.options:
            if option == plain_value and isinstance(option, bool) == isinstance(plain_value, bool):
                return option
        return None


@dataclass(frozen=True, slots=True)
class Categorical(_Finite):
    """One of a few named things, in no order but that of writing."""

    kind = "categorical"
    options: tuple[Value, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", _check_options(self.options))

    def neighbours(self, value: Value) -> tuple[Value, ...]:
        return tuple(option for option in self.options if option != value)


@dataclass(frozen=True, slots=True)
class Integers(_Finite):
    """One of a finite set of integers; `ordered` sorts them and makes only adjacent ones neighbours."""

    kind = "integers"
    values: tuple[int, ...]
    ordered: bool = True

    def __post_init__(self) -> None:
        values = _check_options(self.values)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int):
                raise SpaceError(f"{value!r} is no integer; use a categorical choice for other values")
        object.__setattr__(self, "values", tuple(sorted(values, key=int)) if self.ordered else values)

    @property
    def options(self) -> tuple[Value, ...]:  # type: ignore[override]
        return self.values

    def neighbours(self, value: Value) -> tuple[Value, ...]:
        if not self.ordered:
            return tuple(option for option in self.values if option != value)
        at = self.values.index(int(self.canonical(value)))
        return self.values[max(at - 1, 0) : at] + self.values[at + 1 : at + 2]


@dataclass(frozen=True, slots=True)
class Floats(_Writable):
    """A real number of [low, high]; with `log`, uniform in its logarithm."""

    kind = "floats"
    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        for end in ("low", "high"):
            bound = plain(getattr(self, end))
            if isinstance(bound, str | bool):
                raise SpaceError(f"the bounds of a real choice are numbers, not {bound!r}")
            object.__setattr__(self, end, float(bound))
        if not self.low < self.high:
            raise SpaceError(f"a real choice needs low < high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise SpaceError(f"a real choice on a log scale needs low > 0, got {self.low}")

    @property
    def options(self) -> None:
        return None

    def sample(self, rng: np.random.Generator) -> Value:
        return self._at(float(rng.random()))

    def neighbours(self, value: Value) -> tuple[Value, ...]:
        """A tenth and a hundredth of the interval to either side (of its logarithm with `log`)."""
        here = float(self.canonical(value))
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, here))
        share = (at - low) / (high - low)
        steps = (self._at(share + step) for step in (-0.1, -0.01, 0.01, 0.1))
        return tuple(step for step in dict.fromkeys(steps) if step != here)

    def contains(self, value: object) -> bool:
        try:
            number = plain(value)
        except SpaceError:
            return False
        return not isinstance(number, str | bool) and self.low <= number <= self.high

    def canonical(self, value: object) -> Value:
        if not self.contains(value):
            raise SpaceError(f"{value!r} is not in [{self.low}, {self.high}]")
        return float(plain(value))

    def grid(self, points: int) -> tuple[Value, ...]:
        """So many numbers from end to end."""
        return tuple(dict.fromkeys(self._at(at / (points - 1)) for at in range(points)))

    def _at(self, share: float) -> float:
        """The number at this share of the interval, never outside of it."""
        if share <= 0 or share >= 1:
            return self.low if share <= 0 else self.high
        if self.log:
            number = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            number = self.low * (1 - share) + self.high * share
        return min(max(number, self.low), self.high)


Choice = Categorical | Integers | Floats


def choice_from_json(data: Mapping[str, object]) -> Choice:
    """The choice that `to_json` wrote; a missing, unknown or mistyped field is a SpaceError."""
    for kind, expected in _FIELDS.items():
        if data.get("kind") == kind.kind and set(data) == {"kind", *expected}:
            for name, types in expected.items():
                if not isinstance(data[name], types) or (isinstance(data[name], bool) and types is not bool):
                    raise SpaceError(f"'{name}' of a choice cannot be {data[name]!r}")
            return kind(**{name: tuple(item) if isinstance(item := data[name], list) else item for name in expected})  # type: ignore[arg-type]
    raise SpaceError(f"{dict(data)!r} is no choice: kinds are categorical, integers and floats")


def draw(rng: np.random.Generator, count: int) -> int:
    """A uniform index below `count`, from the plainest draw there is rather than NumPy's changeable integers."""
    return int(rng.random() * count)


_FIELDS: dict[type[Choice], dict[str, type | tuple[type, ...]]] = {
    Categorical: {"options": list},
    Integers: {"values": list, "ordered": bool},
    Floats: {"low": (int, float), "high": (int, float), "log": bool},
}


def _check_options(options: tuple[Value, ...]) -> tuple[Value, ...]:
    options = tuple(plain(option) for option in options)
    if not options:
        raise SpaceError("a choice needs at least one option")
    if len(options) > MAX_OPTIONS:
        raise SpaceError(f"a choice of {len(options)} options is more than {MAX_OPTIONS}; use a step, or a real choice")
    seen: dict[Value, Value] = {}
    for option in options:
        if option in seen:  # 1, 1.0 and True are one value to Python, so they cannot be told apart in a subnet
            raise SpaceError(f"options {seen[option]!r} and {option!r} are the same value; each option occurs once")
        seen[option] = option
    return options
