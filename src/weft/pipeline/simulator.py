"""The simulator: discrete events that step the very schedulers that the runtime steps, at any number of stages.

All that happens at one moment is known before any stage chooses. A message occupies its link for bytes / bandwidth, one
after the other, and arrives a latency later; activations and gradients have links of their own:

    stage 0   F0 F1 ...            split backward:   stage 1   ... [ B0 input | B0 weights ]
    link        [m0][m1]                             link                   [m0]
    stage 1       .. F0 F1                           stage 0                    [ B0 input | B0 weights ]
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.errors import ConsistencyError
from weft.pipeline.scheduler import Op, SchedulePolicy, Scheduler
from weft.pipeline.workload import Workload
from weft.supernet.partition import Cut
from weft.utils.rng import generator

Duration = Callable[[Op, float], float]
"""The time that an operation takes, from its nominal time on its stage: jitter, for example."""

MOMENT = 1e-9
"""Times that differ by no more than this share are one moment: sums of the same costs round differently."""


@dataclass(frozen=True, slots=True)
class Span:
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Simulated:
    """What a simulated run was like; times are in the unit of the costs."""

    stages: int
    steps: int
    time: float
    work: float
    """What all operations together take on one device of speed 1."""
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
        """Over one device of speed 1 that does the same work without waiting."""
        return self.work / self.time if self.time else 1.0

    @property
    def throughput(self) -> float:
        """Steps per unit of time."""
        return self.steps / self.time if self.time else 0.0


def simulate(
    work: Workload,
    cut: Cut,
    policy: SchedulePolicy | list[SchedulePolicy],
    latency: float = 0.0,
    duration: Duration | None = None,
    keep_spans: bool = True,
    *,
    bandwidth: float | None = None,
    speeds: Sequence[float] | None = None,
    split: float | None = None,
) -> Simulated:
    """Runs the workload on the stages of a cut. ``policy`` holds for all stages, or is a list of one for each.

    ``latency`` is the time that a message takes from one stage to another beside its bytes / ``bandwidth``. A stage of
    speed 0.5 takes twice as long. With ``split`` the backward finds the gradient of its input in that share of its
    time, sends it, and goes on with those of its weights; it is over, and its updates count, at the end as ever.
    """
    if latency < 0:
        raise ConsistencyError(f"latency={latency}: a message cannot arrive before it is sent")
    stages = len(cut) + 1
    policies = policy if isinstance(policy, list) else [policy] * stages
    stage_speed = [1.0] * stages if speeds is None else list(speeds)
    early = 1.0 if split is None else split
    if len(stage_speed) != stages or min(stage_speed) <= 0:
        raise ConsistencyError(f"speeds={stage_speed}: {stages} stages need {stages} speeds, each more than 0")
    if not 0 < early <= 1:
        raise ConsistencyError(f"split={split}: the input gradient is a share of the backward, above 0 and at most 1")
    transfers = work.transfers(cut, bandwidth)
    schedulers = [
        Scheduler(
            s,
            stages,
            work.dependencies_of(cut, s),
            work.total,
            policies[s],
            counters=work.counters(cut, s, policies[s].max_in_flight),
        )
        for s in range(stages)
    ]
    nominal: dict[int, list[tuple[float, float]]] = {}
    left: dict[int, int] = {}
    events: list[tuple[float, int, bool, Op]] = []  # (time, order, whether the operation ends or its input arrives, op)
    order = 0
    idle = [True] * stages
    free: dict[tuple[int, int], float] = {}  # when the link from one stage to another has sent all that it was given
    busy = [0.0] * stages
    peak = [0] * stages
    spans: list[Span] = []
    now = 0.0

    def start(stage: int) -> None:
        nonlocal order
        op = schedulers[stage].next()
        if op is None:
            return
        if op.microbatch not in nominal:
            nominal[op.microbatch] = work.stage_costs(cut, op.microbatch)
            left[op.microbatch] = 2 * stages
        time = nominal[op.microbatch][stage][op.kind == "B"] / stage_speed[stage]
        left[op.microbatch] -= 1
        if not left[op.microbatch]:
            del nominal[op.microbatch], left[op.microbatch]
        if duration is not None:
            time = duration(op, time)
        idle[stage] = False
        busy[stage] += time
        peak[stage] = max(peak[stage], len(schedulers[stage].in_flight))
        spans.append(Span(op, now, now + time))
        order += 2
        heapq.heappush(events, (now + time, order, True, op))
        to = stage + 1 if op.kind == "F" else stage - 1
        if 0 <= to < stages:
            arrives = now + (early * time if op.kind == "B" else time)
            # A stage's messages leave in the order of its operations, so the link's queue is known here.
            free[stage, to] = max(free.get((stage, to), 0.0), arrives) + transfers[min(stage, to)]
            heapq.heappush(events, (free[stage, to] + latency, order + 1, False, Op(to, op.kind, op.microbatch)))

    for stage in range(stages):
        start(stage)
    while events:
        moment = events[0][0] * (1 + MOMENT)
        touched = set()
        while events and events[0][0] <= moment:
            now, _, ended, op = heapq.heappop(events)
            if ended:
                schedulers[op.stage].complete_op(op)
                idle[op.stage] = True
            else:
                schedulers[op.stage].arrived(op.kind, op.microbatch)
            touched.add(op.stage)
        for stage in sorted(touched):
            if idle[stage]:
                start(stage)
    if not all(scheduler.done for scheduler in schedulers):
        stuck = next(scheduler for scheduler in schedulers if not scheduler.done)
        raise ConsistencyError(
            f"the schedule cannot go on: stage {stuck.stage} has finished {stuck.finished_count} of {work.total}"
        )
    steady = _steady_idle(spans, stages)
    done = sum(time * speed for time, speed in zip(busy, stage_speed, strict=True))
    kept = tuple(spans) if keep_spans else ()
    return Simulated(stages, work.steps, now, done, tuple(busy), tuple(peak), steady, kept)


def with_messages(cut: Cut, seconds: Sequence[float]) -> Duration:
    """Operations that also take the time of their messages: ``seconds`` has what one costs before every block, to the
    stage that sends it and to the one that takes it."""
    borders = [0.0, *(seconds[block] for block in cut), 0.0]

    def duration(op: Op, time: float) -> float:
        return time + borders[op.stage] + borders[op.stage + 1]

    return duration


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
