"""Waits: when the stages of a trace did nothing, and what for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from weft.pipeline.scheduler import Op
from weft.pipeline.trace import StageTrace, Trace

Cause = Literal["op", "message", "version or window"]


class Gap(NamedTuple):
    """Time in which a stage did nothing; ``op`` ended it, or None where an update or the end of the trace did."""

    start: float
    end: float
    op: Op | None


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a stage did nothing before an operation: the cause that took the most of this time.

    ``op``: the ``source``, whose outcome is the input, was not over. ``message``: it was, but the input was under way.
    ``version or window``: the input was there, but the right weights, a free place or the stage's attention were not.
    """

    op: Op
    start: float
    seconds: float
    cause: Cause
    source: Op | None
    held: Op | None
    """An operation whose input lay there all the time, but which lacked a version or a place in the window."""


def gaps(stage: StageTrace, begin: float, end: float) -> list[Gap]:
    """When a stage did nothing between two times that enclose all that it did."""
    work: list[tuple[float, float, Op | None]] = [(span.start, span.end, span.op) for span in stage.spans]
    work += [(update.start, update.end, None) for update in stage.updates]
    found = []
    for start, to, op in sorted(work, key=lambda item: item[:2]):
        if start > begin:
            found.append(Gap(begin, start, op))
        begin = max(begin, to)
    return [*found, Gap(begin, end, None)] if end > begin else found


def worst_waits(trace: Trace, count: int) -> list[Wait]:
    """The longest waits of a rank before an operation, over all ranks, longest first."""
    begin, end = trace.begin, trace.end
    found = [gap for rank in trace.by_rank() for gap in gaps(rank, begin, end) if gap.op is not None]
    found.sort(key=lambda gap: (gap.start - gap.end, gap.start, gap.op))
    arrivals = _Arrivals(trace)
    return [arrivals.explain(gap.op, gap) for gap in found[:count] if gap.op is not None]


class _Arrivals:
    """When the inputs of the operations of a trace were there."""

    def __init__(self, trace: Trace) -> None:
        self.stages = trace.stages
        self.last = len(trace.stages) - 1
        self.ends = {span.op: span.end for stage in trace.stages for span in stage.spans}
        self.received = {Op(s.stage, m.kind, m.microbatch): m.time for s in trace.stages for m in s.received}

    def source(self, op: Op) -> Op | None:
        """The operation that makes the input of another; None for the first."""
        if op.kind in ("F", "E"):
            return Op(op.stage - 1, op.kind, op.microbatch) if op.stage else None
        if op.kind == "W":
            return Op(op.stage, "B", op.microbatch)
        return Op(op.stage, "F", op.microbatch) if op.stage == self.last else Op(op.stage + 1, "B", op.microbatch)

    def times(self, op: Op, unknown: float) -> tuple[float, float]:
        """When the input was made and when it arrived; the first stage's own inputs were always there."""
        source = self.source(op)
        if source is None:
            return -float("inf"), -float("inf")
        arrived = self.received.get(op, self.ends.get(source, unknown))
        return min(self.ends.get(source, arrived), arrived), arrived

    def explain(self, op: Op, gap: Gap) -> Wait:
        made, arrived = (min(max(at, gap.start), gap.end) for at in self.times(op, gap.end))
        parts: dict[Cause, float] = {
            "op": made - gap.start,
            "message": arrived - made,
            "version or window": gap.end - arrived,
        }
        cause = max(parts, key=lambda part: parts[part])
        later = (span.op for span in self.stages[op.stage].spans if span.start >= gap.end and span.op != op)
        held = next((other for other in later if self.times(other, gap.end)[1] <= gap.start), None)
        return Wait(op, gap.start, gap.end - gap.start, cause, self.source(op), held)
