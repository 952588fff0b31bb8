"""Utilisation: how busy the stages of a trace were, and what they waited for."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from typing import Any

from weft.pipeline.trace import StageTrace, Trace
from weft.pipeline.waits import Wait, gaps, worst_waits

Interval = tuple[float, float]


def summary(trace: Trace, worst: int = 10) -> dict[str, Any]:
    """What ``weft trace`` tells, in the types of JSON: seconds, and shares of the time from the first op to the last.

    ``bubble`` and ``steady_bubble`` are those of the simulator, except that updates count as work.
    """
    begin, end = trace.begin, trace.end
    return {
        "start": trace.start,
        "cut": list(trace.cut),
        "time": end - begin,
        "bubble": bubble(trace),
        "steady_bubble": steady_bubble(trace),
        "stages": [_stage(stage, begin, end) for stage in trace.stages],
        "waits": [_wait(wait, begin) for wait in worst_waits(trace, worst)],
        "simulated": _against(trace),
    }


def busy(stage: StageTrace) -> list[Interval]:
    """When a stage computed, as disjoint intervals in order."""
    found: list[Interval] = []
    for start, end in sorted(stage.intervals()):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def idle_shares(stage: StageTrace, begin: float, end: float, every: int = 50) -> list[tuple[float, float]]:
    """The idle share over each ``every`` operations, with the time from which it holds."""
    edges = [begin, *(span.end for span in stage.spans[every - 1 : -1 : every])]
    idle = [0.0] * len(edges)
    for gap in gaps(stage, begin, end):
        idle[bisect_right(edges, gap.start) - 1] += gap.end - gap.start
    ends = [*edges[1:], end]
    return [(at, time / (to - at)) for at, to, time in zip(edges, ends, idle, strict=True) if to > at]


def bubble(trace: Trace) -> float:
    """The share of all ranks' time that is idle, filling and draining included."""
    return _idle(trace, trace.begin, trace.end)


def steady_bubble(trace: Trace) -> float:
    """The idle share from the moment that the last stage first works until the first has no forward left."""
    first = min((span.start for span in trace.stages[-1].spans), default=0.0)
    last = max((span.start for span in trace.stages[0].spans if span.op.kind == "F"), default=0.0)
    return _idle(trace, first, last)


def foreseen(trace: Trace) -> Trace | None:
    """The simulation that a trace holds, as a trace of its own; None where it holds none."""
    if not trace.simulated:
        return None
    stages = (tuple(span for span in trace.simulated if span.op.stage == stage.stage) for stage in trace.stages)
    return replace(trace, stages=tuple(StageTrace(stage, spans) for stage, spans in enumerate(stages)), simulated=())


def _idle(trace: Trace, begin: float, end: float) -> float:
    if end <= begin:
        return 0.0
    ranks = trace.by_rank()
    work = (interval for rank in ranks for interval in busy(rank))
    worked = sum(max(0.0, min(to, end) - max(start, begin)) for start, to in work)
    return 1.0 - worked / (len(ranks) * (end - begin))


def _stage(stage: StageTrace, begin: float, end: float) -> dict[str, Any]:
    time, ops = end - begin, len(stage.spans)
    worked = sum(to - start for start, to in busy(stage))
    idle = gaps(stage, begin, end)
    waits = [gap.end - gap.start for gap in idle if gap.op is not None]
    return {
        "stage": stage.stage,
        "busy": worked,
        "idle": sum(gap.end - gap.start for gap in idle),
        "busy_share": worked / time if time else 0.0,
        "ops": ops,
        "ops_per_second": ops / time if time else 0.0,
        "peak_in_flight": max(stage.in_flight, default=0),
        "mean_wait": sum(waits) / ops if ops else 0.0,
        "worst_wait": max(waits, default=0.0),
        "updates": len(stage.updates),
        "bytes_sent": sum(message.bytes for message in stage.sent),
        "drift": _drift(stage),
    }


def _drift(stage: StageTrace) -> dict[str, int]:
    """How many backwards were by how many updates ahead of their forwards; empty where none may be."""
    counts = Counter(seen.drift for seen in stage.versions if seen is not None and seen.drift is not None)
    return {str(drift): counts[drift] for drift in sorted(counts)}


def _wait(wait: Wait, begin: float) -> dict[str, Any]:
    names = {"op": str(wait.op), "source": wait.source and str(wait.source), "held": wait.held and str(wait.held)}
    return {"stage": wait.op.stage, "start": wait.start - begin, "seconds": wait.seconds, "cause": wait.cause, **names}


def _against(trace: Trace) -> dict[str, float | None] | None:
    """What was foreseen, and its error in the time of the operations that both hold, as a share of the real one."""
    simulated = foreseen(trace)
    if simulated is None:
        return None
    real = {span.op: span.end for stage in trace.stages for span in stage.spans}
    common = [span for span in trace.simulated if span.op in real]
    took = max((real[span.op] for span in common), default=trace.begin) - trace.begin
    said = max((span.end for span in common), default=simulated.begin) - simulated.begin
    return {
        "time": simulated.end - simulated.begin,
        "bubble": bubble(simulated),
        "steady_bubble": steady_bubble(simulated),
        "error": said / took - 1.0 if took else None,
    }
