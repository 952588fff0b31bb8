"""A curve in bounded memory: points in buckets that double in width whenever there are too many of them."""

from __future__ import annotations

import math
from typing import Any

BUCKETS = 1000
"""The most points that a chart is given of one curve."""

LARGEST = 2**53
"""Steps from here on are no whole numbers to a browser."""


class Curve:
    """Points (x, y) with whole x, of which at most `cap` buckets are kept, each with its mean, least and greatest y.

    The width is the least power of two at which the points fill no more than `cap` buckets, so the order in which they
    come does not matter. A y that is no number makes a gap where its bucket has no other.
    """

    def __init__(self, cap: int = BUCKETS) -> None:
        self.cap = cap
        self.width = 1
        self.points = 0
        self._buckets: dict[
            int, list[float]
        ] = {}  # by x // width: points, numbers, sum of x, sum of y, least, greatest

    def add(self, x: int, y: float) -> None:
        self.points += 1
        number = math.isfinite(y)
        bucket = self._buckets.get(x // self.width)
        if bucket is None:
            seen = [1, 1, x, y, y, y] if number else [1, 0, x, 0.0, math.inf, -math.inf]
            self._buckets[x // self.width] = seen
            while len(self._buckets) > self.cap:
                self._widen()
            return
        bucket[0] += 1
        bucket[2] += x
        if number:
            bucket[1] += 1
            bucket[3] += y
            bucket[4] = min(bucket[4], y)
            bucket[5] = max(bucket[5], y)

    def last(self) -> float | None:
        """The mean of the bucket that is farthest to the right."""
        return _mean(self._buckets[max(self._buckets)]) if self._buckets else None

    def coarser(self, cap: int) -> Curve:
        """The same points in at most `cap` buckets."""
        other = Curve(cap)
        other.width, other.points = self.width, self.points
        other._buckets = {key: list(bucket) for key, bucket in self._buckets.items()}
        while len(other._buckets) > cap:
            other._widen()
        return other

    def to_json(self) -> dict[str, Any]:
        """`x` and `y` from left to right, and `low` and `high` where a bucket holds more than one point."""
        rows = [self._buckets[key] for key in sorted(self._buckets)]
        found: dict[str, Any] = {
            "x": [int(row[2]) if row[0] == 1 else round(row[2] / row[0], 1) for row in rows],
            "y": [rounded(_mean(row)) for row in rows],
        }
        if any(row[0] > 1 for row in rows):
            found["low"] = [rounded(row[4]) for row in rows]
            found["high"] = [rounded(row[5]) for row in rows]
        return found

    def _widen(self) -> None:
        self.width *= 2
        merged: dict[int, list[float]] = {}
        for key, bucket in self._buckets.items():
            there = merged.get(key // 2)
            if there is None:
                merged[key // 2] = bucket
            else:
                sums = [there[part] + bucket[part] for part in range(4)]
                merged[key // 2] = [*sums, min(there[4], bucket[4]), max(there[5], bucket[5])]
        self._buckets = merged


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


def whole(value: object) -> int | None:
    """A step or another count that a browser can hold; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST else None


def rounded(value: float | None) -> float | None:
    """Seven digits, which is more than a chart can show; None where JSON has no number.

    >>> rounded(1 / 3), rounded(float("nan"))
    (0.3333333, None)
    """
    return float(f"{value:.7g}") if value is not None and math.isfinite(value) else None


def _mean(bucket: list[float]) -> float | None:
    return min(max(bucket[3] / bucket[1], bucket[4]), bucket[5]) if bucket[1] else None  # sums are rounded
