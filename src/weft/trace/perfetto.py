"""A trace in the Chrome trace event format, for ui.perfetto.dev and chrome://tracing.

Each stage is a process with one thread of operations and updates; arrows are messages. Perfetto reserves process 0 and
names a thread by its number alone, so processes count from 1 and a thread has the number of its process. Times are
whole microseconds: Perfetto truncates fractions, and drops an event that overlaps its neighbour by a nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from weft.pipeline.scheduler import Op
from weft.trace.reader import STATES, StageTrace, Trace

Event = dict[str, Any]

_CATEGORIES = {"F": "forward", "B": "backward"}
_MESSAGES = {"F": "activations", "B": "gradients"}
_RANKS = {"M": 0, "C": 1, "e": 2, "b": 3, "X": 4, "s": 5, "f": 6}
"""The order of events of one time: an arrow belongs to the last event of its thread before it."""


def perfetto(trace: Trace) -> dict[str, Any]:
    """The trace from time 0 on, and as further processes the simulation that it holds, its times in seconds."""
    count, microbatches = len(trace.stages), trace.head.microbatches
    events: list[Event] = []
    for number, stage in enumerate(trace.stages):
        events += _process(number, f"stage {number}")
        events += _ops(stage, number, number, trace.begin, microbatches)
        events += _updates(stage, number, trace.begin)
        events += _counters(trace, number)
        events += _memory(stage, number, trace.begin, trace.end)
    events += _arrows(trace)
    for number, stage in enumerate(trace.simulated):
        if len(stage.ops):
            events += _process(count + number, f"simulated stage {number}")
            events += _ops(stage, number, count + number, 0.0, microbatches, is_real=False)
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0), _RANKS[event["ph"]]))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(number: int, name: str) -> Iterator[Event]:
    where = _where(number)
    yield {"ph": "M", "name": "process_name", **where, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", **where, "args": {"sort_index": number}}
    yield {"ph": "M", "name": "thread_name", **where, "args": {"name": "ops"}}


def _ops(
    stage: StageTrace, number: int, process: int, begin: float, microbatches: int, is_real: bool = True
) -> Iterator[Event]:
    ops = stage.ops
    columns = (ops.kind, ops.microbatch, ops.start - begin, ops.end - begin, ops.in_flight, ops.forward, ops.backward)
    for code, n, start, end, in_flight, forward, backward in zip(*(own.tolist() for own in columns), strict=True):
        kind, at = chr(code), _microseconds(start)
        args = {"micro-batch": n, "step": n // microbatches}
        if is_real:
            args["in_flight"] = in_flight
        if forward >= 0:
            args["version_forward"] = forward
        if backward >= 0:
            args |= {"version_backward": backward, "version_lag": backward - forward}
        names = {"name": f"{number}{kind}{n}", "cat": _CATEGORIES[kind]}
        yield {"ph": "X", **names, **_where(process), "ts": at, "dur": _microseconds(end) - at, "args": args}


def _updates(stage: StageTrace, number: int, begin: float) -> Iterator[Event]:
    columns = (stage.updates[name].tolist() for name in ("layers", "version", "start", "end"))
    for layers, version, since, until in zip(*columns, strict=True):
        start, end = _microseconds(since - begin), _microseconds(until - begin)
        args = {"layers": layers, "version": version}
        names = {"name": "update", "cat": "update"}
        yield {"ph": "X", **names, **_where(number), "ts": start, "dur": end - start, "args": args}
        yield _counter(number, end, "weights", "version", version)


def _counters(trace: Trace, number: int) -> Iterator[Event]:
    ops = trace.stages[number].ops
    starts = [_microseconds(start) for start in (ops.start - trace.begin).tolist()]
    for at, in_flight in zip(starts, ops.in_flight.tolist(), strict=True):
        yield _counter(number, at, "in flight", "micro-batches", in_flight)
    for place in np.flatnonzero(ops.backward >= 0).tolist():
        yield _counter(number, starts[place], "version lag", "updates", int(ops.backward[place] - ops.forward[place]))


def _memory(stage: StageTrace, number: int, begin: float, end: float) -> Iterator[Event]:
    """A track for every layer while it is on the device, and bytes of all; those before the first operation are as of
    then."""
    there: dict[str, str] = {}
    last: dict[str, int] = {}
    shares = ("resident", "arriving", "leaving", "pinned")
    columns = (stage.memory[name].tolist() for name in ("layer", "state", "time", *shares))
    for layer_number, state_number, time, *values in zip(*columns, strict=True):
        layer, state = stage.layers[layer_number], STATES[state_number]
        # Whatever takes no time would end before it begins, once all events are in order.
        at = last[layer] = max(_microseconds(time - begin), last.get(layer, -1) + 1)
        for name, value in zip(shares, values, strict=True):
            yield _counter(number, at, f"layers {name}", "bytes", value)
        if layer in there:
            yield _track("e", number, layer, there.pop(layer), at)
        if state != "leaving":
            there[layer] = state
            yield _track("b", number, layer, state, at)
    for layer, state in there.items():
        yield _track("e", number, layer, state, max(_microseconds(end - begin), last[layer] + 1))


def _track(phase: str, number: int, layer: str, state: str, at: int) -> Event:
    about = {"name": f"{layer} {state}", "cat": "memory", "id": f"{number}/{layer}"}
    return {"ph": phase, **about, **_where(number), "ts": at}


def _counter(number: int, at: int, name: str, series: str, value: float) -> Event:
    return {"ph": "C", "name": name, **_where(number), "ts": at, "args": {series: value}}


def _arrows(trace: Trace) -> Iterator[Event]:
    """From the end of the operation that made a message to the start of the one that takes it, where both are known."""
    spans: dict[Op, tuple[float, float]] = {}
    for number, stage in enumerate(trace.stages):
        columns = (stage.ops.kind, stage.ops.microbatch, stage.ops.start, stage.ops.end)
        for code, n, start, end in zip(*(own.tolist() for own in columns), strict=True):
            spans[Op(number, chr(code), n)] = (start, end)  # type: ignore[arg-type]
    arrows = 0
    for number, stage in enumerate(trace.stages):
        for code, n, size in zip(*(stage.sent[name].tolist() for name in ("kind", "microbatch", "bytes")), strict=True):
            kind: Any = chr(code)
            to = number + (-1 if kind == "B" else 1)
            source, target = spans.get(Op(number, kind, n)), spans.get(Op(to, kind, n))
            if source is None or target is None or target[0] < source[0]:
                continue
            arrows += 1
            start, end, taken = (_microseconds(at - trace.begin) for at in (*source, target[0]))
            # Just before the end: at the very end the next operation may begin, and would get the arrow.
            at = max(start, min(end - 1, taken))
            names = {"name": _MESSAGES[kind], "cat": "message", "id": arrows}
            yield {"ph": "s", **names, **_where(number), "ts": at, "args": {"bytes": size}}
            yield {"ph": "f", **names, **_where(to), "ts": taken, "bp": "e"}


def _where(number: int) -> dict[str, int]:
    return {"pid": number + 1, "tid": number + 1}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
