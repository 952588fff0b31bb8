"""The document `pipeline` of a run: what its stages did and waited for, beside what was foreseen, and their memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from weft.errors import RunError, WeftError
from weft.runs import peek, read_json
from weft.serve.pipeline.buckets import buckets, busy_share, work
from weft.serve.pipeline.columns import Stage
from weft.serve.pipeline.gantt import chosen, real_rows, simulated_rows
from weft.serve.pipeline.memory import memory
from weft.serve.pipeline.spans import Traced, load
from weft.serve.pipeline.steps import Events, events_of, thinned
from weft.serve.pipeline.waiting import Waits, wait_shares, waits_of
from weft.units import size_of

SPANS = 5000
"""The most operations and updates, real and simulated, that are told one by one; of more, busy shares are told."""

FIGURES = 12000
"""The most figures of utilisation over time, of all stages together."""

REMEDY = (
    "this run wrote no trace: start it with `--train.trace true` (or weft.train(..., trace=True)) to see what every "
    "stage did and what it waited for"
)
WAITING = "this run writes a trace, but no operation is in it yet: wait until its first steps are done"

Window = tuple[float, float]


def present(run: Path) -> bool:
    """Whether the run wrote a trace, or told how busy its stages are."""
    if any(path.is_file() and path.stat().st_size for path in (run / "traces").glob("stage*.jsonl")):
        return True
    events = run / "events.jsonl"
    return any(event.get("event") == "pipeline" for event in peek.head(events) + peek.tail(events))


def document(run: Path, **query: Any) -> dict[str, Any]:
    """What is shown between ``from`` and ``to``, in seconds since the first operation; all of it if not given.

    RunError for a window that is none. A trace that is torn, or lacks a stage, is shown as far as it goes.
    """
    events, traced = events_of(run), load(run)
    if traced is None or not any(len(stage.ops) for stage in traced.stages):
        _window(query, 0.0)
        return _untraced(events, REMEDY if traced is None else WAITING)
    window, config, waits = _window(query, traced.end - traced.begin), _config(run), _waits(traced)
    real = [chosen(stage, traced.begin, window) for stage in traced.stages]
    foreseen = [chosen(stage, 0.0, window) for stage in traced.simulated]
    many = sum(own.rows for own in (*real, *foreseen)) > SPANS
    simulated: dict[str, Any] | None = None
    if traced.simulated:
        simulated = {"spans": [], "buckets": None}
        if many:
            simulated["buckets"] = _thin(traced.simulated, 0.0, window)
        else:
            simulated["spans"] = simulated_rows(traced, foreseen, events)
    return {
        "traced": True,
        "remedy": None,
        "stages": _stages(traced, waits, config),
        "total": [0.0, round(traced.end - traced.begin, 6)],
        "window": [round(at, 6) for at in window],
        "real": {
            "spans": [] if many else real_rows(traced, real, events, waits),
            "buckets": _thin(traced.stages, traced.begin, window) if many else None,
        },
        "simulated": simulated,
        "utilisation": _utilisation(events, traced.begin),
        "memory": memory(traced, window, _budgets(events, config, traced)),
        "residency": events.moved(),
    }


def _untraced(events: Events, remedy: str) -> dict[str, Any]:
    points = events.utilisation
    columns = [
        [share for share in column if not math.isnan(share)] for column in zip(*(own for _, own in points), strict=True)
    ]
    means = [sum(column) / len(column) if column else math.nan for column in columns]
    stages: list[dict[str, Any]] = [
        {"stage": number, "rank": number, "blocks": None, "busy": _share(busy), "bubble": _share(1 - busy), "waits": {}}
        for number, busy in enumerate(means)
    ]
    return {
        "traced": False,
        "remedy": remedy,
        "stages": stages,
        "total": [0.0, 0.0],
        "window": [0.0, 0.0],
        "real": {"spans": [], "buckets": None},
        "simulated": None,
        "utilisation": _utilisation(events, events.began or 0.0),
        "memory": [],
        "residency": events.moved(),
    }


def _window(query: Mapping[str, Any], total: float) -> Window:
    """The part of the whole time that is asked for."""
    try:
        asked = [float(query[name]) if query.get(name) is not None else None for name in ("from", "to")]
    except (TypeError, ValueError):
        asked = [math.nan, None]
    low, high = (0.0 if asked[0] is None else asked[0]), (total if asked[1] is None else asked[1])
    if not (math.isfinite(low) and math.isfinite(high) and (low < high or not any(map(_given, asked)))):
        raise RunError(
            f"the window from {query.get('from')} to {query.get('to')} is none: give seconds since the first "
            "operation, `from` below `to`"
        )
    low, high = max(0.0, min(low, total)), max(0.0, min(high, total))
    return (low, high) if low < high else (0.0, total)


def _given(value: float | None) -> bool:
    return value is not None


def _thin(stages: tuple[Stage, ...], begin: float, window: Window) -> list[list[float]]:
    """Shares of as many buckets as there is room for; none after the last operation, since a simulation is short."""
    over = max((float(stage.ops.end[-1]) for stage in stages if len(stage.ops)), default=begin) - begin
    until = min(window[1], max(over, 0.0))
    count = max(min(SPANS // len(stages), 500), 2)
    return buckets(stages, begin, (window[0], until), count) if until > window[0] else []


def _stages(traced: Traced, waits: dict[int, Waits], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    train = config.get("train")
    given = train.get("window") if isinstance(train, Mapping) else None
    usual = 2 * len(traced.stages) * traced.head.microbatches
    windows = [given if isinstance(given, int) and given > 0 else usual] * len(traced.stages)
    ranks, cut = traced.ranks, traced.head.cut
    bounds = [0, *cut, None] if len(cut) == len(traced.stages) - 1 else None
    idle, shares = {}, {}
    for rank, own in waits.items():
        mine = work(*(stage for stage, at in zip(traced.stages, ranks, strict=True) if at == rank))
        idle[rank] = 1.0 - busy_share(mine, traced.begin, traced.end)
        shares[rank] = wait_shares(own, traced, windows)
    return [
        {
            "stage": number,
            "rank": ranks[number],
            "blocks": [bounds[number], bounds[number + 1]] if bounds else None,
            "busy": _share(busy_share(work(stage), traced.begin, traced.end)),
            "bubble": _share(idle[ranks[number]]),
            "waits": {name: _share(value) for name, value in shares[ranks[number]].items()},
        }
        for number, stage in enumerate(traced.stages)
    ]


def _utilisation(events: Events, begin: float) -> dict[str, Any]:
    points = events.utilisation
    if points:
        points = thinned(points, max(FIGURES // len(points[0][1]), 2))
    stages = [[_share(value) for value in own] for own in zip(*(values for _, values in points), strict=True)]
    return {"time": [round(time - begin, 3) for time, _ in points], "stages": stages}


def _budgets(events: Events, config: Mapping[str, Any], traced: Traced) -> dict[int, int]:
    """Bytes that the layers of each rank may take on its device."""
    ranks = sorted(set(traced.ranks))
    told = [row.get("budget") for row in events.residency]
    if len(told) == len(ranks):
        return {rank: int(value) for rank, value in zip(ranks, told, strict=True) if isinstance(value, int | float)}
    residency = config.get("residency")
    said = residency.get("budget") if isinstance(residency, Mapping) else None
    try:
        return dict.fromkeys(ranks, int(size_of(said, RunError))) if isinstance(said, str | int | float) else {}
    except WeftError:
        return {}


def _config(run: Path) -> Mapping[str, Any]:
    """What the manifest says of the run's settings; nothing where it is damaged."""
    try:
        manifest = read_json(run / "manifest.json")
    except RunError:
        return {}
    config = manifest.get("config") if isinstance(manifest, Mapping) else None
    return config if isinstance(config, Mapping) else {}


_known: WeakKeyDictionary[Traced, dict[int, Waits]] = WeakKeyDictionary()


def _waits(traced: Traced) -> dict[int, Waits]:
    found = _known.get(traced)
    if found is None:
        found = _known[traced] = waits_of(traced)
    return found


def _share(value: float) -> float | None:
    return None if math.isnan(value) else round(min(max(value, 0.0), 1.0), 4)
