"""A picture of a gradient search: the probabilities of every choice over the steps, as an SVG that stands alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt

from weft.runs.files import write_atomic

Array = npt.NDArray[np.float64]

POINTS = 125
PANELS = 24
LABELS = 6  # as many options as are told beside a panel
WINDOW = 12  # each point is the mean over such a part of the run, since many methods tell what each step drew

COLUMNS, PANEL, CHART, HEIGHT, GAP = 3, 344, 184, 84, 44
MARGIN, HEAD, FOOT = 20, 76, 20
SCALE = ((74, 58, 167), (43, 123, 186), (47, 165, 142), (155, 197, 61), (242, 193, 78))
"""Colours from the first option to the last: of even steps in lightness, so that they differ for every eye."""

STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1f2328 }
.name { font-weight: 600; font-size: 12px }
.best { font-weight: 600 }
.title { font-weight: 600; font-size: 15px }
.faint { fill: #59636e }
.page { fill: #ffffff }
.area { stroke: #ffffff; stroke-width: .6 }
.frame { fill: none; stroke: #d1d9e0 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .faint { fill: #9198a1 }
  .page { fill: #12161c }
  .area { stroke: #12161c }
  .frame { stroke: #3d444d }
}
"""


def write_picture(
    path: Path,
    events: Iterable[Mapping[str, Any]],
    steps: int,
    options: Mapping[str, Sequence[object]],
    last: Mapping[str, Sequence[float]],
) -> None:
    """Draws the run with these events; the file is replaced in one step.

    ``options`` has the choices in the order in which the events have their probabilities, and ``last`` the
    probabilities at the end, without noise.
    """
    size = sum(len(several) for several in options.values())
    write_atomic(path, draw(*course(events, steps, size), steps, options, last))


def course(events: Iterable[Mapping[str, Any]], steps: int, size: int) -> tuple[Array, Array]:
    """At most 125 steps, and the mean probabilities around each: by step, by option.

    The events come in any order, and are looked at one at a time. Those without ``size`` finite numbers are left out.
    """
    bins = max(1, min(POINTS, steps))
    sums, counts, places = np.zeros((bins, size)), np.zeros(bins), np.zeros(bins)
    for event in events:
        found = event.get("mixture") if event.get("event") == "step" else None
        if not isinstance(found, (list, tuple)) or len(found) != size or not 0 <= int(event["step"]) < steps:
            continue
        vector = np.array([float(one) for one in found])
        if not np.isfinite(vector).all():
            continue
        at = int(event["step"]) * bins // steps
        sums[at] += vector
        counts[at] += 1
        places[at] += int(event["step"])
    seen = counts > 0
    sums, counts, places = sums[seen], counts[seen], places[seen]
    reach = bins // (2 * WINDOW)
    ends = [(max(0, at - reach), at + reach + 1) for at in range(len(counts))]
    means = [sums[a:b].sum(0) / counts[a:b].sum() for a, b in ends]
    return places / counts, np.array(means).reshape(len(counts), size)


def draw(
    at: Array,
    probabilities: Array,
    steps: int,
    options: Mapping[str, Sequence[object]],
    last: Mapping[str, Sequence[float]],
) -> str:
    """The picture as SVG: one panel of stacked areas a choice. Choices of one option are left out."""
    starts = np.cumsum([0, *(len(several) for several in options.values())])
    every = [(name, start) for name, start in zip(options, starts, strict=False) if len(options[name]) > 1]
    shown, left = every[:PANELS], len(every) - PANELS
    rows = math.ceil(len(shown) / COLUMNS)
    width = 2 * MARGIN + min(COLUMNS, max(len(shown), 1)) * PANEL
    height = HEAD + rows * (HEIGHT + GAP) - GAP + FOOT + (24 if left > 0 else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-label="probabilities of the options of every choice over the steps">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="title" x="{MARGIN}" y="28">probabilities over {steps:,} steps</text>',
        f'<text class="faint" x="{MARGIN}" y="45">means over 1/{WINDOW} of the steps; numbers: at the end</text>',
    ]
    for index, (name, start) in enumerate(shown):
        x, y = MARGIN + index % COLUMNS * PANEL, HEAD + index // COLUMNS * (HEIGHT + GAP)
        of = probabilities[:, start : start + len(options[name])]
        parts += _panel(x, y, name, [str(option) for option in options[name]], at / max(steps - 1, 1), of, last[name])
    if left > 0:
        y = height - 16
        parts.append(f'<text class="faint" x="{MARGIN}" y="{y}">and {left} more choices: see mixture.json</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    x: float, y: float, name: str, options: Sequence[str], at: Array, of: Array, last: Sequence[float]
) -> list[str]:
    colours = [_colour(index, len(options)) for index in range(len(options))]
    parts = [f"<g transform='translate({x} {y})'>", f'<text class="name" y="-7">{_text(name, 44)}</text>']
    edges = np.concatenate([np.zeros((len(of), 1)), of.cumsum(1)], 1) if len(of) else np.zeros((0, len(options) + 1))
    for index, option in enumerate(options):
        told = f"{_text(name)} = {_text(option)}: {last[index]:.1%} at the end"
        low, high = (_line(at, edges[:, index + side]) for side in (0, 1))
        path = "M" + "L".join([*low, *reversed(high)]) + "Z" if low else ""
        parts.append(f'<path class="area" fill="{colours[index]}" d="{path}"><title>{told}</title></path>')
    parts.append(f'<rect class="frame" width="{CHART}" height="{HEIGHT}"/>')
    likely = sorted(range(len(options)), key=lambda index: -last[index])
    listed = sorted(likely if len(options) <= LABELS else likely[: LABELS - 1], reverse=True)  # as the areas lie
    for row, index in enumerate(listed):
        down, kind = 8 + row * 14, "best" if index == likely[0] else "other"
        share, option = f"{last[index]:.0%}", _text(options[index], 12)
        parts += [
            f'<rect x="{CHART + 8}" y="{down - 6}" width="9" height="9" fill="{colours[index]}"/>',
            f'<text class="{kind}" x="{CHART + 22}" y="{down + 3}">'
            f'<tspan class="faint">{share}</tspan><tspan x="{CHART + 54}">{option}</tspan></text>',
        ]
    if len(listed) < len(options):
        y = 8 + len(listed) * 14 + 3
        parts.append(f'<text class="faint" x="{CHART + 54}" y="{y}">{len(options) - len(listed)} more</text>')
    return [*parts, "</g>"]


def _line(at: Array, share: Array) -> list[str]:
    """Points from left to right; likely things lie at the bottom for the first option, and end at the top."""
    if len(at) == 1:  # one point is drawn as a band
        at, share = np.array([0.0, 1.0]), np.repeat(share, 2)
    return [f"{x * CHART:.1f} {(1 - p) * HEIGHT:.1f}" for x, p in zip(at, share.clip(0, 1), strict=True)]


def _colour(index: int, count: int) -> str:
    place = index / max(count - 1, 1) * (len(SCALE) - 1)
    below = min(int(place), len(SCALE) - 2)
    pairs = zip(SCALE[below], SCALE[below + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - below)):02x}" for a, b in pairs)


def _text(text: str, most: int | None = None) -> str:
    """As XML, without characters that it cannot hold, and cut where it is too long."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return escape(clean if most is None or len(clean) <= most else clean[: most - 1] + "…")
