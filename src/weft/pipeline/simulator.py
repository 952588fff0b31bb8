"""The simulator: discrete events that step the very schedulers that the runtime steps, at any number of stages."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.errors import ConsistencyError
from weft.keys import generator
from weft.pipeline.cut import Cut
from weft.pipeline.scheduler import Op, Rule, Scheduler
from weft.pipeline.workload import Workload

Duration = Callable[[Op, float], float]
"""The time that an operation takes, from its nominal time: jitter, slow stages."""


@dataclass(frozen=True, slots=True)
class Span:
    """One operation in time."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Simulated:
    """What a simulated run was like; times are in the unit of the costs."""

    stages: int
    steps: int
    time: float
    busy: tuple[float, ...]
    peak: tuple[int, ...]
    """The most micro-batches in flight on each stage: their activations are held there."""
    steady_bubble: float
    """The idle share from the moment that the last stage first works until the first stage has no forward left."""
    spans: tuple[Span, ...] = field(repr=False, default=())

    @property
    def bubble(self) -> float:
        """The share of all stages' time that is idle, filling and draining included."""
        return 1.0 - sum(self.busy) / (self.stages * self.time) if self.time else 0.0

    @property
    def speedup(self) -> float:
        """Over one device that does the same work without waiting."""
        return sum(self.busy) / self.time if self.time else 1.0

    @property
    def throughput(self) -> float:
        """Steps per unit of time."""
        return self.steps / self.time if self.time else 0.0


def simulate(
    work: Workload,
    cut: Cut,
    rule: Rule | list[Rule],
    latency: float = 0.0,
    duration: Duration | None = None,
    keep_spans: bool = True,
) -> Simulated:
    """Runs the workload on the stages of a cut. ``rule`` holds for all stages, or is a list of one for each.

    ``latency`` is the time that a message takes from one stage to the next.
    """
    stages = len(cut) + 1
    rules = rule if isinstance(rule, list) else [rule] * stages
    schedulers = [Scheduler(s, stages, work.uses(cut, s), work.total, rules[s]) for s in range(stages)]
    nominal: dict[int, list[tuple[float, float]]] = {}
    left: dict[int, int] = {}
    events: list[tuple[float, int, str, Op]] = []
    order = 0
    idle = [True] * stages
    busy = [0.0] * stages
    peak = [0] * stages
    spans: list[Span] = []
    now = 0.0

    def start(stage: int) -> None:
        nonlocal order
        if not idle[stage]:
            return
        op = schedulers[stage].next()
        if op is None:
            return
        if op.microbatch not in nominal:
            nominal[op.microbatch] = work.stage_costs(cut, op.microbatch)
            left[op.microbatch] = 2 * stages
        time = nominal[op.microbatch][stage][op.kind == "B"]
        left[op.microbatch] -= 1
        if not left[op.microbatch]:
            del nominal[op.microbatch], left[op.microbatch]
        if duration is not None:
            time = duration(op, time)
        idle[stage] = False
        busy[stage] += time
        peak[stage] = max(peak[stage], len(schedulers[stage].in_flight))
        spans.append(Span(op, now, now + time))
        order += 1
        heapq.heappush(events, (now + time, order, "end", op))

    for stage in range(stages):
        start(stage)
    while events:
        now, _, what, op = heapq.heappop(events)
        if what == "end":
            schedulers[op.stage].finished(op)
            idle[op.stage] = True
            step = 1 if op.kind == "F" else -1
            if 0 <= op.stage + step < stages:
                order += 1
                heapq.heappush(events, (now + latency, order, "message", Op(op.stage + step, op.kind, op.microbatch)))
        else:
            schedulers[op.stage].arrived(op.kind, op.microbatch)
        start(op.stage)
    if not all(scheduler.done for scheduler in schedulers):
        stuck = next(scheduler for scheduler in schedulers if not scheduler.done)
        raise ConsistencyError(
            f"the schedule cannot go on: stage {stuck.stage} has finished {stuck.finished_count} of {work.total}"
        )
    steady = _steady_idle(spans, stages)
    return Simulated(stages, work.steps, now, tuple(busy), tuple(peak), steady, tuple(spans) if keep_spans else ())


def jitter(seed: int, spread: float) -> Duration:
    """Operation times that vary: each is multiplied by a factor from 1 - spread to 1 + spread that belongs to the
    op."""
    rng = generator(seed, "jitter")
    factors = rng.uniform(1.0 - spread, 1.0 + spread, 1 << 14).tolist()

    def duration(op: Op, time: float) -> float:
        return time * float(factors[hash((op.microbatch, op.stage, op.kind == "B")) % len(factors)])

    return duration


def _steady_idle(spans: list[Span], stages: int) -> float:
    first = next((span.start for span in spans if span.op.stage == stages - 1), 0.0)
    last = max((span.start for span in spans if span.op.stage == 0 and span.op.kind == "F"), default=0.0)
    if last <= first:
        return 0.0
    worked = sum(max(0.0, min(span.end, last) - max(span.start, first)) for span in spans)
    return 1.0 - worked / (stages * (last - first))
