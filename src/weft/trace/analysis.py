"""When the stages of a trace worked, when they waited and for what; on columns, for millions of operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from weft.pipeline.scheduler import Op
from weft.trace.reader import Numbers, StageTrace, Trace

F, B = ord("F"), ord("B")

Cause = Literal["op", "message", "version or window"]
CAUSES: tuple[Cause, ...] = ("op", "message", "version or window")
"""What took most of a wait.

``op``: the operation that makes the input was not over. ``message``: it was, but the input was under way. ``version or
window``: the input was there, but the right weights or a free place in the window were not.
"""

LOOKAHEAD = 4096
"""How many operations ahead a blocked one is searched; no window is wider."""

AN_UPDATE, THE_END = -1, -2


class Busy(NamedTuple):
    """When a stage worked: disjoint intervals in order."""

    start: Numbers
    end: Numbers


def busy(stage: StageTrace) -> Busy:
    """When a stage worked: operations and updates."""
    start, end = (np.concatenate([getattr(stage.ops, name), stage.updates[name]]) for name in ("start", "end"))
    if not len(start):
        return Busy(start, end)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    is_first = np.concatenate([[True], start[1:] > end[:-1]])
    return Busy(start[is_first], end[np.append(is_first[1:], True)])


def busy_seconds(work: Busy, begin: float, end: float) -> float:
    """The busy seconds between two times."""
    parts = np.minimum(work.end, end) - np.maximum(work.start, begin)
    return float(sum(np.maximum(parts, 0.0).tolist()))


def busy_shares(work: Busy, edges: Numbers) -> Numbers:
    """The busy share between each two edges.

    >>> busy_shares(Busy(np.array([0.0, 3.0]), np.array([1.0, 4.0])), np.array([0.0, 2.0, 4.0]))
    array([0.5, 0.5])
    """
    if not len(work.start):
        return np.zeros(len(edges) - 1)
    # The work done up to each time is a line that rises by one a second while the stage works.
    times = np.column_stack(work).ravel()
    done = np.concatenate([[0.0], np.cumsum(work.end - work.start)])
    worked = np.interp(edges, times, np.column_stack([done[:-1], done[1:]]).ravel())
    width = np.diff(edges)
    shares: Numbers = np.divide(np.diff(worked), width, out=np.zeros(len(width)), where=width > 0).clip(0.0, 1.0)
    return shares


def bubble(trace: Trace) -> float:
    """The share of all stages' time that is idle, filling and draining included."""
    return _idle_share(trace, trace.begin, trace.end)


def steady_bubble(trace: Trace) -> float:
    """The idle share from the first operation of the last stage to the last forward of the first stage."""
    last, first = trace.stages[-1].ops, trace.stages[0].ops
    begin = float(last.start.min()) if len(last) else 0.0
    forwards = first.start[first.kind == F]
    return _idle_share(trace, begin, float(forwards.max()) if len(forwards) else 0.0)


class Gaps(NamedTuple):
    """Times in which a stage did nothing. ``op`` is the place of the operation that ended each, or ``AN_UPDATE``, or
    ``THE_END`` of the trace."""

    start: Numbers
    end: Numbers
    op: Numbers


def gaps(trace: Trace, stage: int) -> Gaps:
    """When a stage did nothing from the beginning of the trace to its end."""
    ops, updates = trace.stages[stage].ops, trace.stages[stage].updates
    start = np.concatenate([ops.start, updates["start"]])
    end = np.concatenate([ops.end, updates["end"]])
    place = np.concatenate([np.arange(len(ops)), np.full(len(updates["start"]), AN_UPDATE)])
    order = np.lexsort((end, start))
    start, place = np.append(start[order], trace.end), np.append(place[order], THE_END)
    before = np.maximum.accumulate(np.concatenate([[trace.begin], end[order]]))
    is_idle = start > before
    return Gaps(before[is_idle], start[is_idle], place[is_idle])


@dataclass(frozen=True, eq=False)
class Waits:
    """The waits of one stage, each before the operation at place ``op``. ``arrived`` is the part of ``seconds`` before
    its input arrived, and ``made`` the part before its input was made."""

    op: Numbers
    start: Numbers
    seconds: Numbers
    made: Numbers
    arrived: Numbers
    blocked: Numbers
    """The place of an operation that had its input from the start of the wait, but lacked a version or a place in the
    window; -1 where there is none."""
    for_updates: float
    """Seconds of waits that an update ended."""
    in_flight: Numbers
    """Micro-batches in flight on the stage during the wait."""

    def cause(self) -> Numbers:
        """For each wait the place in ``CAUSES`` of what took most of it."""
        parts = np.stack([self.made, self.arrived - self.made, self.seconds - self.arrived])
        causes: Numbers = np.argmax(parts, axis=0) if len(self.seconds) else np.zeros(0, dtype=int)
        return causes


class Wait(NamedTuple):
    """Why a stage did nothing before an operation. ``source`` makes its input; ``blocked`` is as in ``Waits``."""

    op: Op
    start: float
    seconds: float
    cause: Cause
    source: Op | None
    blocked: Op | None


def waits_of(trace: Trace) -> list[Waits]:
    """The waits of every stage."""
    return [_waits(trace, number) for number in range(len(trace.stages))]


def worst_waits(trace: Trace, count: int) -> list[Wait]:
    """The longest waits before an operation, over all stages, longest first."""
    found = []
    for number, waits in enumerate(waits_of(trace)):
        ops, causes = trace.stages[number].ops, waits.cause()
        order = np.lexsort((ops.microbatch[waits.op], ops.kind[waits.op], waits.start, -waits.seconds))[:count]
        for at in order.tolist():
            op, blocked = op_at(trace, number, int(waits.op[at])), int(waits.blocked[at])
            times, source = (float(waits.start[at]), float(waits.seconds[at])), source_of(op, len(trace.stages))
            blocked_op = op_at(trace, number, blocked) if blocked >= 0 else None
            found.append(Wait(op, *times, CAUSES[causes[at]], source, blocked_op))
    return sorted(found, key=lambda wait: (-wait.seconds, wait.start, wait.op))[:count]


def wait_shares(trace: Trace, stage: int, waits: Waits, window: int) -> dict[str, float]:
    """Shares of the whole time in which a stage had no input, or had one and lacked its weights or a place in its
    window. In the rest of its idle time it did bookkeeping or had nothing left to do."""
    time = trace.end - trace.begin
    if time <= 0:
        return {"input": 0.0, "weights": 0.0, "window": 0.0}
    is_blocked = waits.blocked >= 0
    is_forward = is_blocked & (trace.stages[stage].ops.kind[waits.blocked] == F)
    # The window is full where all places are taken but the last, which is kept for the oldest micro-batch.
    is_full = is_forward & (waits.in_flight >= window - 1)
    return {
        "input": float(waits.arrived[~is_blocked].sum()) / time,
        "weights": (float(waits.arrived[is_blocked & ~is_full].sum()) + waits.for_updates) / time,
        "window": float(waits.arrived[is_full].sum()) / time,
    }


def op_at(trace: Trace, stage: int, place: int) -> Op:
    """The name of an operation."""
    ops = trace.stages[stage].ops
    return Op(stage, chr(ops.kind[place]), int(ops.microbatch[place]))  # type: ignore[arg-type]


def source_of(op: Op, stages: int) -> Op | None:
    """The operation that makes the input of another; None for what the first stage makes itself."""
    if op.kind == "F":
        return Op(op.stage - 1, "F", op.microbatch) if op.stage else None
    return Op(op.stage, "F", op.microbatch) if op.stage == stages - 1 else Op(op.stage + 1, "B", op.microbatch)


def arrivals(trace: Trace, stage: int) -> tuple[Numbers, Numbers]:
    """When the inputs of a stage's operations were made and when they arrived.

    Inputs of the first stage's forwards are there from the start; unknown times are NaN.
    """
    ops, received = trace.stages[stage].ops, trace.stages[stage].received
    made, arrived = np.full(len(ops), np.nan), np.full(len(ops), np.nan)
    for kind in (F, B):
        own = ops.kind == kind
        source = source_of(Op(stage, chr(kind), 0), len(trace.stages))  # type: ignore[arg-type]
        if source is None:
            made[own] = arrived[own] = -np.inf
            continue
        makers, n = trace.stages[source.stage].ops, ops.microbatch[own]
        ends = _last_values(makers.microbatch, makers.end, makers.kind == ord(source.kind), n)
        came = _last_values(received["microbatch"], received["time"], received["kind"] == kind, n)
        came = np.where(np.isnan(came), ends, came)
        arrived[own], made[own] = came, np.fmin(ends, came)
    return made, arrived


def summary(trace: Trace, worst: int = 10) -> dict[str, Any]:
    """What ``weft trace`` prints, in the types of JSON: seconds, and shares of the time from the first op to the last.

    ``bubble`` and ``steady_bubble`` are those of the simulator, except that updates count as work.
    """
    return {
        "start": trace.head.start,
        "cut": list(trace.head.cut),
        "time": trace.end - trace.begin,
        "bubble": bubble(trace),
        "steady_bubble": steady_bubble(trace),
        "stages": [_stage(trace, number) for number in range(len(trace.stages))],
        "waits": [_wait(wait, trace.begin) for wait in worst_waits(trace, worst)],
        "simulated": simulation_error(trace),
    }


def simulation_error(trace: Trace) -> dict[str, Any] | None:
    """What was simulated; None where nothing was.

    A simulation covers the first ``steps`` of a start alone. ``real_time`` is what the same operations took, and
    ``error`` compares the two times as a share of the real one. The simulator has costs that were measured before the
    training, one layer after the other: where stages share cores, real operations take longer.
    """
    if not trace.simulated:
        return None
    simulation = replace(trace, stages=trace.simulated, simulated=())
    real_end, simulated_end = trace.begin, simulation.begin
    for real, simulated in zip(trace.stages, simulation.stages, strict=True):
        names = [own.ops.microbatch * 256 + own.ops.kind for own in (real, simulated)]
        real_end = max([real_end, *real.ops.end[np.isin(names[0], names[1])].tolist()])
        simulated_end = max([simulated_end, *simulated.ops.end[np.isin(names[1], names[0])].tolist()])
    took, expected = real_end - trace.begin, simulated_end - simulation.begin
    return {
        "steps": len(np.unique(np.concatenate([own.ops.microbatch for own in simulation.stages])))
        // trace.head.microbatches,
        "time": simulation.end - simulation.begin,
        "real_time": took,
        "bubble": bubble(simulation),
        "steady_bubble": steady_bubble(simulation),
        "error": expected / took - 1.0 if took else None,
    }


def _last_values(keys: Numbers, values: Numbers, among: Numbers, wanted: Numbers) -> Numbers:
    """For each wanted key the last value that it has, or NaN."""
    keys, values = keys[among], values[among]
    if not len(keys):
        return np.full(len(wanted), np.nan)
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    at = np.searchsorted(keys, wanted, side="right") - 1
    return np.where((at >= 0) & (keys[at] == wanted), values[at], np.nan)


def _waits(trace: Trace, stage: int) -> Waits:
    idle, (made, arrived) = gaps(trace, stage), arrivals(trace, stage)
    for_updates = float((idle.end - idle.start)[idle.op == AN_UPDATE].sum())
    begin, until, op = (part[idle.op >= 0] for part in idle)

    def seconds_until(times: Numbers) -> Numbers:
        since = np.where(np.isnan(times[op]), until, times[op])
        return np.asarray(np.clip(since, begin, until) - begin)

    parts = seconds_until(made), seconds_until(arrived)
    blocked, in_flight = _blocked(op, begin, arrived), _in_flight(trace.stages[stage], op)
    return Waits(op, begin, until - begin, *parts, blocked, for_updates, in_flight)


def _blocked(op: Numbers, begin: Numbers, arrived: Numbers) -> Numbers:
    """For each wait the next operation of the stage whose input was there from its beginning on, or -1."""
    known = np.append(np.where(np.isnan(arrived), np.inf, arrived), np.inf)
    # The earliest arrival of this operation or any later one says whether to look at all.
    earliest = np.minimum.accumulate(known[::-1])[::-1]
    found = np.full(len(op), -1)
    place = op + 1
    left = np.flatnonzero(earliest[place] <= begin)
    for _ in range(LOOKAHEAD):
        if not len(left):
            break
        is_it = known[place[left]] <= begin[left]
        found[left[is_it]] = place[left[is_it]]
        left = left[~is_it]
        place[left] += 1
    return found


def _in_flight(stage: StageTrace, op: Numbers) -> Numbers:
    """Micro-batches in flight when the operation before each of these was over."""
    before = np.maximum(op - 1, 0)
    found: Numbers = np.where(op > 0, stage.ops.in_flight[before] - (stage.ops.kind[before] == B), 0)
    return found


def _idle_share(trace: Trace, begin: float, end: float) -> float:
    if end <= begin:
        return 0.0
    worked = sum(busy_seconds(busy(stage), begin, end) for stage in trace.stages)
    return 1.0 - worked / (len(trace.stages) * (end - begin))


def _stage(trace: Trace, number: int) -> dict[str, Any]:
    stage, time = trace.stages[number], trace.end - trace.begin
    worked, ops = busy_seconds(busy(stage), trace.begin, trace.end), len(stage.ops)
    idle = gaps(trace, number)
    waits = (idle.end - idle.start)[idle.op >= 0].tolist()
    return {
        "stage": number,
        "busy": worked,
        "idle": sum((idle.end - idle.start).tolist()),
        "busy_share": worked / time if time else 0.0,
        "ops": ops,
        "ops_per_second": ops / time if time else 0.0,
        "peak_in_flight": int(stage.ops.in_flight.max()) if ops else 0,
        "mean_wait": sum(waits) / ops if ops else 0.0,
        "worst_wait": max(waits, default=0.0),
        "updates": len(stage.updates["start"]),
        "bytes_sent": int(stage.sent["bytes"].sum()),
        "version_lag": _version_lag(stage),
    }


def _version_lag(stage: StageTrace) -> dict[str, int]:
    """How many backwards were by how many updates ahead of their forwards; empty where none may be."""
    known = stage.ops.backward >= 0
    lags, counts = np.unique((stage.ops.backward - stage.ops.forward)[known], return_counts=True)
    return {str(lag): count for lag, count in zip(lags.tolist(), counts.tolist(), strict=True)}


def _wait(wait: Wait, begin: float) -> dict[str, Any]:
    names = {"source": wait.source and str(wait.source), "blocked": wait.blocked and str(wait.blocked)}
    times = {"start": wait.start - begin, "seconds": wait.seconds, "cause": wait.cause}
    return {"stage": wait.op.stage, **times, "op": str(wait.op), **names}
