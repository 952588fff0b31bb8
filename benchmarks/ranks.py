"""How well two rankings agree."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau-b, which corrects for ties; NaN where either side is constant or has fewer than two numbers.

    >>> round(kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]), 4)
    0.6667
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    agreement = untied_x = untied_y = 0
    for i in range(len(x) - 1):
        signs_x, signs_y = ((z[i] > z[i + 1 :]).astype(int) - (z[i] < z[i + 1 :]) for z in (x, y))
        agreement += int(signs_x @ signs_y)
        untied_x += int(np.count_nonzero(signs_x))
        untied_y += int(np.count_nonzero(signs_y))
    return agreement / math.sqrt(untied_x * untied_y) if untied_x and untied_y else math.nan
