"""Learning-rate schedules: a factor of the base rate as a pure function of the step."""

from __future__ import annotations

import math
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


def make_schedule(kind: str | Schedule, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """A named schedule with a linear warm-up over the first steps, never below ``floor`` once warm.

    >>> schedule = make_schedule("cosine", warmup=2)
    >>> [round(schedule(step, 6), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if callable(kind):
        base = kind
    elif kind in _KINDS:
        base = _KINDS[kind]
    else:
        raise TrainError(f"unknown schedule '{kind}'{nearest(kind, _KINDS)}")
    if warmup < 0 or not 0.0 <= floor <= 1.0:
        raise TrainError(f"a schedule has warmup >= 0 and 0 <= floor <= 1, not warmup={warmup}, floor={floor}")

    def schedule(step: int, steps: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return max(base(step - warmup, max(steps - warmup, 1)), floor)

    # The manifest of a run that takes over this schedule, as ``retrain`` does, says which one it is.
    schedule.__qualname__ = f"{getattr(base, '__qualname__', base)}(warmup={warmup}, floor={floor})"
    return schedule
