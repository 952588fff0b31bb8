"""The division of a line into stages at which a step takes least, and seconds that none is below."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Spans = NDArray[np.float64]
_TRIES = 48  # limits on the slowest stage that are tried, at most
_CLOSE = 1e-4  # to the best, from where on nothing is worth a try


@dataclass(frozen=True, slots=True)
class Division:
    """``marks`` are the ends of the stages, the first one's beginning included; ``step`` is what they take, and no
    division is below ``bound``."""

    marks: tuple[int, ...]
    step: float
    bound: float


def divide(spans: Sequence[Spans], microbatches: int, sums: Spans | None = None, total: float = 0.0) -> Division | None:
    """The best division, None where there is none.

    ``spans[s]`` has the seconds of stage s from every end (a row) to every other (a column), ``inf`` where it may not
    lie. A step fills the pipeline once, and then the slowest stage goes on: of m micro-batches, it takes an m-th of all
    stages together and m - 1 times the slowest. With ``sums``, stages together take ``total`` and the sums of their
    ends instead of their spans, and the slowest is not below their mean.
    """
    stages, rest = len(spans), microbatches - 1

    def step(together: float, slowest: float) -> float:
        return (together + rest * max(slowest, together / stages)) / microbatches

    def least(limit: float) -> tuple[float, tuple[int, ...]]:
        found, marks = _least(spans, limit, sums)
        return total + found, marks

    lowest = _slowest(spans)
    if math.isinf(lowest):
        return None
    together, marks = least(lowest)
    best = step(together, lowest)
    # What is left to win is a smaller sum under a higher limit, until even the least sum of all would not do.
    loosest, found = least(math.inf)
    if not rest:  # then the slowest counts among equals alone
        return Division(marks if together <= loosest else found, loosest, loosest)
    highest = (microbatches * best - loosest) / rest
    values = np.unique(np.concatenate([span[(span > lowest) & (span < highest)] for span in _distinct(spans)]))
    # Of a range of these, the slowest stage takes at least its first, and all stages together at least what they do
    # within its last. The range that promises most is halved, until none promises more than is found.
    settled, ranges = best, [(step(loosest, float(values[0])), 0, len(values) - 1, loosest)] if len(values) else []
    for _ in range(_TRIES):
        if not ranges or ranges[0][0] >= best * (1 - _CLOSE):
            break
        _, first, last, under = heapq.heappop(ranges)
        middle = (first + last) // 2
        together, found = least(float(values[middle]))
        slowest = max(float(span[a, b]) for span, (a, b) in zip(spans, pairwise(found), strict=True))
        if (value := step(together, slowest)) < best:
            best, marks = value, found
        promise = step(together, float(values[first]))
        if first < middle:
            heapq.heappush(ranges, (promise, first, middle, together))
        else:
            settled = min(settled, promise)
        if middle < last:
            heapq.heappush(ranges, (step(under, float(values[middle + 1])), middle + 1, last, under))
    return Division(marks, best, min([settled, *(each[0] for each in ranges)]))


def _distinct(spans: Sequence[Spans]) -> list[Spans]:
    return list({id(span): span for span in spans}.values())


def _slowest(spans: Sequence[Spans]) -> float:
    """The least that the slowest stage can take."""
    best = np.full(len(spans[0]), math.inf)
    best[0] = 0.0
    for span in spans:
        best = np.maximum(best[:, None], span).min(0)
    return float(best[-1])


def _least(spans: Sequence[Spans], limit: float, sums: Spans | None) -> tuple[float, tuple[int, ...]]:
    """The least sum of stages none of which takes longer than the limit, and their ends."""
    within = min(limit, float(np.finfo(np.float64).max))
    costs = {id(span): np.where(span <= within, span if sums is None else sums, math.inf) for span in _distinct(spans)}
    best = np.full(len(spans[0]), math.inf)
    best[0] = 0.0
    back = []
    for span in spans:
        together = best[:, None] + costs[id(span)]
        back.append(together.argmin(0))
        best = together.min(0)
    marks = [len(best) - 1]
    for chosen in reversed(back):
        marks.append(int(chosen[marks[-1]]))
    return float(best[-1]), tuple(reversed(marks))
