"""The view of a saved plan.

Any file may lie among the plans, so each part is checked before it is shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from weft.errors import PlanError, WeftError
from weft.plan.saved import SavedCost, read_plan
from weft.serve.fields import finite
from weft.serve.views.plan_graph import graph, layer_costs, stage_memory
from weft.serve.views.plan_layers import PlanOperator, nodes_of

LARGEST = 32 << 20
"""Bytes of a file that may be a plan."""

MOST = 2000
"""The most nodes of a graph that is shown."""

NO_OPERATORS = "it was saved without its operators: save it again with `weft plan ... --save`"
EDITED = "its splits were edited: price it anew with `weft plan ... --from-plan` and save it again"
TOO_LARGE = "it has more than {count} operators that differ, which is more than can be drawn"
DAMAGED = "its operators are damaged: save it again with `weft plan ... --save`"

Word = Annotated[str, Meta(max_length=1000)]
Count = Annotated[int, Meta(ge=1, le=2**31)]


class ComparisonRow(Struct):
    name: Word
    mesh: Word = ""
    why: Word = ""
    step: float | None = None
    memory: float | None = None


class PlanSummary(Struct):
    """The parts of a saved plan that are shown beside its operators."""

    model: Word
    machine: Word
    devices: Count
    mesh: Annotated[list[Count], Meta(min_length=1, max_length=16)]
    stages: Count
    microbatches: Count
    recompute: bool
    cost: SavedCost
    splits: dict[str, list[str]]
    limit: float | None = None
    untried: int = 0
    compared: Annotated[list[ComparisonRow], Meta(max_length=100)] = []


def list_plans(folder: Path) -> list[dict[str, Any]]:
    """The plans in a folder by name; other files are ignored."""
    found = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            saved = _checked(_read(path), path.name)
        except WeftError:
            continue
        found.append({"name": path.stem, "model": saved.model, "devices": saved.devices})
    return found


def document(plan: Path) -> dict[str, Any]:
    """The document of a plan. PlanError for a file that is none; ``note`` says why a graph is not shown."""
    return plan_document(_read(plan), plan.stem)


def plan_document(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """The document of the values of a saved plan."""
    saved = _checked(raw, name)
    operators, note = _operators(raw, saved)
    drawn = graph(operators, saved.mesh, saved.devices, saved.stages) if operators and note is None else None
    cost, limit = saved.cost, finite(saved.limit)
    memory = stage_memory(operators, saved.devices, saved.stages, saved.microbatches) or {
        "fullest device": {"parameters with gradients and states": cost.parameters, "activations": cost.activations}
    }
    return {
        "name": name,
        "model": saved.model,
        "machine": saved.machine,
        "devices": saved.devices,
        "mesh": "x".join(map(str, saved.mesh)),
        "stages": saved.stages,
        "microbatches": saved.microbatches,
        "recompute": saved.recompute,
        "untried": saved.untried,
        "seconds": {part: finite(max(getattr(cost, part), 0.0)) for part in ("compute", "communication", "bubble")},
        "gap": finite(max(cost.step_time / cost.lower_bound - 1.0, 0.0)) if cost.lower_bound > 0 else 0.0,
        "without_rule": sorted({operator.target for operator in operators if not operator.known})[:100],
        "graph": drawn,
        "note": note,
        "memory": [
            {"device": device, "parts": {part: finite(value) for part, value in parts.items()}, "limit": limit}
            for device, parts in memory.items()
        ],
        "layers": layer_costs(operators, saved.stages, cost.compute, cost.communication),
        "comparisons": _compared(saved, limit),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        is_inside = path.is_file() and path.resolve().parent == path.parent.resolve()
        if not is_inside or path.stat().st_size > LARGEST:
            raise PlanError(f"'{path.name}' is no plan: it is a link, no file, or larger than {LARGEST} bytes")
    except (OSError, RuntimeError) as problem:
        raise PlanError(f"'{path.name}' cannot be read: {problem}") from problem
    return read_plan(path)


def _checked(raw: dict[str, Any], name: str) -> PlanSummary:
    try:
        return msgspec.convert(raw, PlanSummary)
    except (msgspec.ValidationError, RecursionError) as problem:
        raise PlanError(f"'{name}' is no plan that weft saved: {problem}") from problem


def _operators(raw: dict[str, Any], saved: PlanSummary) -> tuple[list[PlanOperator], str | None]:
    """The operators of a saved plan, and why their graph is not shown."""
    if raw.get("operators") is None:
        return [], NO_OPERATORS
    try:
        found = msgspec.convert(raw["operators"], list[PlanOperator])
    except (msgspec.ValidationError, RecursionError):
        return [], DAMAGED
    for place, operator in enumerate(found):
        names = {"-", *(name for name, _ in operator.dims)}
        is_whole = len(operator.split) == len(saved.mesh) and names.issuperset(operator.split)
        if not is_whole or operator.stage >= saved.stages or any(read.source >= place for read in operator.reads):
            return [], DAMAGED
    if {operator.name: list(operator.split) for operator in found} != saved.splits:
        return [], EDITED
    count = len(nodes_of(found).places)
    if count > MOST:
        return found, TOO_LARGE.format(count=MOST)
    return found, None if count else "there is no operator to draw"


def _compared(saved: PlanSummary, limit: float | None) -> list[dict[str, Any]]:
    """The rows of the comparison: the plan and the alternatives."""
    cost = saved.cost
    own = ComparisonRow("this plan", "x".join(map(str, saved.mesh)), "", cost.step_time, cost.memory)
    found = []
    for row in (own, *saved.compared):
        step, memory = finite(row.step), finite(row.memory)
        found.append(
            {
                "name": row.name,
                "mesh": row.mesh,
                "step": step,
                "memory": memory,
                "fits": None if memory is None else limit is None or memory <= limit,
                "plan_is_faster": step / cost.step_time
                if row is not own and step is not None and cost.step_time > 0
                else None,
                "reason": row.why,
            }
        )
    return found
