"""Runs with traces for tests: simulations, written as stages write what they do."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from traceoracle import Message, StageTrace, Trace, Update

from weft.engine.consistency import parse_consistency
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.simulator import Duration, Simulated, Span, simulate
from weft.pipeline.workload import Workload
from weft.supernet.partition import best_cut
from weft.trace.recorder import TraceRecorder

EPOCH = 2.0**31
"""Later than any start line of today; whole and half seconds after it are exact in floats."""


def simulated(
    stages: int,
    steps: int,
    m: int = 1,
    consistency: str = "exact",
    latency: float = 0.0,
    duration: Duration | None = None,
    choices: int = 1,
    window: int | None = None,
) -> Simulated:
    """A chain of one block a stage; step i uses choice i % choices of each."""

    def uses(n: int) -> list[tuple[int, Hashable]]:
        return [(block, (block, (n // m) % choices)) for block in range(stages)]

    work = Workload(stages, m, steps, uses, lambda layer: parse_consistency(consistency))
    rule = SchedulePolicy(window or 2 * stages * m)
    return simulate(work, best_cut([1.0] * stages, stages), rule, latency, duration)


def flying(spans: Sequence[Span], at: Span) -> int:
    """Micro-batches in flight on the stage of a span when it starts, from the spans alone."""
    own = [span for span in spans if span.op.stage == at.op.stage]
    begun = {span.op.microbatch for span in own if span.op.kind == "F" and span.start <= at.start}
    over = {span.op.microbatch for span in own if span.op.kind == "B" and span.end <= at.start}
    return len(begun - over)


def traced(
    result: Simulated,
    latency: float = 0.0,
    m: int = 1,
    since: float = 0.0,
    updates: float | None = None,
    first: int = 0,
) -> Trace:
    """The trace of a run that went just as the simulation did, from micro-batch ``first`` on; every backward is
    followed by an update of two layers that takes so long, if any."""
    stages = []
    for stage in range(result.stages):
        spans = sorted((span for span in result.spans if span.op.stage == stage), key=lambda span: span.start)
        sent, received, changed = [], [], []
        for span in result.spans:
            kind, n = span.op.kind, first + span.op.microbatch
            to = span.op.stage + (1 if kind == "F" else -1)
            if span.op.stage == stage and 0 <= to < result.stages:
                sent.append(Message(kind, n, since + span.end, 100 + n))
            if to == stage:
                received.append(Message(kind, n, since + span.end + latency))
            if updates is not None and span.op.stage == stage and kind == "B":
                changed.append(Update(2, len(changed) + 1, since + span.end, since + span.end + updates))
        moved = tuple(
            Span(span.op._replace(microbatch=first + span.op.microbatch), since + span.start, since + span.end)
            for span in spans
        )
        counts = tuple(flying(result.spans, span) for span in spans)
        stages.append(StageTrace(stage, moved, counts, tuple(sent), tuple(received), tuple(changed)))
    return Trace(0, tuple(stages), (), m)


def write_trace(trace: Trace, folder: Path, restart: int = 0, simulated: Sequence[Span] | None = None) -> None:
    """Has a recorder for every stage write the trace."""
    for stage in trace.stages:
        tracer = TraceRecorder(folder / "traces" / f"stage{stage.stage}.jsonl", stage.stage)
        expected = simulated if stage.stage == 0 else None
        tracer.start(restart, len(trace.stages), trace.cut, trace.microbatches, expected)
        versions = stage.versions or (None,) * len(stage.spans)
        for index, (span, in_flight, seen) in enumerate(zip(stage.spans, stage.in_flight, versions, strict=True)):
            known = () if seen is None else [version for version in seen if version is not None]
            tracer.op(span.op, span.start, span.end, in_flight, known)
            if index % 7 == 0:
                tracer.flush()
        for message in stage.sent:
            tracer.sent(*message)
        for message in stage.received:
            tracer.received(message.kind, message.microbatch, message.time)
        for update in stage.updates:
            tracer.update(*update)
        tracer.close()


def write(
    run: Path,
    result: Simulated,
    m: int = 1,
    latency: float = 0.0,
    updates: float | None = None,
    expected: Sequence[Span] | None = None,
    first: int = 0,
) -> None:
    """The trace of a run that went just as the simulation did, on as many blocks as stages."""
    trace = traced(result, latency, m, EPOCH, updates or None, first)
    write_trace(replace(trace, cut=tuple(range(1, result.stages))), run, simulated=expected)


def write_events(run: Path, *events: dict[str, Any]) -> None:
    with open(run / "events.jsonl", "a") as file:
        file.writelines(json.dumps({"event": event["event"], "time": EPOCH, **event}) + "\n" for event in events)


def step(number: int, *subnets: str) -> dict[str, Any]:
    """The event of a step, with its keys in the order that runs have them in."""
    return {"event": "step", "time": EPOCH + number, "step": number, "loss": 1.0, "subnets": list(subnets)}
