"""The view `search` of a run: its fronts, the subnets that were scored, and the mixture of a gradient search."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import RunError, SearchError, nearest
from weft.runs.run import read_manifest
from weft.serve.event_log import SummaryCache
from weft.serve.fields import as_list, mapping, read_mapping, rounded
from weft.serve.overview import is_gradient_search
from weft.serve.views.search_samples import (
    Point,
    ScoredSubnets,
    best_first_order,
    choices,
    numbers,
    option_frequencies,
    probabilities,
)
from weft.utils.files import read_json

if TYPE_CHECKING:
    from weft.search.objectives import Constraint, Objective

VALUES = 5000
"""The most values of choices, over all members; of more members, some at even distances are shown."""

LAYERS = 2500
"""The most layers, over all members."""

LARGEST = 1 << 26
"""The most bytes of a front.json."""


def present(run: Path) -> bool:
    """Whether the run was searched, or searches as it trains."""
    scored = run / "results" / "scores.jsonl"
    has_scores = scored.is_file() and scored.stat().st_size > 0
    return bool(_fronts(run)) or has_scores or is_gradient_search(read_mapping(run, read_manifest))


def document(run: Path, name: str | None = None) -> dict[str, Any]:
    """One search of the run: that of the name, else the one that the config names, else the newest.

    RunError for a name that no front has. ``problem`` names the files that are damaged.
    """
    manifest, fronts = read_mapping(run, read_manifest), _fronts(run)
    config = _search_config(manifest)
    if name is not None and name not in fronts:
        raise RunError(f"run '{run.name}' has no search '{name}'{nearest(name, fronts)}")
    usual = str(config.get("name") or "search")
    name = name or (
        usual if usual in fronts or not fronts else max(fronts, key=lambda one: fronts[one].stat().st_mtime_ns)
    )
    front, problem = _front(fronts.get(name))
    members = _members(front)
    most = max(2, VALUES // max([10, *(len(member.values) for member in members)]))
    if len(members) > most:
        kept = [members[at * (len(members) - 1) // (most - 1)] for at in range(most)]
    else:
        kept = members
    points, count = _scores.query(run / "results" / "scores.jsonl", lambda scores: _sampled(scores, front))
    goals, rules = _goals(front, config, [*members, *points])
    return {
        "searches": sorted(fronts),
        "name": name,
        "objectives": [{"name": goal.name, "maximize": goal.maximize} for goal in goals],
        "front": _front_rows(kept, _command(run, name, manifest)),
        "scored": [
            {"id": point.id, "scores": {name: rounded(value) for name, value in point.scores.items()}}
            for point in points
        ],
        "count": count,
        "choices": option_frequencies(best_first_order(points, goals, rules), choices(front.get("choices"))),
        "probabilities": probabilities(run) if is_gradient_search(manifest) else None,
        "problem": problem,
    }


def _fronts(run: Path) -> dict[str, Path]:
    """The fronts of a run by name, without links that lead out of the run."""
    home = run.resolve()
    found = (run / "results").glob("*/front.json")
    return {file.parent.name: file for file in found if file.is_file() and file.resolve().is_relative_to(home)}


def _front(file: Path | None) -> tuple[Mapping[str, Any], str | None]:
    if file is None:
        return {}, None
    try:
        if file.stat().st_size > LARGEST:
            return {}, f"'{file.name}' has more than {LARGEST} bytes, which is more than is shown"
        front = read_json(file)
    except (RunError, OSError) as error:
        return {}, str(error)
    return (front, None) if isinstance(front, dict) else ({}, f"'{file.name}' is no front; search again")


def _members(front: Mapping[str, Any]) -> list[Point]:
    rows = [row for row in as_list(front.get("members")) if isinstance(row, Mapping) and isinstance(row.get("id"), str)]
    return [
        Point(row["id"], numbers(row.get("scores")), mapping(mapping(row.get("subnet")).get("values")), row)
        for row in rows
    ]


def _front_rows(members: Sequence[Point], command: Sequence[str] | None) -> list[dict[str, Any]]:
    shown, left = [], LAYERS
    for member in members:
        own = member.row.get("layers")
        left -= len(own) if isinstance(own, list) else 0
        shown.append(
            {
                "id": member.id,
                "scores": {one: value if math.isfinite(value) else None for one, value in member.scores.items()},
                "values": dict(member.values),
                "layers": own if isinstance(own, list) and left >= 0 else None,
                "command": None if command is None else shlex.join([*command, "--export.subnet", member.id]),
            }
        )
    return shown


def _command(run: Path, name: str, manifest: Mapping[str, Any]) -> list[str] | None:
    """The command that exports a subnet of this search; None for a run of Python code, which has no config."""
    if not isinstance(manifest.get("config"), Mapping):
        return None
    usual = _search_config(manifest).get("name") or "search"
    return ["weft", "export", str(run), *([] if name == usual else ["--search.name", name])]


def _goals(
    front: Mapping[str, Any], config: Mapping[str, Any], points: Sequence[Point]
) -> tuple[list[Objective], list[Constraint]]:
    """Objectives and constraints: of the front, before there is one of the config, else of the scores."""
    from weft.search.objectives import Objective, parse_constraints

    goals = [
        Objective(one["name"], bool(one.get("maximize")))
        for one in as_list(front.get("objectives"))
        if isinstance(one, Mapping) and isinstance(one.get("name"), str)
    ]
    for maximize in (True, False) if not goals else ():
        names = config.get("maximize" if maximize else "minimize")
        listed = [names] if isinstance(names, str) else as_list(names)
        goals += [Objective(one, maximize) for one in listed if isinstance(one, str)]
    if not goals:
        metrics = dict.fromkeys(metric for point in points for metric in point.scores)
        known = [metric for metric in metrics if metric not in ("loss", "parameters", "flops", "latency", "memory")]
        goals = [Objective(known[0], True)] if known else [Objective("loss", False)] if "loss" in metrics else []
        goals += [Objective("flops", False)] if goals and "flops" in metrics else []
    try:
        return goals, list(parse_constraints(one for one in as_list(front.get("constraints")) if isinstance(one, str)))
    except SearchError:
        return goals, []


def _sampled(scores: ScoredSubnets, front: Mapping[str, Any]) -> tuple[list[Point], int]:
    sample = scores.of(front.get("context"))
    return sample.points(), sample.count


def _search_config(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(mapping(manifest.get("config")).get("search"))


_scores = SummaryCache(ScoredSubnets)
