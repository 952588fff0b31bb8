"""The rows of a Gantt chart: an operation or update each, with its step, its subnet and what it waited for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from weft.serve.views.pipeline_events import PipelineEvents
from weft.trace.analysis import CAUSES, E, Waits, op_at, source_of
from weft.trace.reader import Numbers, StageTrace, Trace

Row = list[Any]


class InWindow(NamedTuple):
    """The operations and updates of one stage that lie in a window, by their places."""

    ops: Numbers
    updates: Numbers

    @property
    def rows(self) -> int:
        return len(self.ops) + len(self.updates)


def in_window(stage: StageTrace, begin: float, window: tuple[float, float]) -> InWindow:
    """What a stage did in a window of seconds after ``begin``."""
    low, high = window[0] + begin, window[1] + begin
    found = [
        np.flatnonzero((end >= low) & (start <= high))
        for start, end in ((stage.ops.start, stage.ops.end), (stage.updates["start"], stage.updates["end"]))
    ]
    return InWindow(*found)


def real_rows(trace: Trace, picked: list[InWindow], events: PipelineEvents, waits: dict[int, Waits]) -> list[Row]:
    """``[stage, kind, micro-batch, step, subnet, start, end, version, backward's version, waited for, seconds]``; an
    update has the micro-batch of the operation that it follows."""
    subnets = _Subnets(trace, picked, trace.stages, events, 0)
    found: list[Row] = []
    for number, (stage, own) in enumerate(zip(trace.stages, picked, strict=True)):
        waited = _waited(trace, number, own.ops, waits[trace.ranks[number]])
        ops = stage.ops
        for place, kind, n, start, end, seen, back in zip(
            own.ops.tolist(),
            ops.kind[own.ops].tolist(),
            ops.microbatch[own.ops].tolist(),
            np.round(ops.start[own.ops] - trace.begin, 6).tolist(),
            np.round(ops.end[own.ops] - trace.begin, 6).tolist(),
            ops.forward[own.ops].tolist(),
            ops.backward[own.ops].tolist(),
            strict=True,
        ):
            versions = [version if version >= 0 else None for version in (seen, back)]
            why = waited.get(place, (None, 0))
            found.append([number, chr(kind), n, *subnets.of(n, kind), start, end, *versions, *why])
        found += _updates(trace, number, own.updates, subnets)
    return found


def simulated_rows(trace: Trace, picked: list[InWindow], events: PipelineEvents) -> list[Row]:
    """The same of what was foreseen, which counts the micro-batches of a resumed run from where it went on."""
    shift = _first(trace.stages) - _first(trace.simulated)
    subnets = _Subnets(trace, picked, trace.simulated, events, shift)
    found: list[Row] = []
    for number, (stage, own) in enumerate(zip(trace.simulated, picked, strict=True)):
        ops = stage.ops
        for kind, n, start, end in zip(
            ops.kind[own.ops].tolist(),
            (ops.microbatch[own.ops] + shift).tolist(),
            np.round(ops.start[own.ops], 6).tolist(),
            np.round(ops.end[own.ops], 6).tolist(),
            strict=True,
        ):
            found.append([number, chr(kind), n, *subnets.of(n, kind), start, end, None, None, None, 0])
    return found


def _updates(trace: Trace, number: int, places: Numbers, subnets: _Subnets) -> list[Row]:
    ops, updates = trace.stages[number].ops, trace.stages[number].updates
    start, end = updates["start"][places], updates["end"][places]
    after = np.searchsorted(np.maximum.accumulate(ops.end), start, side="right") - 1
    found: list[Row] = []
    for before, begin, until, version in zip(
        after.tolist(),
        np.round(start - trace.begin, 6).tolist(),
        np.round(end - trace.begin, 6).tolist(),
        updates["version"][places].tolist(),
        strict=True,
    ):
        if before >= 0:
            n, kind = int(ops.microbatch[before]), int(ops.kind[before])
            found.append([number, "U", n, *subnets.of(n, kind), begin, until, version, None, None, 0])
        else:
            found.append([number, "U", None, None, None, begin, until, version, None, None, 0])
    return found


def _waited(trace: Trace, stage: int, places: Numbers, waits: Waits) -> dict[int, tuple[str, float]]:
    own = np.flatnonzero(waits.stage == stage)
    own = own[np.isin(waits.op[own], places)]
    causes = waits.cause()[own]
    return {
        int(waits.op[at]): (
            describe_wait(trace, stage, int(waits.op[at]), CAUSES[cause], int(waits.held[at])),
            round(float(waits.seconds[at]), 6),
        )
        for at, cause in zip(own.tolist(), causes.tolist(), strict=True)
    }


def describe_wait(trace: Trace, stage: int, op: int, cause: str, held: int) -> str:
    """A wait as a person reads it, such as ``for 1B3, which was not over``."""
    source = source_of(op_at(trace, stage, op), len(trace.stages))
    if cause == "op":
        text = f"for {source}, which was not over"
    elif cause == "message":
        text = f"for the message of {source}, which was under way"
    else:
        text = "for weights, a place in the window or the stage's attention: its input was there"
    if held < 0:
        return text
    return f"{text}; {op_at(trace, stage, held)} had its input, but not its weights or a place"


def _first(stages: tuple[StageTrace, ...]) -> int:
    """The first micro-batch that is trained."""
    firsts = [int(found.min()) for stage in stages if len(found := stage.ops.microbatch[stage.ops.kind != E])]
    return min(firsts, default=0)


class _Subnets:
    """The step and the subnet of micro-batches."""

    def __init__(
        self, trace: Trace, picked: list[InWindow], stages: tuple[StageTrace, ...], events: PipelineEvents, shift: int
    ) -> None:
        self._each = trace.head.microbatches
        steps: set[int] = set()
        for stage, own in zip(stages, picked, strict=True):
            steps.update(((stage.ops.microbatch[own.ops] + shift) // self._each).tolist())
        self._known = events.subnets(steps)

    def of(self, n: int, kind: int) -> tuple[int | None, str | None]:
        if kind == E:  # only scored, and counted by itself
            return None, None
        step, within = divmod(n, self._each)
        ids = self._known.get(step, ())
        return step, ids[within % len(ids)] if ids else None
