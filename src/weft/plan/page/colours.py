"""The colours of splits: one each, for a light and for a dark page."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable

from weft.plan.batches import batch_dims
from weft.plan.layout import REPLICATED
from weft.plan.plan import Plan

WHOLE = "whole on each device"

GREY = ("#5b6470", "#9aa4b2")
PALETTE = (
    ("#1c66c4", "#6ea8fe"),  # blue
    ("#7440c4", "#b794f6"),  # purple
    ("#0b776d", "#3cc5b5"),  # teal
    ("#a82c8f", "#ea7fd6"),  # magenta
    ("#3b761d", "#86c75a"),  # green
    ("#735226", "#cda96f"),  # brown
    ("#b3263f", "#f5788c"),  # red
    ("#087397", "#4fc1e9"),  # cyan
    ("#666508", "#c9c43f"),  # olive
    ("#4048b8", "#929cf5"),  # indigo
)


def labels(plan: Plan) -> list[str]:
    """The split of each operator, such as ``batch/4 n/2``. The dimension that holds the samples has many names (m, b0,
    a0): all are the batch here, so that data parallelism is one thing throughout."""
    return [split_words(plan, place, dim) for place, dim in enumerate(batch_dims(plan.graph))]


def split_words(plan: Plan, place: int, batch: int | None = None) -> str:
    """Such as ``m/4 n/2``, with the dimension ``batch`` called so."""
    parts: dict[int, int] = {}
    for size, dim in zip(plan.mesh.sizes, plan.splits[place], strict=True):
        if dim != REPLICATED:
            parts[dim] = parts.get(dim, 1) * size
    dims = plan.graph.operators[place].dims
    order = sorted(parts, key=lambda dim: (dim != batch, dim))
    return " ".join(f"{'batch' if dim == batch else dims[dim].name}/{parts[dim]}" for dim in order) or WHOLE


def colours(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour for each label, on a light and on a dark page; those that come first are told apart best."""
    found = {WHOLE: GREY}
    for label in labels:
        if label not in found:
            found[label] = _colour(len(found) - 1)
    return found


def _colour(number: int) -> tuple[str, str]:
    if number < len(PALETTE):
        return PALETTE[number]
    # Hues that lie apart as seeds in a sunflower do; a little more or less light for each round.
    turn = (number - len(PALETTE)) * (3 - math.sqrt(5)) / 2
    light = 0.26 + 0.02 * (number % 3)
    return _hex(turn % 1, light), _hex(turn % 1, light + 0.46)


def _hex(hue: float, light: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light, 0.6))
