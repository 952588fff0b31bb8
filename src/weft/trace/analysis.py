"""Waits: when the ranks of a trace did nothing, and what for, by columns for millions of operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from weft.pipeline.scheduler import Op
from weft.trace.reader import Numbers, StageTrace, Trace

F, B, W, E = (ord(letter) for letter in "FBWE")

Cause = Literal["op", "message", "version or window"]
CAUSES: tuple[Cause, ...] = ("op", "message", "version or window")
"""What took the most of a wait.

``op``: the operation whose outcome is the input was not over. ``message``: it was, but the input was under way.
``version or window``: the input was there, but the right weights, a free place or the stage's attention were not.
"""

FAR = 4096
"""How many operations ahead one is looked for that was held; a window is not that wide."""

AN_UPDATE, THE_END = -1, -2


class Gaps(NamedTuple):
    """Times in which some stages, taken as one, did nothing. What ended each is the operation of a stage at this place,
    or in place of it ``AN_UPDATE`` or ``THE_END`` of the trace."""

    start: Numbers
    end: Numbers
    stage: Numbers
    op: Numbers


@dataclass(frozen=True, eq=False)
class Waits:
    """The waits of one rank that an operation ended. ``stage`` and ``op`` name it by its place; of the time before its
    input was there, ``made`` is what went by until that was made."""

    stage: Numbers
    op: Numbers
    start: Numbers
    seconds: Numbers
    made: Numbers
    arrived: Numbers
    held: Numbers
    """The place of an operation whose input lay there all the time, but which lacked a version or a place in the
    window; -1 where there is none."""
    for_updates: float
    """Seconds of waits that an update ended."""
    in_flight: Numbers
    """Micro-batches in flight on the stage during the wait."""

    def cause(self) -> Numbers:
        """For each wait the place in ``CAUSES`` of what took the most of it."""
        parts = np.stack([self.made, self.arrived - self.made, self.seconds - self.arrived])
        found: Numbers = np.argmax(parts, axis=0) if len(self.seconds) else np.zeros(0, dtype=int)
        return found


class Wait(NamedTuple):
    """Why a rank did nothing before an operation. ``source`` makes its input; ``held`` is as in ``Waits``."""

    op: Op
    start: float
    seconds: float
    cause: Cause
    source: Op | None
    held: Op | None


def gaps(trace: Trace, stages: Sequence[int]) -> Gaps:
    """When some stages, taken as one, did nothing from the beginning of the trace to its end."""
    rows: list[tuple[Numbers, Numbers, Numbers, Numbers]] = []
    for number in stages:
        ops, updates = trace.stages[number].ops, trace.stages[number].updates
        rows.append((ops.start, ops.end, np.full(len(ops), number), np.arange(len(ops))))
        count = len(updates["start"])
        rows.append((updates["start"], updates["end"], np.full(count, number), np.full(count, AN_UPDATE)))
    start, end, stage, place = (np.concatenate(part) for part in zip(*rows, strict=True))
    order = np.lexsort((end, start))
    start, stage, place = (
        np.append(part[order], last) for part, last in ((start, trace.end), (stage, -1), (place, THE_END))
    )
    before = np.maximum.accumulate(np.concatenate([[trace.begin], end[order]]))
    idle = start > before
    return Gaps(before[idle], start[idle], stage[idle], place[idle])


def waits_of(trace: Trace) -> dict[int, Waits]:
    """The waits of every rank."""
    known = [arrivals(trace, number) for number in range(len(trace.stages))]
    return {rank: _waits(trace, stages, known) for rank, stages in trace.by_rank.items()}


def worst_waits(trace: Trace, count: int) -> list[Wait]:
    """The longest waits before an operation, over all ranks, longest first."""
    found = []
    for waits in waits_of(trace).values():
        kinds = np.zeros(len(waits.op), dtype=int)
        numbers = np.zeros(len(waits.op), dtype=int)
        for stage in np.unique(waits.stage):
            own = waits.stage == stage
            kinds[own] = trace.stages[stage].ops.kind[waits.op[own]]
            numbers[own] = trace.stages[stage].ops.microbatch[waits.op[own]]
        order = np.lexsort((numbers, kinds, waits.stage, waits.start, -waits.seconds))[:count]
        causes = waits.cause()
        for at in order.tolist():
            op = op_at(trace, int(waits.stage[at]), int(waits.op[at]))
            held = int(waits.held[at])
            found.append(
                Wait(
                    op,
                    float(waits.start[at]),
                    float(waits.seconds[at]),
                    CAUSES[causes[at]],
                    source_of(op, len(trace.stages)),
                    op_at(trace, op.stage, held) if held >= 0 else None,
                )
            )
    return sorted(found, key=lambda wait: (-wait.seconds, wait.start, wait.op))[:count]


def wait_shares(waits: Waits, trace: Trace, windows: Sequence[int]) -> dict[str, float]:
    """Shares of the whole time: without any input, and with one that lay there, but lacked its weights or a place in
    the window of its stage. What a rank was idle besides went by in its own bookkeeping, or nothing was left to do."""
    time = trace.end - trace.begin
    if time <= 0:
        return {"input": 0.0, "weights": 0.0, "window": 0.0}
    is_held = waits.held >= 0
    kinds = np.zeros(len(waits.held), dtype=np.uint8)
    for stage in np.unique(waits.stage):
        own = is_held & (waits.stage == stage)
        kinds[own] = trace.stages[stage].ops.kind[waits.held[own]]
    # A place in the window is lacking where all but the last, which is kept for the oldest, are taken.
    is_full = is_held & (kinds == F) & (waits.in_flight >= np.array(windows)[waits.stage] - 1)
    return {
        "input": float(waits.arrived[~is_held].sum()) / time,
        "weights": (float(waits.arrived[is_held & ~is_full].sum()) + waits.for_updates) / time,
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

    The first stage's own were always there, and what is not known is NaN.
    """
    ops, received = trace.stages[stage].ops, trace.stages[stage].received
    made, arrived = np.full(len(ops), np.nan), np.full(len(ops), np.nan)
    for kind in (F, B, W, E):
        own = ops.kind == kind
        if not own.any():
            continue
        source = source_of(Op(stage, chr(kind), 0), len(trace.stages))  # type: ignore[arg-type]
        if source is None:
            made[own] = arrived[own] = -np.inf
            continue
        makers, n = trace.stages[source.stage].ops, ops.microbatch[own]
        ends = _looked_up(makers.microbatch, makers.end, makers.kind == ord(source.kind), n)
        came = _looked_up(received["microbatch"], received["time"], received["kind"] == kind, n)
        came = np.where(np.isnan(came), ends, came)
        arrived[own], made[own] = came, np.fmin(ends, came)
    return made, arrived


def _looked_up(keys: Numbers, values: Numbers, among: Numbers, wanted: Numbers) -> Numbers:
    """For each wanted key the last value that it has, or NaN."""
    keys, values = keys[among], values[among]
    if not len(keys):
        return np.full(len(wanted), np.nan)
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    at = np.searchsorted(keys, wanted, side="right") - 1
    return np.where((at >= 0) & (keys[at] == wanted), values[at], np.nan)


def _waits(trace: Trace, stages: Sequence[int], known: Sequence[tuple[Numbers, Numbers]]) -> Waits:
    idle = gaps(trace, stages)
    for_updates = float((idle.end - idle.start)[idle.op == AN_UPDATE].sum())
    begin, until, stage_of, op = (part[idle.op >= 0] for part in idle)
    made, arrived = np.empty(len(op)), np.empty(len(op))
    held, in_flight = np.full(len(op), -1), np.zeros(len(op), dtype=int)
    for number in stages:
        mine = stage_of == number
        at, (was_made, came) = op[mine], known[number]
        for into, times in ((made, was_made), (arrived, came)):
            since = np.where(np.isnan(times[at]), until[mine], times[at])
            into[mine] = np.clip(since, begin[mine], until[mine]) - begin[mine]
        held[mine] = _held(at, begin[mine], came)
        in_flight[mine] = _in_flight(trace.stages[number], at)
    return Waits(stage_of, op, begin, until - begin, made, arrived, held, for_updates, in_flight)


def _held(op: Numbers, begin: Numbers, arrived: Numbers) -> Numbers:
    """For each wait the next operation of the stage whose input lay there from its beginning on, or -1."""
    known = np.append(np.where(np.isnan(arrived), np.inf, arrived), np.inf)
    # The earliest arrival of this operation or any later one says whether to look at all.
    earliest = np.minimum.accumulate(known[::-1])[::-1]
    found = np.full(len(op), -1)
    place = op + 1
    left = np.flatnonzero(earliest[place] <= begin)
    for _ in range(FAR):
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
    is_over = np.isin(stage.ops.kind[before], (B, W))
    found: Numbers = np.where(op > 0, stage.ops.in_flight[before] - is_over, 0)
    return found


# Utilisation: how busy the stages of a trace were, and what they waited for.


class Busy(NamedTuple):
    """When some stages, taken as one, worked: disjoint intervals in order."""

    start: Numbers
    end: Numbers


def busy(*stages: StageTrace) -> Busy:
    """When any of these stages worked: operations and updates."""
    start = np.concatenate([part for own in stages for part in (own.ops.start, own.updates["start"])])
    end = np.concatenate([part for own in stages for part in (own.ops.end, own.updates["end"])])
    if not len(start):
        return Busy(start, end)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    is_first = np.concatenate([[True], start[1:] > end[:-1]])
    return Busy(start[is_first], end[np.append(is_first[1:], True)])


def busy_seconds(work: Busy, begin: float, end: float) -> float:
    """How much of the time between two moments was worked."""
    parts = np.minimum(work.end, end) - np.maximum(work.start, begin)
    return float(sum(np.maximum(parts, 0.0).tolist()))


def busy_share(work: Busy, begin: float, end: float) -> float:
    """The busy share of the time between two moments."""
    return busy_seconds(work, begin, end) / (end - begin) if end > begin else 0.0


def busy_shares(work: Busy, edges: Numbers) -> Numbers:
    """The busy share between each two edges.

    >>> busy_shares(Busy(np.array([0.0, 3.0]), np.array([1.0, 4.0])), np.array([0.0, 2.0, 4.0]))
    array([0.5, 0.5])
    """
    if not len(work.start):
        return np.zeros(len(edges) - 1)
    # What was worked up to each time is a line that rises by one a second while the stage works.
    times = np.column_stack(work).ravel()
    done = np.concatenate([[0.0], np.cumsum(work.end - work.start)])
    worked = np.interp(edges, times, np.column_stack([done[:-1], done[1:]]).ravel())
    width = np.diff(edges)
    found: Numbers = np.divide(np.diff(worked), width, out=np.zeros(len(width)), where=width > 0).clip(0.0, 1.0)
    return found


def idle_shares(trace: Trace, stage: int, every: int = 50) -> list[tuple[float, float]]:
    """The idle share of a stage over each ``every`` operations, with the time from which it holds."""
    own = trace.stages[stage]
    edges = np.concatenate([[trace.begin], own.ops.end[every - 1 : -1 : every], [trace.end]])
    idle = 1.0 - busy_shares(busy(own), edges)
    return [(at, share) for at, to, share in zip(edges[:-1], edges[1:], idle.tolist(), strict=True) if to > at]


def bubble(trace: Trace) -> float:
    """The share of all ranks' time that is idle, filling and draining included."""
    return _idle_share(trace, trace.begin, trace.end)


def steady_bubble(trace: Trace) -> float:
    """The idle share from the moment that the last stage first works until the first has no forward left."""
    last, first = trace.stages[-1].ops, trace.stages[0].ops
    begin = float(last.start.min()) if len(last) else 0.0
    forwards = first.start[first.kind == F]
    return _idle_share(trace, begin, float(forwards.max()) if len(forwards) else 0.0)


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
        "simulated": _against(trace),
    }


def _idle_share(trace: Trace, begin: float, end: float) -> float:
    if end <= begin:
        return 0.0
    ranks = [busy(*(trace.stages[stage] for stage in stages)) for stages in trace.by_rank.values()]
    return 1.0 - sum(busy_seconds(work, begin, end) for work in ranks) / (len(ranks) * (end - begin))


def _stage(trace: Trace, number: int) -> dict[str, Any]:
    stage, time = trace.stages[number], trace.end - trace.begin
    worked, ops = busy_seconds(busy(stage), trace.begin, trace.end), len(stage.ops)
    idle = gaps(trace, [number])
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
        "drift": _drift(stage),
    }


def _drift(stage: StageTrace) -> dict[str, int]:
    """How many backwards were by how many updates ahead of their forwards; empty where none may be."""
    told = stage.ops.backward >= 0
    drifts, counts = np.unique((stage.ops.backward - stage.ops.forward)[told], return_counts=True)
    return {str(drift): count for drift, count in zip(drifts.tolist(), counts.tolist(), strict=True)}


def _wait(wait: Wait, begin: float) -> dict[str, Any]:
    names = {"op": str(wait.op), "source": wait.source and str(wait.source), "held": wait.held and str(wait.held)}
    return {"stage": wait.op.stage, "start": wait.start - begin, "seconds": wait.seconds, "cause": wait.cause, **names}


def _against(trace: Trace) -> dict[str, float | None] | None:
    """What was foreseen, and its error in the time of the operations that both hold, as a share of the real one."""
    if not trace.simulated:
        return None
    foreseen = replace(trace, stages=trace.simulated, simulated=())
    real_end, simulated_end = trace.begin, foreseen.begin
    for real, simulated in zip(trace.stages, foreseen.stages, strict=True):
        names = [own.ops.microbatch * 256 + own.ops.kind for own in (real, simulated)]
        both = [np.isin(names[0], names[1]), np.isin(names[1], names[0])]
        real_end = max(real_end, *real.ops.end[both[0]].tolist())
        simulated_end = max(simulated_end, *simulated.ops.end[both[1]].tolist())
    took, said = real_end - trace.begin, simulated_end - foreseen.begin
    return {
        "time": foreseen.end - foreseen.begin,
        "bubble": bubble(foreseen),
        "steady_bubble": steady_bubble(foreseen),
        "error": said / took - 1.0 if took else None,
    }
