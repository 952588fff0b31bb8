"""Busy shares: how much of its time a stage worked, over a whole trace or in buckets of equal length."""

from __future__ import annotations

import numpy as np

from weft.serve.pipeline.columns import Numbers, Stage


def work(*stages: Stage) -> tuple[Numbers, Numbers]:
    """When any of these stages worked, operations and updates, as starts and ends of disjoint intervals in order."""
    start = np.concatenate([part for own in stages for part in (own.ops.start, own.updates["start"])])
    end = np.concatenate([part for own in stages for part in (own.ops.end, own.updates["end"])])
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order]) if len(end) else end
    if not len(start):
        return start, end
    first = np.concatenate([[True], start[1:] > end[:-1]])
    last = np.concatenate([first[1:], [True]])
    return start[first], end[last]


def shares(busy: tuple[Numbers, Numbers], edges: Numbers) -> Numbers:
    """The busy share between each two edges.

    >>> shares((np.array([0.0, 3.0]), np.array([1.0, 4.0])), np.array([0.0, 2.0, 4.0]))
    array([0.5, 0.5])
    """
    start, end = busy
    if not len(start):
        return np.zeros(len(edges) - 1)
    # What was worked up to each time is a line that rises by one a second while the stage works.
    times = np.column_stack([start, end]).ravel()
    done = np.concatenate([[0.0], np.cumsum(end - start)])
    worked = np.interp(edges, times, np.column_stack([done[:-1], done[1:]]).ravel())
    width = np.diff(edges)
    found: Numbers = np.divide(np.diff(worked), width, out=np.zeros(len(width)), where=width > 0).clip(0.0, 1.0)
    return found


def busy_share(busy: tuple[Numbers, Numbers], begin: float, end: float) -> float:
    """The busy share of the time between two moments."""
    return float(shares(busy, np.array([begin, end]))[0]) if end > begin else 0.0


def buckets(stages: tuple[Stage, ...], begin: float, window: tuple[float, float], count: int) -> list[list[float]]:
    """Rows of ``[stage, start, end, busy share]``, ``count`` for each stage, in seconds after ``begin``."""
    edges = np.linspace(window[0], window[1], count + 1)
    told = np.round(edges, 6).tolist()
    found: list[list[float]] = []
    for number, stage in enumerate(stages):
        values = np.round(shares(work(stage), edges + begin), 4).tolist()
        found += ([number, *row] for row in zip(told, told[1:], values, strict=False))
    return found
