"""Curves in bounded memory: points in buckets that double in width whenever there are too many of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.serve.fields import rounded

Array = npt.NDArray[np.float64]

BUCKETS = 1000
"""The most points that a chart is given of one curve."""


class Curve:
    """Points (x, y) with whole x, in at most `cap` buckets, each with its mean, least and greatest y.

    The width of a bucket is the least power of two at which the points fill no more than `cap` of them, so the order in
    which points come does not matter. A bucket in which no y is a number is a gap.
    """

    def __init__(self, cap: int = BUCKETS) -> None:
        self.cap = cap
        self.width = 1
        self.points = 0
        # By x // width: points, numbers, sum of x, sum of y, least, greatest.
        self._buckets: dict[int, list[float]] = {}

    def add(self, x: int, y: float) -> None:
        self.points += 1
        is_number = math.isfinite(y)
        bucket = self._buckets.get(x // self.width)
        if bucket is None:
            first = [1, 1, x, y, y, y] if is_number else [1, 0, x, 0.0, math.inf, -math.inf]
            self._buckets[x // self.width] = first
            while len(self._buckets) > self.cap:
                self._widen()
            return
        bucket[0] += 1
        bucket[2] += x
        if is_number:
            bucket[1] += 1
            bucket[3] += y
            bucket[4] = min(bucket[4], y)
            bucket[5] = max(bucket[5], y)

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


def _mean(bucket: list[float]) -> float | None:
    return min(max(bucket[3] / bucket[1], bucket[4]), bucket[5]) if bucket[1] else None  # sums are rounded


class VectorCurve:
    """Vectors of one length over time, by whole places, in at most `cap` buckets."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.width = 1
        self._buckets: dict[int, tuple[int, float, Array]] = {}  # by place // width: count, sum of times, of vectors

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, place: int, time: float, vector: Array) -> None:
        self._put(place // self.width, (1, time, vector))
        while len(self._buckets) > self.cap:
            self.widen()

    def coarser(self, cap: int) -> VectorCurve:
        """The same vectors in at most `cap` buckets."""
        other = VectorCurve(cap)
        other.width, other._buckets = self.width, dict(self._buckets)
        while len(other) > cap:
            other.widen()
        return other

    def widen(self) -> None:
        """Double the width of the buckets."""
        self.width *= 2
        buckets, self._buckets = self._buckets, {}
        for key, bucket in buckets.items():
            self._put(key // 2, bucket)

    def sums(self) -> list[tuple[int, float, Array]]:
        """The count, the sum of the times and the sum of the vectors of each bucket, in order."""
        return [self._buckets[key] for key in sorted(self._buckets)]

    def _put(self, key: int, more: tuple[int, float, Array]) -> None:
        there = self._buckets.get(key)
        self._buckets[key] = more if there is None else (there[0] + more[0], there[1] + more[1], there[2] + more[2])
