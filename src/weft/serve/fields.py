"""Fields of events and of other files, which may hold anything: each is read as what it should be, or as nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.errors import RunError

LARGEST = 2**53
"""Steps from here on are no whole numbers to a browser."""


def number(value: object) -> float | None:
    """A number of an event, whose NaN and infinities are written as words; None for anything else.

    >>> number(3), number("inf"), number("fast"), number(True)
    (3.0, inf, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def whole_number(value: object) -> int | None:
    """A step or another count that a browser can hold; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST else None


def rounded(value: float | None) -> float | None:
    """Seven digits, which is more than a chart can show; None where JSON has no number.

    >>> rounded(1 / 3), rounded(float("nan"))
    (0.3333333, None)
    """
    return float(f"{value:.7g}") if value is not None and math.isfinite(value) else None


def finite(value: object) -> float | None:
    """A number of an event that is neither NaN nor infinite; None for anything else."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def mapping(value: object) -> Mapping[str, Any]:
    """A table; an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: object) -> list[Any]:
    """A list; an empty one for anything else."""
    return value if isinstance(value, list) else []


def read_mapping(path: Path, reader: Callable[[Path], Any]) -> Mapping[str, Any]:
    """The table that a file holds; an empty one where the file is missing or damaged."""
    try:
        return mapping(reader(path)) if path.exists() else {}
    except RunError:
        return {}
