"""The configurations that PaSE gives a vertex: how many ways each dimension of its iteration space is split."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pase.network import Vertex

Configs = NDArray[np.int64]
"""One row a configuration, one column a dimension."""


def configurations(vertex: Vertex, p: int, cutoff: int) -> Configs:
    """Every configuration that uses at most ``p`` devices, in ascending order, the unsplit one first.

    A dimension is split into equal parts of at least ``cutoff``; one too small for that stays whole. A reshape splits
    contiguously: a dimension only if each before it is split into single elements.

    >>> configurations(Vertex("Elementwise", (6, 5), (), ()), p=4, cutoff=2).tolist()
    [[1, 1], [2, 1], [3, 1]]
    """
    rows = np.ones((1, 0), dtype=np.int64)
    used = np.ones(1, dtype=np.int64)
    for dim, size in enumerate(vertex.space):
        factors = np.array([1] if dim in vertex.whole else _factors(size, p, cutoff), dtype=np.int64)
        total = used[:, None] * factors
        row, column = np.nonzero(total <= p)
        rows = np.concatenate([rows[row], factors[column, None]], axis=1)
        used = total[row, column]
    if vertex.kind in ("Ravel", "Unravel"):
        outer = np.logical_and.accumulate(rows == vertex.space, axis=1)
        rows = rows[np.all((rows[:, 1:] == 1) | outer[:, :-1], axis=1)]
    return rows


def _factors(size: int, p: int, cutoff: int) -> list[int]:
    return [n for n in range(1, min(size, p) + 1) if size % n == 0 and size >= n * cutoff] or [1]
