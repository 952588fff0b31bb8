"""The graph of a plan as SVG: a box an operator, coloured by its split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from weft.plan.page.columns import Picture
from weft.plan.page.routes import HEAD, HEIGHT, WIDTH, Frame, Point, Routes, routes
from weft.plan.page.words import devices_of
from weft.plan.plan import Plan

_ROUND = 6.0  # of a line's corners


def drawing(
    plan: Plan,
    picture: Picture,
    style: str,
    of: Mapping[int, int],
    words: Callable[[int], tuple[str, str]],
    tell: Callable[[int], str],
) -> str:
    """``style`` has the colours and ``of`` the number of each box's; ``words`` gives its two lines, and ``tell`` all
    that is known."""
    laid = routes(picture)
    parts = [
        f'<svg width="{laid.width:.0f}" height="{laid.height:.0f}" role="group" aria-label="graph of operators">',
        f"<style>{style}</style>{_MARKERS}",
        *_columns(plan, picture, laid),
    ]
    # What is moved between devices is drawn above the other lines.
    for edge in sorted(picture.edges, key=lambda edge: (edge in picture.moved, edge)):
        kind = "moved" if edge in picture.moved else "still"
        parts.append(
            f'<path class="line {kind}" data-ends=" {edge[0]} {edge[1]} " d="{_path(laid.lines[edge])}" '
            f'marker-end="url(#{kind})"/>'
        )
    for number, (place, (x, y)) in enumerate(laid.boxes.items()):
        name, note = words(place)
        told = escape(tell(place))
        parts.append(
            f'<g class="box c{of[place]}" id="o{place}" role="img" tabindex="{-1 if number else 0}" '
            f'transform="translate({x:.0f} {y:.0f})"><title>{told}</title>'
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6"/><rect class="edge" width="6" height="{HEIGHT}" rx="3"/>'
            f'<g clip-path="url(#inside)"><text x="14" y="17" class="name">{escape(shortened(name, 22))}</text>'
            f'<text x="14" y="33" class="note">{escape(shortened(note, 27))}</text></g></g>'
        )
    return "\n".join([*parts, "</svg>"])


_MARKERS = (
    f'<defs><clipPath id="inside"><rect width="{WIDTH - 6}" height="{HEIGHT}"/></clipPath>'
    + "".join(
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path class="tip {kind}" d="M0 0 8 4 0 8z"/></marker>'
        for kind in ("still", "moved")
    )
    + "</defs>"
)


def _columns(plan: Plan, picture: Picture, laid: Routes) -> list[str]:
    found = []
    for number, (column, frame) in enumerate(zip(picture.columns, laid.frames, strict=True)):
        found += [_frame(frame, shift) for shift in ((2, 1, 0) if column.times > 1 else (0,))]
        if plan.stages > 1 and (number == 0 or picture.columns[number - 1].stage != column.stage):
            text = devices_of(plan, column.stage)
            found.append(f'<text class="stage" x="{frame.left:.0f}" y="{frame.top + 14:.0f}">{text}</text>')
        times = f" x {column.times}" if column.times > 1 else ""
        title = shortened(column.title, int(frame.width / 8) - len(times))
        found.append(
            f'<text class="title" x="{frame.left:.0f}" y="{frame.top + HEAD - 27:.0f}"><title>{escape(column.title)}'
            f'</title>{escape(title)}<tspan class="times">{times}</tspan></text>'
        )
    return found


def _frame(frame: Frame, shift: int) -> str:
    return (
        f'<rect class="column" x="{frame.left - 8 + 4 * shift:.0f}" y="{frame.top + 22 - 4 * shift:.0f}" '
        f'width="{frame.width + 16:.0f}" height="{frame.height - 12:.0f}" rx="10"/>'
    )


def _path(points: tuple[Point, ...]) -> str:
    """A line through the points: a curve between two, else with round corners."""
    (x, y), (u, v) = points[0], points[-1]
    if len(points) == 2:
        middle = (y + v) / 2
        return f"M{x:.0f} {y:.0f}C{x:.0f} {middle:.0f} {u:.0f} {middle:.0f} {u:.0f} {v:.0f}"
    found = [f"M{x:.0f} {y:.0f}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        found.append(
            "L{:.1f} {:.1f}Q{:.1f} {:.1f} {:.1f} {:.1f}".format(*_near(corner, before), *corner, *_near(corner, after))
        )
    return "".join(found) + f"L{u:.0f} {v:.0f}"


def _near(corner: Point, other: Point) -> Point:
    """The point of a line to ``other`` where the corner's curve begins."""
    (x, y), (u, v) = corner, other
    long = abs(u - x) + abs(v - y)
    part = min(_ROUND / long, 0.5) if long else 0.0
    return x + (u - x) * part, y + (v - y) * part


def shortened(text: str, length: int) -> str:
    """The text, or as much of its end as there is room for.

    >>> shortened("transformer.h.0.mlp", 8), shortened("mlp", 8)
    ('…h.0.mlp', 'mlp')
    """
    return text if len(text) <= length else "…" + text[len(text) - max(length, 2) + 1 :]
