"""The view `curves` of a run: losses, metrics and speed by step, with as many points as a chart can show."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from weft.runs import events as peek
from weft.serve.downsample import BUCKETS, Curve
from weft.serve.event_log import RunProgress, query_run
from weft.serve.fields import rounded

ROOM = 10_000
"""The most buckets in a document, over all its curves: below half a megabyte."""

KINDS = ("train", "validation", "progress")


def document(run: Path, **query: Any) -> dict[str, Any]:
    """Every curve of a run; the more curves, the fewer points of each."""
    return query_run(run, _curves)


def present(run: Path) -> bool:
    """Whether there is a step near the beginning or the end of the events."""
    events = run / "events.jsonl"
    return any(event.get("event") in ("step", "validation") for event in peek.head(events) + peek.tail(events))


def _curves(reduced: RunProgress) -> dict[str, Any]:
    cap = min(BUCKETS, ROOM // max(1, len(reduced.curves)))
    series = []
    for (of, name), curve in sorted(reduced.curves.items(), key=lambda item: _place(*item[0])):
        drawn = curve.coarser(cap) if cap < curve.cap else curve
        if name == "seconds" and of == "progress":
            series.append({"name": "steps per second", "of": of, **_pace(drawn)})
        series.append({"name": name, "of": of, **drawn.to_json()})
    return {"series": series, "points": reduced.points, "damaged": reduced.damaged}


def _place(of: str, name: str) -> tuple[int, bool, str]:
    """Training before validation before progress, and losses first."""
    return KINDS.index(of), not name.startswith("loss"), name


def _pace(seconds: Curve, parts: int = 60) -> dict[str, Any]:
    """Steps a second over parts of the run, from the seconds up to each step."""
    points = seconds.coarser(parts).to_json()
    pairs = list(zip(points["x"], points["y"], strict=True))
    x, y = [], []
    for (start, began), (end, ended) in pairwise(pairs):
        if began is not None and ended is not None and ended > began and end > start:
            x.append(end)
            y.append(rounded((end - start) / (ended - began)))
    return {"x": x, "y": y}
