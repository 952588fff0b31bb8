"""The outcome of a trial: the numbers that it is judged by, or what is wrong with what it returned."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def checked(values: object, objectives: int) -> tuple[str | None, tuple[float, ...] | None]:
    """What is wrong with the values of a complete trial, or None and the values.

    >>> checked(0.5, 1), checked(None, 1)[0]
    ((None, (0.5,)), 'the trial returned nothing; it must return a number')
    """
    asked = "a number" if objectives == 1 else f"{objectives} numbers"
    if values is None:
        return f"the trial returned nothing; it must return {asked}", None
    try:
        told = tuple(float(one) for one in (values if isinstance(values, Sequence | np.ndarray) else [values]))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"the trial returned {values!r:.100}; it must return {asked}", None
    if len(told) != objectives:
        return f"the trial returned {len(told)} values; it must return {asked}", None
    if not all(map(math.isfinite, told)):
        shown = ", ".join(map(str, told))
        return f"the trial returned {shown}, which is not finite; look at its learning rate and its loss", None
    return None, told
