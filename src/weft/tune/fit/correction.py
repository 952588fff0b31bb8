"""Estimates of memory, corrected from what trials took: for packing, never for how a candidate trains."""

from __future__ import annotations

from collections import defaultdict, deque
from math import ceil

RECENT = 32


class MemoryCorrection:
    """Remembers what was observed, by shape (trials that are alike to the byte) and by family (alike in kind).

    Upward only: what a trial takes depends a little on what its worker did before, so that one that took less is no
    promise for the next. A shape that ran before needs at least what it needed, with ``repeat`` as margin; a new one of
    a known family its estimate times the largest of the family's recent ratios, with ``margin``. One that went beyond
    its figure is never given less than ``growth`` times that again.
    """

    def __init__(self, repeat: float = 0.02, margin: float = 0.05, growth: float = 1.25) -> None:
        self.repeat, self.margin, self.growth = repeat, margin, growth
        self._peaks: dict[str, int] = {}
        self._minimums: dict[str, int] = {}
        self._ratios: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    def apply(self, estimate: int, *, shape: str | None = None, family: str | None = None) -> int:
        """Bytes to reserve for a trial.

        >>> correction = MemoryCorrection()
        >>> correction.on_finished(1000, 1200, family="gpt")
        >>> correction.apply(2000, family="gpt"), correction.apply(2000, family="mlp")
        (2520, 2000)
        """
        floor = estimate if shape is None else max(estimate, self._minimums.get(shape, 0))
        if shape is not None and shape in self._peaks:
            return max(ceil(self._peaks[shape] * (1.0 + self.repeat)), floor)
        return max(ceil(estimate * self.factor(family)), floor)

    def factor(self, family: str | None) -> float:
        """What estimates of a family are multiplied by."""
        ratios = self._ratios.get(family) if family is not None else None
        return max(max(ratios) * (1.0 + self.margin), 1.0) if ratios else 1.0

    def on_finished(self, estimate: int, peak: int, *, shape: str | None = None, family: str | None = None) -> None:
        """A trial of that estimate, uncorrected, took so many bytes at its peak."""
        if shape is not None:
            self._peaks[shape] = max(peak, self._peaks.get(shape, 0))
        if family is not None and estimate > 0:
            self._ratios[family].append(peak / estimate)

    def on_oom(
        self,
        estimate: int,
        limit: int,
        *,
        needed: int | None = None,
        shape: str | None = None,
        family: str | None = None,
    ) -> int:
        """A trial wanted more than its limit, and at least ``needed`` if it said so; returns the bytes to reserve
        when it is tried again."""
        again = max(ceil(limit * self.growth), needed or 0)
        if shape is not None:
            again = max(again, ceil(self._peaks.get(shape, 0) * (1.0 + self.repeat)), self._minimums.get(shape, 0))
            self._minimums[shape] = again
        if family is not None and estimate > 0:
            # It was at least this much, and the next attempt says how much it really is.
            self._ratios[family].append(max(limit, needed or 0) / estimate)
        return again
