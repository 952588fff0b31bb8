"""The document of a plan: what `weft plan --save` wrote, as the page shows it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.serve.plan.saved import Memory, Row, Saved, page_of, read


def present(plan: Path) -> bool:
    """Whether a file is a plan."""
    try:
        read(plan)
    except WeftError:
        return False
    return True


def listed(folder: Path) -> list[dict[str, Any]]:
    """The plans in a folder by name; whatever else lies there is passed over."""
    found = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            saved, _ = read(path)
        except WeftError:
            continue
        found.append({"name": path.stem, "model": saved.model, "devices": saved.devices})
    return found


def document(plan: Path, **query: Any) -> dict[str, Any]:
    """What is known of a plan. PlanError for a file that is none; ``note`` says why a graph is not shown."""
    saved, raw = read(plan)
    page, note = page_of(raw)
    cost = saved.cost
    limit = _number(saved.limit)
    fallback = {"parameters with gradients and states": cost.parameters, "activations": cost.activations}
    rows = page.memory if page and page.memory else [Memory("fullest device", fallback)]
    return {
        "name": plan.stem,
        "model": saved.model,
        "machine": saved.machine,
        "devices": saved.devices,
        "mesh": "x".join(map(str, saved.mesh)),
        "stages": saved.stages,
        "microbatches": saved.microbatches,
        "recompute": saved.recompute,
        "untried": saved.untried,
        "seconds": {name: _number(max(getattr(cost, name), 0.0)) for name in ("compute", "communication", "bubble")},
        "gap": _number(max(cost.step / cost.bound - 1.0, 0.0)) if cost.bound > 0 else 0.0,
        "graph": {"svg": page.svg} if page and page.svg and note is None else None,
        "note": note,
        "strategies": [{"label": own.label, "colour": list(own.colour)} for own in page.strategies] if page else [],
        "memory": [
            {"device": row.device, "parts": {name: _number(v) for name, v in row.parts.items()}, "limit": limit}
            for row in rows
        ],
        "layers": [
            {"name": row.name, "compute": _number(row.compute), "communication": _number(row.communication)}
            for row in (page.layers if page else ())
        ],
        "rows": _compared(saved, limit),
    }


def _compared(saved: Saved, limit: float | None) -> list[dict[str, Any]]:
    """The plan itself and what others would do, in columns for a person."""
    cost = saved.cost
    own = Row("this plan", "x".join(map(str, saved.mesh)), "", cost.step, cost.memory)
    found = []
    for row in (own, *saved.compared):
        step, memory = _number(row.step), _number(row.memory)
        found.append(
            {
                "name": row.name,
                "mesh": row.mesh,
                "step": step,
                "memory": memory,
                "fits": None if memory is None else limit is None or memory <= limit,
                "plan_is_faster": step / cost.step if row is not own and step is not None and cost.step > 0 else None,
                "why": row.why,
            }
        )
    return found


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
