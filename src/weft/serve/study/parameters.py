"""Parameters: what a study varies, as the axes of a chart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.errors import SpaceError

if TYPE_CHECKING:
    from weft.space import Space

OPTIONS = 100
"""The most options of a parameter that are shown."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A range of numbers, or options without an order."""

    name: str
    log: bool = False
    options: tuple[Any, ...] | None = None
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, Any]:
        options = None if self.options is None else list(self.options[:OPTIONS])
        return {"name": self.name, "log": self.log, "options": options, "low": self.low, "high": self.high}


def read_space(told: object) -> Space | None:
    """The space that a study told of; None where it told of none, or of one that cannot be."""
    from weft.space import Space

    try:
        return None if told is None else Space.from_json(told)
    except (SpaceError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def of_space(space: Space) -> list[Parameter]:
    """Those of a space, in its order; integers that are evenly spaced are a range."""
    from weft.space import Floats, Integers
    from weft.tune.distributions import step_of

    found = []
    for name, choice in space.choices.items():
        if isinstance(choice, Floats):
            found.append(Parameter(name, choice.log, None, choice.low, choice.high))
        elif isinstance(choice, Integers) and len(choice.values) > 2 and step_of(choice) is not None:
            found.append(Parameter(name, False, None, choice.values[0], choice.values[-1]))
        else:
            found.append(Parameter(name, options=tuple(choice.options)))
    return found


def of_config(told: object) -> list[Parameter]:
    """Those of a configuration: lists of options, and tables with low and high."""
    found = []
    for name, given in told.items() if isinstance(told, Mapping) else ():
        if isinstance(given, list):
            found.append(Parameter(str(name), options=tuple(given)))
        elif isinstance(given, Mapping) and all(_is_number(given.get(end)) for end in ("low", "high")):
            found.append(Parameter(str(name), bool(given.get("log")), None, given["low"], given["high"]))
    return found


def observed(params: Iterable[Mapping[str, Any]]) -> list[Parameter]:
    """What trials were tried with, where nothing says what they were drawn from.

    >>> [one.name for one in observed([{"lr": 0.1, "width": 16}, {"lr": 0.2, "kind": "adam"}])]
    ['lr', 'width', 'kind']
    """
    seen: dict[str, dict[str, Any]] = {}
    for one in params:
        for name, value in one.items():
            seen.setdefault(str(name), {})[json.dumps(value, sort_keys=True, default=str)] = value
    found = []
    for name, values in seen.items():
        if all(_is_number(value) for value in values.values()):
            found.append(Parameter(name, False, None, min(values.values()), max(values.values())))
        else:
            found.append(Parameter(name, options=tuple(values[key] for key in sorted(values))))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
