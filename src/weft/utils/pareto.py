"""Domination among points as arrays: fronts, ranks and crowding; lower is better in every column."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def non_dominated(points: Array) -> Mask:
    """Which rows no other row dominates; equal rows stand or fall together. Rows with NaN are never among them.

    In lexicographic order a row can only be dominated by one before it, so each survivor strikes out what it
    dominates and is done: O(rows * front), and no matrix of pairs.
    """
    keep = np.zeros(len(points), dtype=np.bool_)
    rest = np.flatnonzero(~np.isnan(points).any(axis=1))
    rest = rest[np.lexsort(points[rest].T[::-1])]
    while rest.size:
        first = points[rest[0]]
        beaten = (first <= points[rest]).all(axis=1)
        equal = beaten & (first == points[rest]).all(axis=1)
        keep[rest[equal]] = True
        rest = rest[~beaten]
    return keep


def ranks(points: Array, violations: Array | None = None) -> Ints:
    """The non-domination rank of each row, 0 for the front, by constrained domination.

    A feasible row (violation 0) beats any other, of two infeasible ones the less violating beats the other, and
    between feasible ones Pareto decides.
    """
    worse = np.zeros(len(points)) if violations is None else violations
    dominated_by = (points[:, None] <= points[None]).all(axis=2) & (points[:, None] < points[None]).any(axis=2)
    feasible = worse == 0
    beats = np.where(feasible[:, None] & feasible[None], dominated_by, worse[:, None] < worse[None])
    rank = np.full(len(points), -1, dtype=np.int64)
    left = beats.sum(axis=0)
    level = 0
    while (current := (rank < 0) & (left == 0)).any():
        rank[current] = level
        left = left - beats[current].sum(axis=0)
        level += 1
    return rank


def crowding(points: Array, rank: Ints) -> Array:
    """The crowding distance of each row in its rank: the sum over the columns of the gap between its neighbours.

    A gap is a share of the rank's span in that column; the ends of a column are infinitely far.
    """
    distance = np.zeros(len(points))
    for level in range(int(rank.max()) + 1 if rank.size else 0):
        members = np.flatnonzero(rank == level)
        for column in points[members].T:
            order = np.argsort(column, kind="stable")
            ordered = column[order]
            span = ordered[-1] - ordered[0] if np.isfinite(ordered[[0, -1]]).all() else 0.0
            if span > 0:
                distance[members[order[1:-1]]] += (ordered[2:] - ordered[:-2]) / span
            distance[members[order[[0, -1]]]] = np.inf
    return distance
