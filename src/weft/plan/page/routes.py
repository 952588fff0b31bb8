"""Where the boxes of a picture and the lines between them run, in pixels.

A line leaves a box at its foot and comes in at the head of another. To the next row it goes straight. Otherwise it goes
through the space below its row to the gutter right of its column, up or down there, and through the space above the
reader's row. A reader that is not in this column or the next is reached by a track above all columns, and the gutter
left of its own. The lines of one box share their way.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from weft.plan.page.columns import Picture
from weft.plan.page.lanes import Lanes

WIDTH, HEIGHT = 188, 42  # of a box
BESIDE, BELOW = 14, 30  # between boxes of a row, and between rows
HEAD = 66  # of a column, above its first row: its stage and its title
_LANE, _MARGIN, _ABOVE = 7, 16, -2.0

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Frame:
    """Of a column."""

    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Routes:
    """The left upper corner of each box, a frame for each column, and the corners of each edge's line."""

    width: float
    height: float
    boxes: dict[int, Point]
    frames: tuple[Frame, ...]
    lines: dict[tuple[int, int], tuple[Point, ...]]


def routes(picture: Picture) -> Routes:
    """Where everything of a picture lies."""
    ways = _Ways(picture)
    top = _MARGIN + _LANE * (1 + max(ways.tracks.values(), default=-1))
    gaps = [
        2 * _MARGIN + _LANE * max(ways.lanes.get(g, {}).values(), default=0) for g in range(-1, len(picture.columns))
    ]
    boxes: dict[int, Point] = {}
    frames: list[Frame] = []
    left = float(gaps[0])
    for column, gap in zip(picture.columns, gaps[1:], strict=True):
        width = column.width * (WIDTH + BESIDE) - BESIDE
        frames.append(Frame(left, top, width, HEAD + column.rows * (HEIGHT + BELOW) - BELOW))
        for place, (x, row) in column.at.items():
            boxes[place] = (left + x * (WIDTH + BESIDE), top + HEAD + row * (HEIGHT + BELOW))
        left += width + gap
    height = max(frame.top + frame.height for frame in frames) + BELOW
    lines = {edge: ways.line(edge, boxes, frames) for edge in picture.edges}
    return Routes(left, height, boxes, tuple(frames), lines)


class _Ways:
    """The lanes of the lines: in the gutters, by the column to their left, and of the tracks above all columns."""

    def __init__(self, picture: Picture) -> None:
        self._at = {
            place: (number, row)
            for number, column in enumerate(picture.columns)
            for place, (_, row) in column.at.items()
        }
        gutters: defaultdict[int, Lanes] = defaultdict(Lanes)
        tracks = Lanes()
        for source, reader in picture.edges:
            (column, row), (other, below) = self._at[source], self._at[reader]
            if self._straight(source, reader):
                continue
            if other in (column, column + 1):
                gutters[column].add(source, row + 0.5, below - 0.5)
            else:
                gutters[column].add(source, row + 0.5, _ABOVE)
                gutters[other - 1].add(source, below - 0.5, _ABOVE)
                tracks.add(source, column, other - 1)
        self.lanes = {column: found.assigned() for column, found in gutters.items()}
        self.tracks = tracks.assigned()

    def _straight(self, source: int, reader: int) -> bool:
        column, row = self._at[source]
        return self._at[reader] == (column, row + 1)

    def line(self, edge: tuple[int, int], boxes: dict[int, Point], frames: list[Frame]) -> tuple[Point, ...]:
        """The corners of the line of an edge."""
        source, reader = edge
        start = (boxes[source][0] + WIDTH / 2, boxes[source][1] + HEIGHT)
        end = (boxes[reader][0] + WIDTH / 2, boxes[reader][1])
        if self._straight(source, reader):
            return start, end
        column, other = self._at[source][0], self._at[reader][0]
        first = self._x(column, source, frames)
        # Lines of neighbouring lanes keep apart in the space between rows as well.
        shift = 6 + 3 * (self.lanes[column][source] % 4)
        foot, head = start[1] + shift, end[1] - 18 + shift / 2
        if other in (column, column + 1):
            return start, (start[0], foot), (first, foot), (first, head), (end[0], head), end
        last, over = self._x(other - 1, source, frames), _MARGIN / 2 + _LANE * self.tracks[source]
        return start, (start[0], foot), (first, foot), (first, over), (last, over), (last, head), (end[0], head), end

    def _x(self, column: int, source: int, frames: list[Frame]) -> float:
        """Where a line goes up or down in the gutter right of a column."""
        right = frames[column].left + frames[column].width if column >= 0 else 0.0
        return right + _MARGIN + _LANE * self.lanes[column][source]
