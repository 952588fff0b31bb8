"""The parts of a plan's page as plain values: saved with the plan, they can be shown where its model is not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from weft.plan.machine import Machine
from weft.plan.page.boxes import boxes
from weft.plan.page.document import sent
from weft.plan.page.figures import large_costs, layer_costs, stage_memory
from weft.plan.page.groups import groups
from weft.plan.page.prices import prices
from weft.plan.page.strategy import drawn
from weft.plan.plan import Plan


def parts(plan: Plan, machine: Machine | None = None) -> dict[str, Any]:
    """The graph as SVG, its colours on a light and on a dark page, bytes by devices and seconds by layer.

    ``machine`` is as in ``page``; ``picked`` tells which splits this is of, since those of a saved plan may be edited.
    """
    found = prices(plan, machine)
    shown = boxes(plan.graph, {*(found.moved if found else ()), *sent(plan)})
    layers = groups(plan, shown)
    picture = drawn(plan, shown, layers, found) if shown.places else None
    costs = large_costs(layer_costs(plan, shown, layers, found)) if found else []
    return {
        "picked": picked(plan.to_json()),
        "svg": picture.svg if picture else None,
        "strategies": [{"label": label, "colour": list(pair)} for label, pair in picture.colours.items()]
        if picture
        else [],
        "memory": [{"device": label, "parts": own} for label, own in stage_memory(plan, found).items()],
        "layers": [
            {
                "name": row.title + (f" x {row.times}" if row.times > 1 else ""),
                "compute": row.compute,
                "communication": row.communication,
            }
            for row in costs
        ],
    }


def picked(saved: Mapping[str, Any]) -> str:
    """A word for the mesh, splits and stages of a saved plan: another where one of them is another."""
    told = [saved.get(name) for name in ("mesh", "splits", "stage", "microbatches")]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
