"""A trial as an objective function sees it: its values, its device, a directory of its own, and reports."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from weft.errors import TuneError, nearest
from weft.space import Value

Report = Callable[[int, tuple[float, ...]], bool]
"""Takes a step and the values after it; True: the trial ends here."""

LAST = 2**31 - 1
"""The largest step that every storage has room for."""

OUTPUT = "output.txt"
"""What a trial's code prints goes into this file of its directory."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a function that is an objective is called with; ``trial["lr"]`` reads one of its values."""

    number: int
    params: Mapping[str, Value]
    """Of its choices, and of the derived dimensions of the space."""
    directory: Path
    """Of this trial alone. What is written here is still there when the trial continues after a crash."""
    device: str
    """As torch names it."""
    memory: int | None
    """Bytes that it may take of the device; None: all of it."""
    resumed: bool
    """Whether an earlier attempt at this trial left something in the directory."""
    seed: int
    """Of this trial alone; the global generators of Python, NumPy and torch are seeded with it too."""
    objectives: tuple[str, ...]
    tell: Report

    def __getitem__(self, name: str) -> Value:
        if name not in self.params:
            raise TuneError(f"trial {self.number} has no value '{name}'{nearest(name, self.params)}")
        return self.params[name]

    def report(self, values: Any, step: int) -> None:
        """The objectives' values after so many steps; raises ``Pruned`` where the study ends the trial.

        The same step may be reported again after a resume. Do not catch Pruned, or raise it again.
        """
        from weft.tune.training.trainer import Pruned

        number = operator.index(step)
        if not 0 <= number <= LAST:
            raise TuneError(f"a report is made after 0 to {LAST} steps, as databases can keep them, not {number}")
        if self.tell(number, numbers(values, self.objectives, "report")):
            raise Pruned


def numbers(values: Any, objectives: Sequence[str], what: str) -> tuple[float, ...]:
    """One number per objective, from a number, a sequence in the order of the objectives, or a mapping by name.

    >>> numbers({"loss": 1, "size": 2}, ("size", "loss"), "return")
    (2.0, 1.0)
    """
    wanted = f"{len(objectives)} numbers ({', '.join(objectives)})" if len(objectives) > 1 else "a number"
    if values is None:
        raise TuneError(f"the objective must {what} {wanted}, not nothing (None)")
    if isinstance(values, Mapping):
        if set(values) != set(objectives):
            raise TuneError(f"the objective must {what} {wanted}, not values of {', '.join(map(repr, values))}")
        values = [values[name] for name in objectives]
    if hasattr(values, "tolist"):  # NumPy and torch
        values = values.tolist()
    several = list(values) if isinstance(values, (list, tuple)) else [values]
    try:
        if any(isinstance(value, str) for value in several):
            raise TypeError
        found = tuple(float(cast(Any, value)) for value in several)
    except (TypeError, ValueError):
        raise TuneError(f"the objective must {what} {wanted}, not {str(values)[:80]!r}") from None
    if len(found) != len(objectives):
        raise TuneError(f"the objective must {what} {wanted}, not {len(found)}")
    return found


def finite(values: tuple[float, ...], objectives: Sequence[str]) -> tuple[float, ...]:
    """The values of a trial that is complete; TuneError names the objective that is not a finite number."""
    for name, value in zip(objectives, values, strict=True):
        if not math.isfinite(value):
            raise TuneError(f"'{name}' is {value} at the end: a complete trial needs a finite number per objective")
    return values
