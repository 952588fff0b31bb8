"""Traces operation by operation, in plain Python: an oracle for ``weft.trace.reader`` and ``weft.trace.analysis``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import weft.trace.reader as columnar
from weft.pipeline.scheduler import Kind, Op
from weft.pipeline.simulator import Span
from weft.supernet.partition import Cut
from weft.trace.analysis import CAUSES, Wait


class Message(NamedTuple):  # ``bytes`` only the sender knows
    kind: Kind
    microbatch: int
    time: float
    bytes: int = 0


class Update(NamedTuple):
    layers: int
    version: int
    start: float
    end: float


class Memory(NamedTuple):
    layer: str
    state: str
    time: float
    resident: int
    arriving: int
    leaving: int
    pinned: int


class Versions(NamedTuple):  # of the weights; a forward knows of the first alone
    forward: int
    backward: int | None = None


@dataclass(frozen=True, slots=True)
class StageTrace:
    """What one stage did, in order of time."""

    stage: int
    spans: tuple[Span, ...] = ()
    in_flight: tuple[int, ...] = ()  # for every span
    sent: tuple[Message, ...] = ()
    received: tuple[Message, ...] = ()
    updates: tuple[Update, ...] = ()
    versions: tuple[Versions | None, ...] = ()  # for every span, or none at all
    memory: tuple[Memory, ...] = ()

    def intervals(self) -> list[tuple[float, float]]:
        return [(span.start, span.end) for span in self.spans] + [(update.start, update.end) for update in self.updates]


@dataclass(frozen=True, slots=True)
class Trace:
    """What all stages did from one start of the run on; the simulation begins at time 0."""

    start: int
    stages: tuple[StageTrace, ...]
    cut: Cut = ()
    microbatches: int = 1
    simulated: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def begin(self) -> float:
        return min((start for stage in self.stages for start, _ in stage.intervals()), default=0.0)

    @property
    def end(self) -> float:
        return max((end for stage in self.stages for _, end in stage.intervals()), default=0.0)


def read_by_line(run_path: Path | str) -> Trace | None:
    """What is written of the last start of a run; None where there is no trace, or no operation in it."""
    folder = Path(run_path) / "traces"
    head, rows = _last(folder / "stage0.jsonl", None)
    if head is None:
        return None
    stages, began = [_stage(0, rows)], float(head.get("time", 0.0))
    for stage in range(1, int(head["stages"])):
        _, rows = _last(folder / f"stage{stage}.jsonl", int(head["start"]))
        found = _stage(stage, rows)
        # Starts may be counted anew after a resume: what was over before this one began belongs to an older one.
        stale = bool(found.spans) and found.spans[-1].end < began
        stages.append(StageTrace(stage) if stale else found)
    if not any(stage.spans for stage in stages):
        return None
    expected = tuple(Span(Op(*row[:3]), *row[3:]) for row in head.get("simulated") or ())
    m = int(head.get("microbatches", 1))
    return Trace(int(head["start"]), tuple(stages), tuple(head["cut"]), m, expected)


def _last(path: Path, start: int | None) -> tuple[dict[str, Any] | None, list[Any]]:
    """The head and the rows of the last start in a file, or of the last with this number."""
    found: dict[str, Any] | None = None
    rows: list[Any] = []
    fits = False
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and {"start", "stages", "cut"} <= row.keys():
            fits = start in (None, row["start"])
            if fits:
                found, rows = row, []
        elif fits and isinstance(row, list):
            rows.append(row)
    return found, rows


def _numbers(seen: list[Any]) -> bool:
    return len(seen) <= 2 and all(isinstance(version, int) for version in seen)


def _stage(stage: int, rows: list[Any]) -> StageTrace:
    ops, sent, received, updates, memory = list[tuple[Span, int, Versions | None]](), [], [], [], []
    for row in rows:
        match row:
            case ["op", "F" | "B" as kind, int(n), begin, end, int(in_flight), *seen] if _numbers(seen):
                ops.append((Span(Op(stage, kind, n), begin, end), in_flight, Versions(*seen) if seen else None))
            case ["sent", "F" | "B" as kind, int(n), at, int(size)]:
                sent.append(Message(kind, n, at, size))
            case ["received", "F" | "B" as kind, int(n), at]:
                received.append(Message(kind, n, at))
            case ["update", int(layers), int(version), begin, end]:
                updates.append(Update(layers, version, begin, end))
            case ["memory", str(layer), str(state), at, *shares] if len(shares) == 4:
                memory.append(Memory(layer, state, at, *shares))
    ops.sort(key=lambda row: (row[0].start, row[0].end))
    spans, in_flights = tuple(row[0] for row in ops), tuple(row[1] for row in ops)
    versions = tuple(row[2] for row in ops) if any(row[2] for row in ops) else ()
    return StageTrace(stage, spans, in_flights, tuple(sent), tuple(received), tuple(updates), versions, tuple(memory))


def columns(trace: Trace) -> columnar.Trace:
    """The same as columns."""
    head = {"start": trace.start, "stages": len(trace.stages), "cut": list(trace.cut)}
    head |= {"microbatches": trace.microbatches, "simulated": [[*s.op, s.start, s.end] for s in trace.simulated]}
    files = {}
    for stage in trace.stages:
        rows: list[Any] = [head]
        versions = stage.versions or (None,) * len(stage.spans)
        for span, in_flight, seen in zip(stage.spans, stage.in_flight, versions, strict=True):
            known = () if seen is None else [version for version in seen if version is not None]
            rows.append(["op", span.op.kind, span.op.microbatch, span.start, span.end, in_flight, *known])
        rows += [["sent", *message] for message in stage.sent]
        rows += [["received", *message[:3]] for message in stage.received]
        rows += [["update", *update] for update in stage.updates]
        rows += [["memory", *row] for row in stage.memory]
        files[stage.stage] = columnar.StageFile()
        files[stage.stage].add("".join(json.dumps(row) + "\n" for row in rows).encode())
    found = columnar.join_files(files)
    assert found is not None
    return found


def same(found: columnar.Trace | None, expected: Trace) -> bool:
    """Whether columns hold the same, to the last bit."""
    assert found is not None
    head = (found.head.start, tuple(found.head.cut), found.head.microbatches)
    assert head == (expected.start, expected.cut, expected.microbatches)
    assert [rows(stage) for stage in found.stages] == [_expected(stage) for stage in expected.stages]
    assert (found.begin, found.end) == (expected.begin, expected.end)
    simulated = {
        (stage, chr(kind), int(n), float(start), float(end))
        for stage, own in enumerate(found.simulated)
        for kind, n, start, end in zip(own.ops.kind, own.ops.microbatch, own.ops.start, own.ops.end, strict=True)
    }
    assert simulated == {(*span.op, span.start, span.end) for span in expected.simulated}
    return True


OPS = ("kind", "microbatch", "start", "end", "in_flight", "forward", "backward")


def rows(stage: columnar.StageTrace) -> dict[str, list[Any]]:
    """All that the columns of a stage hold, row by row."""
    ops, memory = stage.ops, stage.memory

    def table(columns: dict[str, columnar.Numbers], *names: str) -> list[tuple[Any, ...]]:
        return list(zip(*(columns[name].tolist() for name in names), strict=True))

    shares = ("resident", "arriving", "leaving", "pinned")
    return {
        "ops": [(chr(kind), *more) for kind, *more in zip(*(getattr(ops, name).tolist() for name in OPS), strict=True)],
        "updates": table(stage.updates, "layers", "version", "start", "end"),
        "received": [(chr(kind), *more) for kind, *more in table(stage.received, "kind", "microbatch", "time")],
        "sent": [(chr(kind), *more) for kind, *more in table(stage.sent, "kind", "microbatch", "bytes")],
        "memory": [
            (stage.layers[layer], columnar.STATES[state], *more)
            for layer, state, *more in table(memory, "layer", "state", "time", *shares)
        ],
    }


def _expected(stage: StageTrace) -> dict[str, list[Any]]:
    versions = stage.versions or (None,) * len(stage.spans)
    return {
        "ops": [
            (span.op.kind, span.op.microbatch, span.start, span.end, flying)
            + ((-1, -1) if seen is None else (seen.forward, -1 if seen.backward is None else seen.backward))
            for span, flying, seen in zip(stage.spans, stage.in_flight, versions, strict=True)
        ],
        "updates": sorted((tuple(update) for update in stage.updates), key=lambda row: row[2]),
        "received": [tuple(message[:3]) for message in stage.received],
        "sent": [(message.kind, message.microbatch, message.bytes) for message in stage.sent],
        "memory": sorted((tuple(row) for row in stage.memory), key=lambda row: row[2]),
    }


class Gap(NamedTuple):
    """Time in which a stage did nothing; ``op`` ended it, or None where an update or the end of the trace did."""

    start: float
    end: float
    op: Op | None


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
    begin, end = trace.begin, trace.end
    found = [gap for stage in trace.stages for gap in gaps(stage, begin, end) if gap.op is not None]
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
        if op.kind == "F":
            return Op(op.stage - 1, "F", op.microbatch) if op.stage else None
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
        parts = (made - gap.start, arrived - made, gap.end - arrived)
        cause = CAUSES[parts.index(max(parts))]
        later = (span.op for span in self.stages[op.stage].spans if span.start >= gap.end and span.op != op)
        blocked = next((other for other in later if self.times(other, gap.end)[1] <= gap.start), None)
        return Wait(op, gap.start, gap.end - gap.start, cause, self.source(op), blocked)
