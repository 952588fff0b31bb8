"""How the boxes of one column lie, in rows from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Sequence


def laid(places: Sequence[int], sources: dict[int, list[int]]) -> dict[int, tuple[float, int]]:
    """For each box how far to the right it lies, in widths of a box, and in which row: below all that it reads from."""
    rank = _ranks(places, sources)
    rows: list[list[int]] = [[] for _ in range(max(rank.values(), default=0) + 1)]
    for place, row in rank.items():
        rows[row].append(place)
    x: dict[int, float] = {}
    for above, own in zip([[], *rows], rows, strict=False):
        x |= _beside(own, above, x, sources)
    near = 0
    for place in sorted(places):
        if place in rank:
            near = rank[place]
            continue
        # What has no edge within the column goes where there is room, not far from what comes before it.
        near = min(range(len(rows)), key=lambda row: (len(rows[row]), abs(row - near)))
        x[place] = max((x[other] + 1 for other in rows[near]), default=0.0)
        rows[near].append(place)
    left = min(x.values())
    return {place: (x[place] - left, row) for row, own in enumerate(rows) for place in sorted(own, key=x.__getitem__)}


def _beside(
    row: Sequence[int], above: Sequence[int], x: dict[int, float], sources: dict[int, list[int]]
) -> dict[int, float]:
    """Where the boxes of a row lie: below those they read from, those right above first, as far as there is room."""
    wanted = {}
    for place in row:
        read = [source for source in sources.get(place, ()) if source in x]
        known = [x[source] for source in read if source in above] or [x[source] for source in read]
        wanted[place] = sum(known) / len(known) if known else math.inf
    right = max((at for at in wanted.values() if at < math.inf), default=-1.0) + 1
    found: dict[int, float] = {}
    last = -math.inf
    for place in sorted(row, key=lambda place: (wanted[place], place)):
        last = found[place] = max(min(wanted[place], right), last + 1)
    known = [found[place] - wanted[place] for place in row if wanted[place] < math.inf]
    shift = sum(known) / len(known) if known else (len(row) - 1) / 2
    return {place: at - shift for place, at in found.items()}


def _ranks(places: Sequence[int], sources: dict[int, list[int]]) -> dict[int, int]:
    """The row of each box that has an edge within the column: the longest path to it, and where none leads to it, right
    above its first reader."""
    own = set(places)
    inner = {place: [source for source in sources.get(place, ()) if source in own] for place in sorted(places)}
    rank: dict[int, int] = {}
    first: dict[int, int] = {}  # for each box: the row of its first reader
    for place, found in inner.items():
        rank[place] = max((rank[source] + 1 for source in found if source in rank), default=0)
    for place, found in inner.items():
        for source in found:
            first[source] = min(first.get(source, rank[place]), rank[place])
    return {
        place: row if found else first[place] - 1
        for (place, row), found in zip(rank.items(), inner.values(), strict=True)
        if found or place in first
    }
