"""The trace of a run: what all its stages did and when, read back from the lines that their tracers wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft.errors import RunError
from weft.pipeline.scheduler import Kind, Op
from weft.pipeline.simulator import Span
from weft.pipeline.tracer import Tracer
from weft.plan.cut import Cut

__all__ = ["Memory", "Message", "StageTrace", "Trace", "Tracer", "Update", "Versions", "read_traces"]


class Message(NamedTuple):
    """What an operation made, as seen by the stage that sent or received it; ``bytes`` only the sender knows."""

    kind: Kind
    microbatch: int
    time: float
    bytes: int = 0


class Update(NamedTuple):
    """New weights of some layers of a stage; ``version`` counts the updates of the stage."""

    layers: int
    version: int
    start: float
    end: float


class Memory(NamedTuple):
    """From this time on a layer is ``arriving``, ``resident`` or ``leaving``; and what all are on the device, in
    bytes."""

    layer: str
    state: str
    time: float
    resident: int
    arriving: int
    leaving: int
    pinned: int


class Versions(NamedTuple):
    """The version of the weights that a forward sees, and that its backward does: of the layer of a stage where these
    are farthest apart. An operation that is no backward knows of the first alone."""

    forward: int
    backward: int | None = None

    @property
    def drift(self) -> int | None:
        """By how many updates the backward is ahead of its forward."""
        return None if self.backward is None else self.backward - self.forward


@dataclass(frozen=True, slots=True)
class StageTrace:
    """What one stage did, in order of time."""

    stage: int
    spans: tuple[Span, ...] = ()
    in_flight: tuple[int, ...] = ()
    """For every span, the micro-batches in flight while it ran."""
    sent: tuple[Message, ...] = ()
    received: tuple[Message, ...] = ()
    updates: tuple[Update, ...] = ()
    versions: tuple[Versions | None, ...] = ()
    """For every span; none at all where every backward sees what its forward saw."""
    memory: tuple[Memory, ...] = ()
    """Where layers live on the host: how they come and go."""

    def intervals(self) -> list[tuple[float, float]]:
        """The times of all operations and updates."""
        return [(span.start, span.end) for span in self.spans] + [(update.start, update.end) for update in self.updates]


@dataclass(frozen=True, slots=True)
class Trace:
    """What all stages did from one start of the run on. Times are in seconds of one clock."""

    start: int
    stages: tuple[StageTrace, ...]
    cut: Cut = ()
    microbatches: int = 1
    """Micro-batches of a step."""
    simulated: tuple[Span, ...] = field(default=(), repr=False)
    """The same operations as the simulator foresaw them, from time 0 on."""
    ranks: tuple[int, ...] = ()
    """The rank of every stage, where some share one."""

    def by_rank(self) -> tuple[StageTrace, ...]:
        """What every rank did: its only stage, or all of its stages as if they were one."""
        if not self.ranks:
            return self.stages
        found = []
        for rank in sorted(set(self.ranks)):
            own = [stage for stage, at in zip(self.stages, self.ranks, strict=True) if at == rank]
            spans = sorted((span for stage in own for span in stage.spans), key=lambda span: (span.start, span.end))
            updates = sorted((update for stage in own for update in stage.updates), key=lambda update: update.start)
            found.append(StageTrace(rank, tuple(spans), updates=tuple(updates)))
        return tuple(found)

    @property
    def begin(self) -> float:
        """When the first stage began to work."""
        return min((start for stage in self.stages for start, _ in stage.intervals()), default=0.0)

    @property
    def end(self) -> float:
        """When the last stage ceased to work."""
        return max((end for stage in self.stages for _, end in stage.intervals()), default=0.0)


def read_traces(run_path: Path | str, start: int | None = None) -> Trace:
    """What is written of the last start of a run, or of the one with this number; lines that are torn are skipped.

    RunError where there is no trace, or no operation in it.
    """
    folder = Path(run_path) / "traces"
    head, rows, starts = _last(folder / "stage0.jsonl", start)
    if head is None and starts:
        raise RunError(f"run '{run_path}' has no trace of start {start}; known: {', '.join(map(str, sorted(starts)))}")
    if head is None:
        raise RunError(
            f"run '{run_path}' has no traces: they are written by a run with `trace = true` in its config, "
            "or by weft.train(..., trace=True)"
        )
    stages, began = [_stage(0, rows)], float(head.get("time", 0.0))
    for stage in range(1, int(head["stages"])):
        _, rows, _ = _last(folder / f"stage{stage}.jsonl", int(head["start"]))
        found = _stage(stage, rows)
        # Starts may be counted anew after a resume: what was over before this one began belongs to an older one.
        stale = bool(found.spans) and found.spans[-1].end < began
        stages.append(StageTrace(stage) if stale else found)
    if not any(stage.spans for stage in stages):
        raise RunError(f"the traces of run '{run_path}' hold no operation yet: wait until its first steps are done")
    foreseen = tuple(Span(Op(*row[:3]), *row[3:]) for row in head.get("simulated") or ())
    ranks = tuple(int(rank) for rank in head.get("ranks") or ())
    m = int(head.get("microbatches", 1))
    return Trace(int(head["start"]), tuple(stages), tuple(head["cut"]), m, foreseen, ranks)


def _last(path: Path, start: int | None) -> tuple[dict[str, Any] | None, list[Any], set[int]]:
    """The head and the rows of the last start in a file that fits, and the numbers of all starts."""
    found: dict[str, Any] | None = None
    rows: list[Any] = []
    starts: set[int] = set()
    fits = False
    if not path.is_file():
        return found, rows, starts
    with open(path, "rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and {"start", "stages", "cut"} <= row.keys():
                starts.add(row["start"])
                fits = start in (None, row["start"])
                if fits:
                    found, rows = row, []
            elif fits and isinstance(row, list):
                rows.append(row)
    return found, rows, starts


def _numbers(seen: list[Any]) -> bool:
    return len(seen) <= 2 and all(isinstance(version, int) for version in seen)


def _stage(stage: int, rows: list[Any]) -> StageTrace:
    ops: list[tuple[Span, int, Versions | None]] = []
    sent: list[Message] = []
    received: list[Message] = []
    updates: list[Update] = []
    memory: list[Memory] = []
    for row in rows:
        match row:
            case ["op", "F" | "B" | "W" | "E" as kind, int(n), begin, end, int(in_flight), *seen] if _numbers(seen):
                ops.append((Span(Op(stage, kind, n), begin, end), in_flight, Versions(*seen) if seen else None))
            case ["sent", "F" | "B" | "E" as kind, int(n), at, int(size)]:
                sent.append(Message(kind, n, at, size))
            case ["received", "F" | "B" | "E" as kind, int(n), at]:
                received.append(Message(kind, n, at))
            case ["update", int(layers), int(version), begin, end]:
                updates.append(Update(layers, version, begin, end))
            case ["memory", str(layer), str(state), at, *shares] if len(shares) == 4:
                memory.append(Memory(layer, state, at, *shares))
    ops.sort(key=lambda row: (row[0].start, row[0].end))
    spans, in_flights = tuple(row[0] for row in ops), tuple(row[1] for row in ops)
    versions = tuple(row[2] for row in ops) if any(row[2] for row in ops) else ()
    return StageTrace(stage, spans, in_flights, tuple(sent), tuple(received), tuple(updates), versions, tuple(memory))
