"""The view `pipeline` of a run: the operations and waits of its stages beside the simulated ones, and their memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import RunError, WeftError
from weft.runs import events as run_events
from weft.serve.downsample import VectorCurve
from weft.serve.event_log import LineSummary, SummaryCache
from weft.serve.fields import finite, mapping, read_mapping, whole_number
from weft.serve.views.offload import device_memory
from weft.serve.views.schedule import in_window, load_trace, real_rows, simulated_rows
from weft.trace.analysis import Waits, busy, busy_shares, simulation_error, wait_shares, waits_of
from weft.trace.reader import StageTrace, Trace
from weft.utils.files import read_json
from weft.utils.units import parse_bytes

SPANS = 5000
"""The most operations and updates, real and simulated, that are shown one by one; for more, busy shares are shown."""

FIGURES = 12000
"""The most busy shares over time, over all stages."""

REMEDY = (
    "this run wrote no trace: start it with `--execution.trace true` (or weft.train(..., trace=True)) to see what "
    "every stage did and what it waited for"
)
WAITING = "this run writes a trace, but no operation is in it yet: wait until its first steps are done"

Window = tuple[float, float]


def present(run: Path) -> bool:
    """Whether the run wrote a trace, or how busy its stages are."""
    if any(path.is_file() and path.stat().st_size for path in (run / "traces").glob("stage*.jsonl")):
        return True
    events = run / "events.jsonl"
    return any(event.get("event") == "pipeline" for event in run_events.head(events) + run_events.tail(events))


def document(run: Path, **query: Any) -> dict[str, Any]:
    """The pipeline between ``from`` and ``to``, in seconds since the first operation; by default all of it.

    RunError for an empty window. A trace that is torn, or lacks a stage, is shown as far as it goes.
    """
    return _events.query(run / "events.jsonl", lambda events: _document(run, events, query))


def _document(run: Path, events: PipelineEvents, query: Mapping[str, Any]) -> dict[str, Any]:
    trace, subnets_of = load_trace(run), partial(events.subnets, run / "events.jsonl")
    if trace is None or not any(len(stage.ops) for stage in trace.stages):
        _window(query, 0.0)
        return _untraced(events, REMEDY if trace is None else WAITING)
    window, waits = _window(query, trace.end - trace.begin), _waits(trace)
    config = mapping(read_mapping(run / "manifest.json", read_json).get("config"))
    real = [in_window(stage, trace.begin, window) for stage in trace.stages]
    expected = [in_window(stage, 0.0, window) for stage in trace.simulated]
    many = sum(len(ops) + len(updates) for ops, updates in (*real, *expected)) > SPANS
    simulated: dict[str, Any] | None = None
    if trace.simulated:
        error = simulation_error(trace) or {}
        simulated = {
            "spans": [] if many else simulated_rows(trace, expected, subnets_of),
            "buckets": _buckets(trace.simulated, 0.0, window) if many else None,
            "steps": error["steps"],
            "seconds": round(error["time"], 6),
            "real_seconds": round(error["real_time"], 6),
        }
    return {
        "traced": True,
        "remedy": None,
        "stages": _stages(trace, waits, config),
        "total": [0.0, round(trace.end - trace.begin, 6)],
        "window": [round(at, 6) for at in window],
        "real": {
            "spans": [] if many else real_rows(trace, real, subnets_of, waits),
            "buckets": _buckets(trace.stages, trace.begin, window) if many else None,
        },
        "simulated": simulated,
        "busy": _busy_over_time(events, trace.begin),
        "memory": device_memory(trace, window, _budgets(events, config, trace)),
        "offload": events.offload_totals(),
    }


def _untraced(events: PipelineEvents, remedy: str) -> dict[str, Any]:
    columns = zip(*(shares / count for count, _, shares in events.busy.rows()), strict=True)
    known = [[share for share in column if not math.isnan(share)] for column in columns]
    means = [sum(column) / len(column) if column else math.nan for column in known]
    return {
        "traced": False,
        "remedy": remedy,
        "stages": [
            {"stage": number, "blocks": None, "busy": _share(mean), "bubble": _share(1 - mean), "waits": {}}
            for number, mean in enumerate(means)
        ],
        "total": [0.0, 0.0],
        "window": [0.0, 0.0],
        "real": {"spans": [], "buckets": None},
        "simulated": None,
        "busy": _busy_over_time(events, events.began or 0.0),
        "memory": [],
        "offload": events.offload_totals(),
    }


def _window(query: Mapping[str, Any], total: float) -> Window:
    """The part of the time that the query asks for."""
    try:
        low, high = float(query.get("from", 0.0)), float(query.get("to", total))
    except ValueError:
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and (low < high or not query)):
        raise RunError(
            f"the window from {query.get('from')} to {query.get('to')} is empty: give seconds since the first "
            "operation, `from` below `to`"
        )
    low, high = max(0.0, min(low, total)), max(0.0, min(high, total))
    return (low, high) if low < high else (0.0, total)


def _buckets(stages: tuple[StageTrace, ...], begin: float, window: Window) -> list[list[float]]:
    """Rows of ``[stage, start, end, busy share]``, in seconds after ``begin``, up to the last operation."""
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


def _stages(trace: Trace, waits: list[Waits], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = mapping(config.get("execution")).get("max_in_flight", mapping(config.get("train")).get("window"))
    window = given if isinstance(given, int) and given > 0 else 2 * len(trace.stages) * trace.head.microbatches
    cut = trace.head.cut
    bounds = [0, *cut, None] if len(cut) == len(trace.stages) - 1 else None
    found = []
    for number, stage in enumerate(trace.stages):
        worked = float(busy_shares(busy(stage), np.array([trace.begin, trace.end]))[0])
        shares = wait_shares(trace, number, waits[number], window)
        found.append(
            {
                "stage": number,
                "blocks": [bounds[number], bounds[number + 1]] if bounds else None,
                "busy": _share(worked),
                "bubble": _share(1.0 - worked),
                "waits": {name: _share(value) for name, value in shares.items()},
            }
        )
    return found


def _busy_over_time(events: PipelineEvents, begin: float) -> dict[str, Any]:
    rows = events.busy.rows()
    if rows:
        rows = events.busy.coarser(max(FIGURES // len(rows[0][2]), 2)).rows()
    stages = [[_share(value) for value in own] for own in zip(*(sums / count for count, _, sums in rows), strict=True)]
    return {"time": [round(time / count - begin, 3) for count, time, _ in rows], "stages": stages}


def _budgets(events: PipelineEvents, config: Mapping[str, Any], trace: Trace) -> list[int | None]:
    """Bytes that the layers of each stage may take on its device."""
    if len(events.offload) == len(trace.stages):
        return [whole_number(row.get("budget")) for row in events.offload]
    given = mapping(config.get("offload", config.get("residency"))).get("budget")
    try:
        budget = int(parse_bytes(given, RunError)) if isinstance(given, str | int | float) else None
    except WeftError:
        budget = None
    return [budget] * len(trace.stages)


def _share(value: float) -> float | None:
    return None if math.isnan(value) else round(min(max(value, 0.0), 1.0), 4)


POINTS = 800
"""The most points of busy shares that are kept."""

# A step as runs write it, which need not be parsed to know its number.
_STEP = re.compile(rb'\{"event": "step",.*?"step": (\d{1,15})[,}]')


class PipelineEvents(LineSummary):
    """The pipeline in the events of one run: subnets of steps, busy shares, offload.

    Of steps, only their places in the file are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[tuple[int, int, int, int]] = []  # offset, length, first and last step
        self.began: float | None = None
        self.busy = VectorCurve(POINTS)
        """Busy shares of the stages, NaN where a stage has written none, by the number of their event."""
        self.offload: list[dict[str, Any]] = []
        self._count = self._stages = 0

    def subnets(self, path: Path, steps: Iterable[int]) -> dict[int, list[str]]:
        """The ids of the subnets of some steps, as far as the file of the events has them."""
        wanted = set(steps)
        if not wanted:
            return {}
        found: dict[int, list[str]] = {}
        near = [piece for piece in self._pieces if piece[2] <= max(wanted) and piece[3] >= min(wanted)]
        with suppress(OSError), open(path, "rb") as file:
            for offset, length, _, _ in near:
                file.seek(offset)
                for line in file.read(length).splitlines():
                    quick = _STEP.match(line)
                    if quick and int(quick[1]) not in wanted:
                        continue
                    event = run_events.parse(line) or {}
                    step, ids = _step(event), event.get("subnets")
                    if step in wanted and isinstance(ids, list):
                        found[step] = [str(name)[:64] for name in ids[:1024]]
        return found

    def offload_totals(self) -> dict[str, int] | None:
        """What all stages moved up to now; None where nothing is offloaded."""
        if not self.offload:
            return None

        def total(*names: str) -> int:
            values = [next((row[name] for name in names if name in row), 0) for row in self.offload]
            return sum(whole_number(value) or 0 for value in values)

        uses, misses = total("uses"), total("misses")
        moved = {"loaded_bytes": total("loaded_bytes", "brought"), "evicted_bytes": total("evicted_bytes", "sent")}
        return {"hits": uses - misses, "misses": misses, **moved}

    def add_piece(self, offset: int, piece: bytes) -> None:
        first, last = 2**60, -1
        for line in piece.splitlines():
            quick = _STEP.match(line)
            if quick and self.began is not None:
                step: int | None = int(quick[1])
            else:
                event = run_events.parse(line) or {}
                step = _step(event)
                self._add_event(event)
            if step is not None:
                first, last = min(first, step), max(last, step)
        if last >= 0:
            self._pieces.append((offset, len(piece), first, last))

    def _add_event(self, event: dict[str, Any]) -> None:
        time, kind = finite(event.get("time")), event.get("event")
        if time is None:
            return
        if self.began is None:
            self.began = time
        if kind == "pipeline":
            self._add_busy(time, event.get("busy", event.get("utilisation")))
        elif kind in ("offload", "residency"):
            self._add_offload(event.get("stages"))
        elif kind == "finished":
            self._add_offload(event.get("offload", event.get("residency")))

    def _add_busy(self, time: float, values: object) -> None:
        if not isinstance(values, list) or not 0 < len(values) <= 4096:
            return
        shares = [finite(value) for value in values]
        if any(share is None and value is not None for share, value in zip(shares, values, strict=True)):
            return
        if len(shares) != self._stages:  # a run that was resumed on other stages begins anew
            self.busy, self._count, self._stages = VectorCurve(POINTS), 0, len(shares)
        self.busy.put(self._count, (1, time, np.array(shares, dtype=float).clip(0.0, 1.0)))
        self._count += 1

    def _add_offload(self, stages: object) -> None:
        rows = [row for row in stages if isinstance(row, dict)] if isinstance(stages, list) else []
        # In the first events not every stage has a row.
        if rows and len(rows) >= len(self.offload):
            self.offload = rows


def _step(event: dict[str, Any]) -> int | None:
    return whole_number(event.get("step")) if event.get("event") == "step" else None


_events = SummaryCache(PipelineEvents)
_waits = lru_cache(maxsize=2)(waits_of)
