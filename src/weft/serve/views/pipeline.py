"""The view `pipeline` of a run: what its stages did and waited for, beside what was foreseen, and their memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from weft.errors import RunError, WeftError
from weft.runs import events as peek
from weft.runs import read_json
from weft.serve.event_log import LogTail, Lru
from weft.serve.views.pipeline_events import PipelineEvents, pipeline_events, thinned
from weft.serve.views.residency import residency
from weft.serve.views.schedule import in_window, real_rows, simulated_rows
from weft.trace.analysis import Waits, busy, busy_share, busy_shares, wait_shares, waits_of
from weft.trace.reader import StageFile, StageTrace, Trace, joined, trace_files
from weft.utils.units import parse_bytes

SPANS = 5000
"""The most operations and updates, real and simulated, that are shown one by one; of more, busy shares are."""

FIGURES = 12000
"""The most figures of utilisation over time, of all stages together."""

REMEDY = (
    "this run wrote no trace: start it with `--train.trace true` (or weft.train(..., trace=True)) to see what every "
    "stage did and what it waited for"
)
WAITING = "this run writes a trace, but no operation is in it yet: wait until its first steps are done"

Window = tuple[float, float]


def present(run: Path) -> bool:
    """Whether the run wrote a trace, or how busy its stages are."""
    if any(path.is_file() and path.stat().st_size for path in (run / "traces").glob("stage*.jsonl")):
        return True
    events = run / "events.jsonl"
    return any(event.get("event") == "pipeline" for event in peek.head(events) + peek.tail(events))


def document(run: Path, **query: Any) -> dict[str, Any]:
    """What is shown between ``from`` and ``to``, in seconds since the first operation; all of it if not given.

    RunError for a window that is none. A trace that is torn, or lacks a stage, is shown as far as it goes.
    """
    events, trace = pipeline_events(run), load_trace(run)
    if trace is None or not any(len(stage.ops) for stage in trace.stages):
        _window(query, 0.0)
        return _untraced(events, REMEDY if trace is None else WAITING)
    window, config, waits = _window(query, trace.end - trace.begin), _config(run), _waits(trace)
    real = [in_window(stage, trace.begin, window) for stage in trace.stages]
    foreseen = [in_window(stage, 0.0, window) for stage in trace.simulated]
    many = sum(own.rows for own in (*real, *foreseen)) > SPANS
    simulated: dict[str, Any] | None = None
    if trace.simulated:
        simulated = {"spans": [], "buckets": None}
        if many:
            simulated["buckets"] = _buckets(trace.simulated, 0.0, window)
        else:
            simulated["spans"] = simulated_rows(trace, foreseen, events)
    return {
        "traced": True,
        "remedy": None,
        "stages": _stages(trace, waits, config),
        "total": [0.0, round(trace.end - trace.begin, 6)],
        "window": [round(at, 6) for at in window],
        "real": {
            "spans": [] if many else real_rows(trace, real, events, waits),
            "buckets": _buckets(trace.stages, trace.begin, window) if many else None,
        },
        "simulated": simulated,
        "utilisation": _utilisation(events, trace.begin),
        "memory": residency(trace, window, _budgets(events, config, trace)),
        "residency": events.residency_totals(),
    }


def _untraced(events: PipelineEvents, remedy: str) -> dict[str, Any]:
    points = events.utilisation
    columns = [
        [share for share in column if not math.isnan(share)] for column in zip(*(own for _, own in points), strict=True)
    ]
    means = [sum(column) / len(column) if column else math.nan for column in columns]
    stages: list[dict[str, Any]] = [
        {"stage": number, "rank": number, "blocks": None, "busy": _share(mean), "bubble": _share(1 - mean), "waits": {}}
        for number, mean in enumerate(means)
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
        "residency": events.residency_totals(),
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


def _buckets(stages: tuple[StageTrace, ...], begin: float, window: Window) -> list[list[float]]:
    """Rows of ``[stage, start, end, busy share]``, in seconds after ``begin``: as many as there is room for, and none
    after the last operation, since a simulation is short."""
    last = max((float(stage.ops.end[-1]) for stage in stages if len(stage.ops)), default=begin) - begin
    until = min(window[1], max(last, 0.0))
    if until <= window[0]:
        return []
    edges = np.linspace(window[0], until, max(min(SPANS // len(stages), 500), 2) + 1)
    times = np.round(edges, 6).tolist()
    found: list[list[float]] = []
    for number, stage in enumerate(stages):
        shares = np.round(busy_shares(busy(stage), edges + begin), 4).tolist()
        found += ([number, *row] for row in zip(times, times[1:], shares, strict=False))
    return found


def _stages(trace: Trace, waits: dict[int, Waits], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    train = config.get("train")
    given = train.get("window") if isinstance(train, Mapping) else None
    usual = 2 * len(trace.stages) * trace.head.microbatches
    windows = [given if isinstance(given, int) and given > 0 else usual] * len(trace.stages)
    ranks, cut = trace.ranks, trace.head.cut
    bounds = [0, *cut, None] if len(cut) == len(trace.stages) - 1 else None
    idle, shares = {}, {}
    for rank, own in waits.items():
        mine = busy(*(trace.stages[stage] for stage in trace.by_rank[rank]))
        idle[rank] = 1.0 - busy_share(mine, trace.begin, trace.end)
        shares[rank] = wait_shares(own, trace, windows)
    return [
        {
            "stage": number,
            "rank": ranks[number],
            "blocks": [bounds[number], bounds[number + 1]] if bounds else None,
            "busy": _share(busy_share(busy(stage), trace.begin, trace.end)),
            "bubble": _share(idle[ranks[number]]),
            "waits": {name: _share(value) for name, value in shares[ranks[number]].items()},
        }
        for number, stage in enumerate(trace.stages)
    ]


def _utilisation(events: PipelineEvents, begin: float) -> dict[str, Any]:
    points = events.utilisation
    if points:
        points = thinned(points, max(FIGURES // len(points[0][1]), 2))
    stages = [[_share(value) for value in own] for own in zip(*(values for _, values in points), strict=True)]
    return {"time": [round(time - begin, 3) for time, _ in points], "stages": stages}


def _budgets(events: PipelineEvents, config: Mapping[str, Any], trace: Trace) -> dict[int, int]:
    """Bytes that the layers of each rank may take on its device."""
    ranks = sorted(set(trace.ranks))
    budgets = [row.get("budget") for row in events.residency]
    if len(budgets) == len(ranks):
        return {rank: int(value) for rank, value in zip(ranks, budgets, strict=True) if isinstance(value, int | float)}
    offload = config.get("residency")
    given = offload.get("budget") if isinstance(offload, Mapping) else None
    try:
        return dict.fromkeys(ranks, int(parse_bytes(given, RunError))) if isinstance(given, str | int | float) else {}
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


_known: WeakKeyDictionary[Trace, dict[int, Waits]] = WeakKeyDictionary()


def _waits(trace: Trace) -> dict[int, Waits]:
    found = _known.get(trace)
    if found is None:
        found = _known[trace] = waits_of(trace)
    return found


def _share(value: float) -> float | None:
    return None if math.isnan(value) else round(min(max(value, 0.0), 1.0), 4)


KEPT = 4
"""Runs whose traces are kept in memory."""


class _TraceFolder:
    """The traces of a run, kept between two looks at them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self._tails: dict[int, LogTail] = {}
        self._files: dict[int, StageFile] = {}
        self._trace: Trace | None = None

    def load_trace(self) -> Trace | None:
        with self.lock:
            there = trace_files(self.folder)
            gone = self._files.keys() - there.keys()
            for number in gone:
                del self._tails[number], self._files[number]
            read = [self._read(number, path) for number, path in there.items()]
            if gone or any(read):
                self._trace = joined(self._files)
            return self._trace

    def _read(self, number: int, path: Path) -> bool:
        """Read what was added to a file; whether there was anything."""
        tail = self._tails.setdefault(number, LogTail(path))
        if number in self._files and not tail.changed():
            return False
        if tail.replaced() or number not in self._files:
            self._files[number] = StageFile()
        with suppress(OSError):
            for _, piece in tail.read():
                self._files[number].add(piece)
        return True


_folders: Lru[_TraceFolder] = Lru(KEPT)


def load_trace(run: Path) -> Trace | None:
    """The last start of a run, as far as it is written; None where nothing is. The same value as long as no file
    changed, and only what was added is read where one did."""
    folder = (run / "traces").absolute()
    return _folders.get(folder, "", lambda: _TraceFolder(folder)).load_trace()
