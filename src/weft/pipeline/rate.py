"""Learning-rate schedules: a factor of the base rate as a pure function of the step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from weft.errors import TrainError, nearest

Schedule = Callable[[int, int], float]
"""``schedule(step, steps)`` gives the factor of the base learning rate; nothing else may influence it."""


def constant(step: int, steps: int) -> float:
    return 1.0


def linear(step: int, steps: int) -> float:
    """From 1 down to 0 after the last step."""
    return 1.0 - step / steps


def cosine(step: int, steps: int) -> float:
    """From 1 down to 0 after the last step, along half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * step / steps))


_KINDS: dict[str, Schedule] = {"constant": constant, "linear": linear, "cosine": cosine}


def is_named(text: str) -> bool:
    """Whether a text has the form of a schedule's name, such as ``cosine`` or ``cosine:0.1``, and not of code."""
    return _FORM.fullmatch(text) is not None


def make_schedule(kind: str | Schedule, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """A named schedule with a linear warm-up over the first steps, never below ``floor`` once warm.

    ``cosine:0.1`` and ``linear:0.1`` go down to a tenth of the base rate instead of to 0.

    >>> schedule = make_schedule("cosine", warmup=2)
    >>> [round(schedule(step, 6), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if callable(kind):
        base = kind
    else:
        base = _named(kind)
    if warmup < 0 or not 0.0 <= floor <= 1.0:
        raise TrainError(f"a schedule has warmup >= 0 and 0 <= floor <= 1, not warmup={warmup}, floor={floor}")

    def schedule(step: int, steps: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return max(base(step - warmup, max(steps - warmup, 1)), floor)

    # The manifest of a run that takes over this schedule, as ``retrain`` does, says which one it is.
    schedule.__qualname__ = f"{getattr(base, '__qualname__', base)}(warmup={warmup}, floor={floor})"
    return schedule


_FORM = re.compile(r"(\w+)(?::(\d*\.?\d*(?:e-?\d+)?))?")


def _named(text: str) -> Schedule:
    form = _FORM.fullmatch(text)
    kind, end = (form[1], form[2]) if form else (text, None)
    if kind not in _KINDS:
        raise TrainError(f"unknown schedule '{text}'{nearest(kind, _KINDS)}")
    if end is None:
        return _KINDS[kind]
    if kind == "constant" or not end.strip(".") or not 0.0 <= float(end) <= 1.0:
        raise TrainError(f"schedule '{text}': write the part of the rate to go down to, 0 to 1, as in cosine:0.1")
    base, least = _KINDS[kind], float(end)

    def eased(step: int, steps: int) -> float:
        return least + (1.0 - least) * base(step, steps)

    eased.__qualname__ = text
    return eased
