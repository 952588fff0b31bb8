"""Where the boxes of a graph lie: layers side by side as columns, and in each the operators from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.plan.page.boxes import Boxes
from weft.plan.page.groups import Group
from weft.plan.page.rows import laid

_SMALL = 4  # a layer of fewer boxes shares a column with its neighbours,
_SHORT = 16  # up to so many boxes,
_TALL = 48  # and one of more boxes has several columns


@dataclass(frozen=True, slots=True)
class Column:
    """Boxes by their places: how far to the right, in widths of a box, and in which row. A box lies below every box of
    the column that it reads from."""

    title: str
    stage: int
    times: int
    at: dict[int, tuple[float, int]]

    @property
    def width(self) -> float:
        return max(x for x, _ in self.at.values()) + 1

    @property
    def rows(self) -> int:
        return max(row for _, row in self.at.values()) + 1


@dataclass(frozen=True, slots=True)
class Picture:
    """Columns, and the edges between the boxes that they have; ``moved`` as in Boxes."""

    columns: tuple[Column, ...]
    edges: tuple[tuple[int, int], ...]
    moved: frozenset[tuple[int, int]]


def picture(boxes: Boxes, groups: Sequence[Group]) -> Picture:
    """The boxes in columns; of layers that are folded into one, the edges from each to the next are left out."""
    at = {
        place: (group.run, number, first)
        for group in groups
        for number, copy in enumerate(group.copies)
        for place, first in zip(copy, group.places, strict=True)
    }
    edges: dict[tuple[int, int], bool] = {}
    for source, reader in sorted(boxes.edges):
        (run, copy, start), (other, its, end) = at[source], at[reader]
        if run != other or copy == its:
            edges[start, end] = edges.get((start, end), False) or (source, reader) in boxes.moved
    return Picture(
        tuple(_columns(groups, list(edges))), tuple(edges), frozenset(edge for edge, moves in edges.items() if moves)
    )


def _columns(groups: Sequence[Group], edges: list[tuple[int, int]]) -> Iterator[Column]:
    sources: dict[int, list[int]] = {}
    for source, reader in edges:
        sources.setdefault(reader, []).append(source)
    for packed in _packed(groups):
        places = [place for group in packed for place in group.places]
        titles = [packed[0].title, packed[-1].title]
        title = titles[0] if titles[0] == titles[1] else " … ".join(titles)
        pieces = math.ceil(len(places) / _TALL)
        for number in range(pieces):
            part = places[len(places) * number // pieces : len(places) * (number + 1) // pieces]
            yield Column(title, packed[0].stage, packed[0].times, laid(part, sources))


def _packed(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Groups that share a column."""
    now: list[Group] = []
    for group in groups:
        small = not group.layer or len(group.places) < _SMALL
        if now and not (
            small
            and group.times == now[-1].times == 1
            and group.stage == now[-1].stage
            and (not now[-1].layer or len(now[-1].places) < _SMALL)
            and sum(len(own.places) for own in now) + len(group.places) <= _SHORT
        ):
            yield now
            now = []
        now.append(group)
    if now:
        yield now
