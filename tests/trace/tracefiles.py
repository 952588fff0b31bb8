"""Runs with traces for the tests of the dashboard: what a simulation says, written as stages write it."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

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


def write(
    run: Path,
    result: Simulated,
    m: int = 1,
    latency: float = 0.0,
    updates: float = 0.0,
    expected: Sequence[Span] | None = None,
    restart: int = 0,
    first: int = 0,
) -> None:
    """The trace of a run that went just as the simulation did, from micro-batch ``first`` on; every backward is
    followed by an update that takes so long, if any."""
    for stage in range(result.stages):
        tracer = TraceRecorder(run / "traces" / f"stage{stage}.jsonl", stage)
        known = expected if stage == 0 else None
        tracer.start(restart, result.stages, tuple(range(1, result.stages)), m, known)
        flying: set[int] = set()
        done = 0
        for span in sorted(result.spans, key=lambda span: (span.start, span.end)):
            kind, n = span.op.kind, span.op.microbatch
            to = span.op.stage + (1 if kind == "F" else -1)
            if to == stage and span.op.stage != stage:
                tracer.received(kind, first + n, EPOCH + span.end + latency)
            if span.op.stage != stage:
                continue
            flying |= {n}
            tracer.op(span.op._replace(microbatch=first + n), EPOCH + span.start, EPOCH + span.end, len(flying))
            if kind == "B":
                flying -= {n}
                if updates:
                    done += 1
                    tracer.update(1, done, EPOCH + span.end, EPOCH + span.end + updates)
        tracer.close()


def write_events(run: Path, *events: dict[str, Any]) -> None:
    with open(run / "events.jsonl", "a") as file:
        file.writelines(json.dumps({"event": event["event"], "time": EPOCH, **event}) + "\n" for event in events)


def step(number: int, *subnets: str) -> dict[str, Any]:
    """The event of a step, with its keys in the order that runs have them in."""
    return {"event": "step", "time": EPOCH + number, "step": number, "loss": 1.0, "subnets": list(subnets)}
