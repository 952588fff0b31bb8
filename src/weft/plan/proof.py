"""Seconds that no cut of a graph into stages is below, with any splits: raised where the best cut would lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from weft.plan.division import Division, Spans, divide
from weft.plan.stretches import Stretches

_ENDS = 400  # the most groups of places that are told apart
_FINER = 8  # how many steps a stage is first divided into
_ROUNDING = 1e-9

Places = NDArray[np.intp]


class Proof:
    """What each stage takes at least from any place to any other, and so what a step does.

    At first each operator counts by itself. Then stretches are weighed together, those that the best cut would have:
    what a stretch takes more than its operators by themselves, every longer one takes too. Places between which next to
    nothing happens are a group, of which a stage is given what lies within, and sends the least.
    """

    def __init__(
        self,
        stretches: Stretches,
        launch: Sequence[float],
        *,
        stages: int,
        microbatches: int,
        send: float,
        total: float,
    ) -> None:
        """``launch`` has the seconds of the host for each operator, ``send`` is seconds a byte between stages, and
        ``total`` what all stages together take at least."""
        row = stretches.row
        self._stretches, self._microbatches, self._total = stretches, microbatches, total
        self._flights = [min(microbatches, stages - stage) for stage in range(stages)]
        self._alone = row.sums(stretches.alone())
        self.low, self.high = _groups(self._alone, row.sums(launch), len(row))
        inner = zip(self.low[1:-1], self.high[1:-1], strict=True)
        sent = np.array([0.0, *(row.crossing[a : b + 1].min() for a, b in inner), 0.0]) * microbatches * send
        self._messages = sent[:, None] + sent[None, :]
        self._waits = self._between(row.sums(launch))
        still, held = (self._between(row.sums(values)) for values in stretches.lightest())
        never = np.tril(np.ones(still.shape, dtype=bool), -1) | np.diag(self.high == self.low)
        if row.owned[-1] >= stages:
            never |= row.owned[self.high][None, :] <= row.owned[self.low][:, None]
        self._never = {flying: never | (still + flying * held > stretches.limit) for flying in self._flights}
        self._more = {flying: np.zeros(still.shape) for flying in self._flights}
        self._width = max(len(self.low) // (_FINER * stages), 1)
        self.cuts: list[Division] = []

    def best(self) -> float:
        """Seconds that no cut is below by what is known, ``inf`` where none keeps the limit; ``cuts`` are then those
        that would be best."""
        base = self._between(self._alone) + self._messages
        spans = {}
        for flying, more in self._more.items():
            spans[flying] = np.where(self._never[flying], math.inf, np.maximum(base + more, self._waits))
        every = [spans[flying] for flying in self._flights]
        # By what the stages take, each by itself, and by what they take together: both are bounds.
        ways = (divide(every, self._microbatches), divide(every, self._microbatches, self._messages, self._total))
        self.cuts = sorted((way for way in ways if way is not None), key=lambda way: -way.bound)
        return self.cuts[0].bound if self.cuts else math.inf

    def raised(self) -> bool:
        """Weighs the stages of the cuts that seemed best, and says whether that raised what any takes."""
        for width, found in product(self._widths(), self.cuts):
            self._width = width
            told = [self._weighed(stage, a, b) for stage, (a, b) in enumerate(pairwise(found.marks))]
            if any(told):
                return True
        return False

    def places(self, marks: Sequence[int]) -> list[int]:
        """Where in the line the stages of a cut begin, and the last one ends: in each group where least is sent."""
        crossing = self._stretches.row.crossing
        first, *inner, last = ((int(self.low[mark]), int(self.high[mark])) for mark in marks)
        return [first[0], *(a + int(crossing[a : b + 1].argmin()) for a, b in inner), last[0]]

    def _widths(self) -> list[int]:
        """Stretches between few ends serve many cuts; they become finer when they no longer tell anything."""
        widths = [self._width]
        while widths[-1] > 1:
            widths.append(widths[-1] // 2)
        return widths

    def _weighed(self, stage: int, first: int, last: int) -> bool:
        width, flying = self._width, self._flights[stage]
        i = -(-first // width) * width
        j = last if last == len(self.low) - 1 else last // width * width
        if i > j or self.low[j] <= self.high[i]:  # no stretch of this width lies within
            return False
        known = float(self._alone[self.low[j]] - self._alone[self.high[i]])
        raised = False
        for flights in (0, flying) if math.isfinite(self._stretches.limit) else (0,):
            more = self._stretches.least(int(self.high[i]), int(self.low[j]), flights) - known
            for held, values in self._more.items():
                if held >= flights and more > values[i, j] + _ROUNDING * known:
                    np.maximum(values[: i + 1, j:], more, out=values[: i + 1, j:])
                    raised = True
        return raised

    def _between(self, sums: Spans) -> Spans:
        return np.maximum(sums[self.low][None, :] - sums[self.high][:, None], 0.0)


def _groups(alone: Spans, launch: Spans, count: int) -> tuple[Places, Places]:
    """The first and the last place of each group, in which at most a small part of the whole happens."""
    few = 0.0
    while True:
        low, high = [0], [0]
        for place in range(1, count):
            start = low[-1]
            if start and alone[place] - alone[start] <= few and launch[place] - launch[start] <= few:
                high[-1] = place
            else:
                low.append(place)
                high.append(place)
        if len(low) < _ENDS:
            return np.array([*low, count]), np.array([*high, count])
        few = max(2 * few, float(max(alone[-1], launch[-1])) / 2**14)
