"""A trace in the Chrome trace event format, for ui.perfetto.dev and chrome://tracing.

Each stage is a process with one thread of operations and updates; arrows are messages. Perfetto reserves process 0 and
names a thread by its number alone, so processes count from 1 and a thread has the number of its process. Times are
whole microseconds: Perfetto truncates fractions, and drops an event that overlaps its neighbour by a nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.pipeline.scheduler import Op
from weft.pipeline.simulator import Simulated, Span
from weft.pipeline.trace import StageTrace, Trace, Versions
from weft.pipeline.utilisation import idle_shares

Event = dict[str, Any]

_CATEGORIES = {"F": "forward", "B": "backward", "W": "weights", "E": "evaluation"}
_MESSAGES = {"F": "activations", "B": "gradients", "E": "activations to score"}
_RANKS = {"M": 0, "C": 1, "e": 2, "b": 3, "X": 4, "s": 5, "f": 6}
"""The order of events of one time: an arrow belongs to the last event of its thread before it."""


def perfetto(trace: Trace, simulated: Simulated | None = None) -> dict[str, Any]:
    """The trace from time 0 on, and as further processes the simulation, its times in seconds.

    That is ``simulated``, or what the trace itself holds.
    """
    begin = trace.begin
    count = len(trace.stages)
    events: list[Event] = []
    for stage in trace.stages:
        events += _process(stage.stage, f"stage {stage.stage}")
        versions = stage.versions or (None,) * len(stage.spans)
        for span, in_flight, seen in zip(stage.spans, stage.in_flight, versions, strict=True):
            more = {"in_flight": in_flight, **_seen(seen)}
            events.append(_complete(span, stage.stage, begin, trace.microbatches, more))
        events += _updates(stage, begin)
        events += _counters(stage, begin, trace.end)
        events += _memory(stage, begin, trace.end)
    events += _arrows(trace)
    foreseen = trace.simulated if simulated is None else simulated.spans
    for number in sorted({span.op.stage for span in foreseen}):
        events += _process(count + number, f"simulated stage {number}")
    events += (_complete(span, count + span.op.stage, 0.0, trace.microbatches) for span in foreseen)
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0), _RANKS[event["ph"]]))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(number: int, name: str) -> Iterator[Event]:
    where = _where(number)
    yield {"ph": "M", "name": "process_name", **where, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", **where, "args": {"sort_index": number}}
    yield {"ph": "M", "name": "thread_name", **where, "args": {"name": "ops"}}


def _complete(span: Span, number: int, begin: float, microbatches: int, more: dict[str, int] | None = None) -> Event:
    start, end = _microseconds(span.start - begin), _microseconds(span.end - begin)
    n = span.op.microbatch
    args = {"batch": n} if span.op.kind == "E" else {"micro-batch": n, "step": n // microbatches}
    args |= more or {}
    names = {"name": str(span.op), "cat": _CATEGORIES[span.op.kind]}
    return {"ph": "X", **names, **_where(number), "ts": start, "dur": end - start, "args": args}


def _seen(versions: Versions | None) -> dict[str, int]:
    if versions is None:
        return {}
    forward, backward = versions
    own = {"version_forward": forward}
    return own if backward is None else {**own, "version_backward": backward, "drift": backward - forward}


def _updates(stage: StageTrace, begin: float) -> Iterator[Event]:
    where = _where(stage.stage)
    for update in stage.updates:
        start, end = _microseconds(update.start - begin), _microseconds(update.end - begin)
        args = {"layers": update.layers, "version": update.version}
        yield {"ph": "X", "name": "update", "cat": "update", **where, "ts": start, "dur": end - start, "args": args}
        yield _counter(stage, end, "weights", "version", update.version)


def _counters(stage: StageTrace, begin: float, end: float) -> Iterator[Event]:
    for span, in_flight in zip(stage.spans, stage.in_flight, strict=True):
        yield _counter(stage, _microseconds(span.start - begin), "in flight", "micro-batches", in_flight)
    for span, seen in zip(stage.spans, stage.versions, strict=False):
        if seen is not None and seen.drift is not None:
            yield _counter(stage, _microseconds(span.start - begin), "drift", "updates", seen.drift)
    for at, share in idle_shares(stage, begin, end):
        yield _counter(stage, _microseconds(at - begin), "idle", "share", round(share, 6))


def _memory(stage: StageTrace, begin: float, end: float) -> Iterator[Event]:
    """A track for every layer while it is on the device, and bytes of all; those before the first operation are as of
    then."""
    there: dict[str, str] = {}
    last: dict[str, int] = {}
    for row in stage.memory:
        # Whatever takes no time would end before it begins, once all events are in order.
        at = last[row.layer] = max(_microseconds(row.time - begin), last.get(row.layer, -1) + 1)
        shares = {name: getattr(row, name) for name in ("resident", "arriving", "leaving", "pinned")}
        for name, value in shares.items():
            yield _counter(stage, at, f"layers {name}", "bytes", value)
        yield from _track(stage, row.layer, there.pop(row.layer, None), None, at)
        if row.state != "leaving":
            there[row.layer] = row.state
            yield from _track(stage, row.layer, None, row.state, at)
    for layer, state in there.items():
        yield from _track(stage, layer, state, None, max(_microseconds(end - begin), last[layer] + 1))


def _track(stage: StageTrace, layer: str, old: str | None, new: str | None, at: int) -> Iterator[Event]:
    where = {"cat": "memory", "id": f"{stage.stage}/{layer}", **_where(stage.stage), "ts": at}
    if old is not None:
        yield {"ph": "e", "name": f"{layer} {old}", **where}
    if new is not None:
        yield {"ph": "b", "name": f"{layer} {new}", **where}


def _counter(stage: StageTrace, at: int, name: str, series: str, value: float) -> Event:
    return {"ph": "C", "name": name, **_where(stage.stage), "ts": at, "args": {series: value}}


def _arrows(trace: Trace) -> Iterator[Event]:
    """From the end of the operation that made a message to the start of the one that takes it, where both are known."""
    spans = {span.op: span for stage in trace.stages for span in stage.spans}
    number = 0
    for stage in trace.stages:
        for kind, microbatch, _, size in stage.sent:
            source = spans.get(Op(stage.stage, kind, microbatch))
            target = spans.get(Op(stage.stage + (-1 if kind == "B" else 1), kind, microbatch))
            if source is None or target is None or target.start < source.start:
                continue
            number += 1
            start, end, to = (_microseconds(at - trace.begin) for at in (source.start, source.end, target.start))
            # Just before the end: at the very end the next operation may begin, and would get the arrow.
            at = max(start, min(end - 1, to))
            names = {"name": _MESSAGES[kind], "cat": "message", "id": number}
            yield {"ph": "s", **names, **_where(stage.stage), "ts": at, "args": {"bytes": size}}
            yield {"ph": "f", **names, **_where(target.op.stage), "ts": to, "bp": "e"}


def _where(number: int) -> dict[str, int]:
    return {"pid": number + 1, "tid": number + 1}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
