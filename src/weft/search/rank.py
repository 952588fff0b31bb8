"""How well two rankings of subnets agree: Kendall's tau, hits among the best, regret. Higher is better."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.errors import SearchError

Ints = npt.NDArray[np.int64]
Numbers = Sequence[float] | npt.NDArray[np.float64]


def kendall_tau(a: Numbers, b: Numbers) -> float:
    """Kendall's tau-b, which corrects for ties; in O(n log n). NaN where either side is constant or has fewer than two.

    >>> round(kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]), 4)
    0.6667
    """
    x, y = _ranked(a, b)
    n = len(x)
    order = np.lexsort((y, x))
    x, y = x[order], y[order]
    pairs, tied_x, tied_y = n * (n - 1) // 2, _ties(x), _ties(np.sort(y))
    tied_both = _ties(x * n + y)  # sorted, since (x, y) is
    if tied_x == pairs or tied_y == pairs:
        return math.nan
    agreement = pairs - tied_x - tied_y + tied_both - 2 * _inversions(y)
    return agreement / math.sqrt((pairs - tied_x) * (pairs - tied_y))


def top_hit(scores: Numbers, truth: Numbers, fraction: float) -> float:
    """Of the best `fraction` by the scores (at least one), the share that is truly among the best `fraction`.

    Ties in the truth all count as hits; ties in the scores are broken against the ranking, so that a constant score
    earns nothing.
    """
    picks, count = _picks(scores, truth, fraction)
    true = np.asarray(truth, dtype=np.float64)
    return float((true[picks] >= np.sort(true)[-count]).mean())


def regret(scores: Numbers, truth: Numbers, fraction: float = 0.0) -> float:
    """The truth lost by keeping only the best `fraction` by the scores (at least one) and taking the truly best of it.

    Ties in the scores are broken against the ranking.
    """
    picks, _ = _picks(scores, truth, fraction)
    true = np.asarray(truth, dtype=np.float64)
    return float(true.max() - true[picks].max())


def _picks(scores: Numbers, truth: Numbers, fraction: float) -> tuple[Ints, int]:
    if not 0 <= fraction <= 1:
        raise SearchError(f"a fraction lies between 0 and 1, not at {fraction}")
    x, y = _ranked(scores, truth)
    if not len(x):
        raise SearchError("there is no best of nothing: give at least one score")
    count = max(1, round(fraction * len(x)))
    return np.lexsort((y, -x))[:count].astype(np.int64), count


def _ranked(a: Numbers, b: Numbers) -> tuple[Ints, Ints]:
    """Both as dense ranks from 0."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise SearchError(f"two rankings of the same things have one shape (n,), not {x.shape} and {y.shape}")
    if np.isnan(x).any() or np.isnan(y).any():
        raise SearchError("a ranking cannot hold NaN: drop those subnets from both sides first")
    return (
        np.unique(x, return_inverse=True)[1].astype(np.int64),
        np.unique(y, return_inverse=True)[1].astype(np.int64),
    )


def _ties(ordered: Ints) -> int:
    """Pairs of equal values in a sorted array."""
    edges = np.flatnonzero(np.diff(ordered, prepend=-1, append=-1))
    runs = np.diff(edges)
    return int((runs * (runs - 1) // 2).sum())


def _inversions(values: Ints) -> int:
    """Pairs i < j with values[i] > values[j], for ranks below n.

    Two numbers differ first in one bit: with the array grouped by the bits above it, in the old order inside a group,
    those pairs are the zeros that have ones before them. A stable partition by that bit prepares the next.
    """
    count, n = 0, len(values)
    place = np.arange(n)
    for bit in reversed(range(int(values.max(initial=0)).bit_length())):
        group, one = values >> (bit + 1), (values >> bit) & 1
        first = np.diff(group, prepend=-1) != 0
        index = np.cumsum(first) - 1
        start = place[first][index]
        ones = np.cumsum(one) - one
        ones = ones - ones[start]
        count += int(ones[one == 0].sum())
        zeros = np.add.reduceat(1 - one, place[first])[index]
        target = start + np.where(one == 1, zeros + ones, place - start - ones)
        moved = np.empty_like(values)
        moved[target] = values
        values = moved
    return count
