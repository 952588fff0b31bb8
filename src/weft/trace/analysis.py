"""What the stages of a trace waited for: ``weft.pipeline.waits`` for millions of operations, by columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.serve.pipeline.columns import Numbers, Stage
from weft.serve.pipeline.inputs import B, F, Inputs, W
from weft.serve.pipeline.spans import Traced

CAUSES = ("op", "message", "version or window")
FAR = 256
"""How many operations ahead one is looked for that was held: a window is not that wide."""


@dataclass(frozen=True, eq=False)
class Waits:
    """The waits of one rank that an operation of these stages ended. ``stage`` and ``op`` name it by its place; of
    the time before its input was there, ``made`` is what went by until that was made."""

    stage: Numbers
    op: Numbers
    seconds: Numbers
    made: Numbers
    arrived: Numbers
    held: Numbers
    late: float
    """Seconds of waits that an update ended."""
    before: Numbers
    """Micro-batches in flight on the stage during the wait."""

    def cause(self) -> Numbers:
        """For each wait the place in ``CAUSES`` of what took the most of it."""
        parts = np.stack([self.made, self.arrived - self.made, self.seconds - self.arrived])
        found: Numbers = np.argmax(parts, axis=0) if len(self.seconds) else np.zeros(0, dtype=int)
        return found


def waits_of(traced: Traced) -> dict[int, Waits]:
    """The waits of every rank."""
    ranks, inputs = traced.ranks, Inputs(traced)
    arrivals = [inputs.of(number) for number in range(len(traced.stages))]
    return {
        rank: _rank([number for number, at in enumerate(ranks) if at == rank], traced, arrivals)
        for rank in sorted(set(ranks))
    }


def wait_shares(waits: Waits, traced: Traced, windows: list[int]) -> dict[str, float]:
    """Shares of the whole time: without any input, and with one that lay there, but lacked its weights or a place in
    the window of its stage. What a rank was idle besides went by in its own bookkeeping, or nothing was left to do."""
    time = traced.end - traced.begin
    if time <= 0:
        return {"input": 0.0, "weights": 0.0, "window": 0.0}
    is_held = waits.held >= 0
    kinds = np.zeros(len(waits.held), dtype=np.uint8)
    for stage in np.unique(waits.stage):
        own = is_held & (waits.stage == stage)
        kinds[own] = traced.stages[stage].ops.kind[waits.held[own]]
    # A place in the window is lacking where all but the last, which is kept for the oldest, are taken.
    full = is_held & (kinds == F) & (waits.before >= np.array(windows)[waits.stage] - 1)
    return {
        "input": float(waits.arrived[~is_held].sum()) / time,
        "weights": (float(waits.arrived[is_held & ~full].sum()) + waits.late) / time,
        "window": float(waits.arrived[full].sum()) / time,
    }


def words(traced: Traced, stage: int, op: int, cause: str, held: int) -> str:
    """A wait as a person reads it, such as ``for 1B3, which was not over``."""
    kind, n = chr(traced.stages[stage].ops.kind[op]), int(traced.stages[stage].ops.microbatch[op])
    source = _source(stage, kind, n, len(traced.stages) - 1)
    if cause == "op":
        text = f"for {source}, which was not over"
    elif cause == "message":
        text = f"for the message of {source}, which was under way"
    else:
        text = "for weights, a place in the window or the stage's attention: its input was there"
    if held < 0:
        return text
    other = f"{stage}{chr(traced.stages[stage].ops.kind[held])}{int(traced.stages[stage].ops.microbatch[held])}"
    return f"{text}; {other} had its input, but not its weights or a place"


def _source(stage: int, kind: str, n: int, last: int) -> str:
    if kind in "FE":
        return f"{stage - 1}{kind}{n}"
    if kind == "W":
        return f"{stage}B{n}"
    return f"{stage}F{n}" if stage == last else f"{stage + 1}B{n}"


def _rank(own: list[int], traced: Traced, arrivals: list[tuple[Numbers, Numbers]]) -> Waits:
    starts, ends, stages, ops = [], [], [], []
    for number in own:
        stage = traced.stages[number]
        for start, end, places in (
            (stage.ops.start, stage.ops.end, np.arange(len(stage.ops))),
            (stage.updates["start"], stage.updates["end"], np.full(len(stage.updates["start"]), -1)),
        ):
            starts.append(start)
            ends.append(end)
            stages.append(np.full(len(start), number))
            ops.append(places)
    start, end, stage_of, op = (np.concatenate(part) for part in (starts, ends, stages, ops))
    order = np.lexsort((end, start))
    start, end, stage_of, op = start[order], end[order], stage_of[order], op[order]
    before = np.maximum.accumulate(np.concatenate([[traced.begin], end]))[:-1]
    idle = start > before
    late = float((start - before)[idle & (op < 0)].sum())
    idle &= op >= 0
    begin, until, stage_of, op = before[idle], start[idle], stage_of[idle], op[idle]
    made, arrived = np.empty(len(op)), np.empty(len(op))
    held = np.full(len(op), -1)
    flying = np.zeros(len(op), dtype=int)
    for number in own:
        mine = stage_of == number
        at, (was_made, came) = op[mine], arrivals[number]
        for into, times in ((made, was_made), (arrived, came)):
            known = np.where(np.isnan(times[at]), until[mine], times[at])
            into[mine] = np.clip(known, begin[mine], until[mine]) - begin[mine]
        held[mine] = _held(at, begin[mine], came)
        flying[mine] = _flying(traced.stages[number], at)
    return Waits(stage_of, op, until - begin, made, arrived, held, late, flying)


def _held(op: Numbers, begin: Numbers, arrived: Numbers) -> Numbers:
    """For each wait the next operation of the stage whose input lay there from its beginning on, or -1."""
    known = np.where(np.isnan(arrived), np.inf, arrived)
    # The earliest arrival of this operation or any later one says whether to look at all.
    earliest = np.append(np.minimum.accumulate(known[::-1])[::-1], np.inf)
    found = np.full(len(op), -1)
    place = op + 1
    left = np.flatnonzero(earliest[place] <= begin) if len(op) else np.zeros(0, dtype=int)
    for _ in range(FAR):
        if not len(left):
            break
        is_it = known[place[left]] <= begin[left]
        found[left[is_it]] = place[left[is_it]]
        left = left[~is_it]
        place[left] += 1
    return found


def _flying(stage: Stage, op: Numbers) -> Numbers:
    """Micro-batches in flight when the operation before each of these was over."""
    before = np.maximum(op - 1, 0)
    over = np.isin(stage.ops.kind[before], (B, W))
    found: Numbers = np.where(op > 0, stage.ops.in_flight[before] - over, 0)
    return found
