"""Curves in bounded memory: points in buckets that double in width whenever there are too many of them."""

from __future__ import annotations

import math
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from weft.serve.fields import rounded

BUCKETS = 1000
"""The most points that a chart is given of one curve."""

Bucket = TypeVar("Bucket")


class Buckets(Generic[Bucket]):
    """Sums by whole places, in at most `cap` buckets.

    The width of a bucket is the least power of two at which there are no more than `cap` of them, so the order in which
    points come does not matter.
    """

    def __init__(self, cap: int = BUCKETS) -> None:
        self.cap = cap
        self.width = 1
        self._buckets: dict[int, Bucket] = {}  # by place // width

    def merged(self, one: Bucket, other: Bucket) -> Bucket:
        """The bucket of the points of both."""
        raise NotImplementedError

    def put(self, place: int, bucket: Bucket) -> None:
        key = place // self.width
        there = self._buckets.get(key)
        self._buckets[key] = bucket if there is None else self.merged(there, bucket)
        if len(self._buckets) > self.cap:
            self._fit()

    def coarser(self, cap: int) -> Self:
        """The same points in at most `cap` buckets."""
        other = type(self)(cap)
        other.width, other._buckets = self.width, dict(self._buckets)
        other._fit()
        return other

    def rows(self) -> list[Bucket]:
        """The buckets from left to right."""
        return [self._buckets[key] for key in sorted(self._buckets)]

    def _fit(self) -> None:
        while len(self._buckets) > self.cap:
            self.width *= 2
            buckets, self._buckets = self._buckets, {}
            for key, bucket in buckets.items():
                there = self._buckets.get(key // 2)
                self._buckets[key // 2] = bucket if there is None else self.merged(there, bucket)


class Curve(Buckets[tuple[int, int, int, float, float, float]]):
    """Points (x, y) with whole x: of each bucket the points, the numbers among their y, the sums of x and of y, and the
    least and greatest y. A bucket in which no y is a number is a gap."""

    def add(self, x: int, y: float) -> None:
        self.put(x, (1, 1, x, y, y, y) if math.isfinite(y) else (1, 0, x, 0.0, math.inf, -math.inf))

    def merged(
        self, one: tuple[int, int, int, float, float, float], other: tuple[int, int, int, float, float, float]
    ) -> tuple[int, int, int, float, float, float]:
        points, numbers, xs, ys = one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]
        return points, numbers, xs, ys, min(one[4], other[4]), max(one[5], other[5])

    def to_json(self) -> dict[str, Any]:
        """`x` and `y` from left to right, and `low` and `high` where a bucket holds more than one point."""
        rows = self.rows()
        found: dict[str, Any] = {
            "x": [xs if points == 1 else round(xs / points, 1) for points, _, xs, *_ in rows],
            # Sums are rounded, and their mean may lie beyond the extremes.
            "y": [rounded(min(max(ys / count, low), high)) if count else None for _, count, _, ys, low, high in rows],
        }
        if any(row[0] > 1 for row in rows):
            found["low"], found["high"] = [rounded(row[4]) for row in rows], [rounded(row[5]) for row in rows]
        return found


Vectors = tuple[int, float, npt.NDArray[np.float64]]


class VectorCurve(Buckets[Vectors]):
    """Vectors of one length over time: of each bucket the count, the sum of the times and the sum of the vectors."""

    def merged(self, one: Vectors, other: Vectors) -> Vectors:
        return one[0] + other[0], one[1] + other[1], one[2] + other[2]
