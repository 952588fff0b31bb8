"""The rows of a Gantt chart: an operation or update each, with its step, its subnet and what it waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.serve.event_log import LogTail, Lru
from weft.trace.analysis import CAUSES, Waits, op_at, source_of
from weft.trace.reader import Numbers, StageFile, StageTrace, Trace, join_files, trace_files

Row = list[Any]
SubnetsOf = Callable[[Iterable[int]], Mapping[int, list[str]]]
"""The subnets of some steps, by their ids, as far as they are known."""
SubnetOf = Callable[[int], tuple[int, str | None]]


class InWindow(NamedTuple):
    """The operations and updates of one stage that lie in a window, by their places."""

    ops: Numbers
    updates: Numbers


def in_window(stage: StageTrace, begin: float, window: tuple[float, float]) -> InWindow:
    """The operations and updates of a stage in a window of seconds after ``begin``."""
    low, high = window[0] + begin, window[1] + begin
    found = [
        np.flatnonzero((end >= low) & (start <= high))
        for start, end in ((stage.ops.start, stage.ops.end), (stage.updates["start"], stage.updates["end"]))
    ]
    return InWindow(*found)


def real_rows(trace: Trace, picked: list[InWindow], subnets_of: SubnetsOf, waits: list[Waits]) -> list[Row]:
    """``[stage, kind, micro-batch, step, subnet, start, end, version, backward's version, waited for, seconds]``; an
    update has the micro-batch of the operation that it follows."""
    subnet_of = _subnets(trace, picked, trace.stages, subnets_of)
    found: list[Row] = []
    for number, (stage, own) in enumerate(zip(trace.stages, picked, strict=True)):
        waited = _waits_by_op(trace, number, own.ops, waits[number])
        versions = zip(stage.ops.forward[own.ops].tolist(), stage.ops.backward[own.ops].tolist(), strict=True)
        for place, row, seen in zip(
            own.ops.tolist(), _op_rows(number, stage, own.ops, trace.begin, subnet_of), versions, strict=True
        ):
            found.append([*row, *(at if at >= 0 else None for at in seen), *waited.get(place, (None, 0))])
        found += _updates(trace, number, own.updates, subnet_of)
    return found


def simulated_rows(trace: Trace, picked: list[InWindow], subnets_of: SubnetsOf) -> list[Row]:
    """The same rows of the simulation."""
    subnet_of = _subnets(trace, picked, trace.simulated, subnets_of)
    return [
        [*row, None, None, None, 0]
        for number, (stage, own) in enumerate(zip(trace.simulated, picked, strict=True))
        for row in _op_rows(number, stage, own.ops, 0.0, subnet_of)
    ]


def _op_rows(number: int, stage: StageTrace, places: Numbers, begin: float, subnet_of: SubnetOf) -> Iterator[Row]:
    ops = stage.ops
    for kind, n, start, end in zip(
        ops.kind[places].tolist(),
        ops.microbatch[places].tolist(),
        np.round(ops.start[places] - begin, 6).tolist(),
        np.round(ops.end[places] - begin, 6).tolist(),
        strict=True,
    ):
        yield [number, chr(kind), n, *subnet_of(n), start, end]


def _updates(trace: Trace, number: int, places: Numbers, subnet_of: SubnetOf) -> Iterator[Row]:
    ops, updates = trace.stages[number].ops, trace.stages[number].updates
    start, end = updates["start"][places], updates["end"][places]
    after = np.searchsorted(np.maximum.accumulate(ops.end), start, side="right") - 1
    for before, begin, until, version in zip(
        after.tolist(),
        np.round(start - trace.begin, 6).tolist(),
        np.round(end - trace.begin, 6).tolist(),
        updates["version"][places].tolist(),
        strict=True,
    ):
        n = int(ops.microbatch[before]) if before >= 0 else None
        step = (None, None) if n is None else subnet_of(n)
        yield [number, "U", n, *step, begin, until, version, None, None, 0]


def _waits_by_op(trace: Trace, stage: int, places: Numbers, waits: Waits) -> dict[int, tuple[str, float]]:
    own = np.flatnonzero(np.isin(waits.op, places))
    causes = waits.cause()[own]
    return {
        int(waits.op[at]): (
            describe_wait(trace, stage, int(waits.op[at]), CAUSES[cause], int(waits.blocked[at])),
            round(float(waits.seconds[at]), 6),
        )
        for at, cause in zip(own.tolist(), causes.tolist(), strict=True)
    }


def describe_wait(trace: Trace, stage: int, op: int, cause: str, blocked: int) -> str:
    """A wait as a person reads it, such as ``for 1B3, which was not over``."""
    source = source_of(op_at(trace, stage, op), len(trace.stages))
    if cause == "op":
        text = f"for {source}, which was not over"
    elif cause == "message":
        text = f"for the message of {source}, which was under way"
    else:
        text = "for weights or a place in the window: its input was there"
    if blocked < 0:
        return text
    return f"{text}; {op_at(trace, stage, blocked)} had its input, but not its weights or a place"


def _subnets(trace: Trace, picked: list[InWindow], stages: tuple[StageTrace, ...], subnets_of: SubnetsOf) -> SubnetOf:
    """The step and the subnet of each micro-batch that was picked."""
    each = trace.head.microbatches
    pairs = zip(stages, picked, strict=True)
    known = subnets_of({step for stage, own in pairs for step in (stage.ops.microbatch[own.ops] // each).tolist()})

    def subnet_of(n: int) -> tuple[int, str | None]:
        step, within = divmod(n, each)
        ids = known.get(step, ())
        return step, ids[within % len(ids)] if ids else None

    return subnet_of


class _TraceFolder:
    """The traces of a run, which are read on as they grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._tails: dict[int, LogTail] = {}
        self._files: dict[int, StageFile] = {}
        self._trace: Trace | None = None

    def load(self) -> Trace | None:
        with self._lock:
            there = trace_files(self.folder)
            gone = self._files.keys() - there.keys()
            for number in gone:
                del self._tails[number], self._files[number]
            read = [self._read(number, path) for number, path in there.items()]
            if gone or any(read):
                self._trace = join_files(self._files)
            return self._trace

    def _read(self, number: int, path: Path) -> bool:
        """Read the new lines of a file; whether it has changed."""
        tail = self._tails.setdefault(number, LogTail(path))
        if number in self._files and not tail.changed():
            return False
        if tail.replaced() or number not in self._files:
            self._files[number] = StageFile()
        with suppress(OSError):
            for _, piece in tail.read():
                self._files[number].add(piece)
        return True


_folders: Lru[_TraceFolder] = Lru(4)


def load_trace(run: Path) -> Trace | None:
    """The last start of a run, as far as it is written; None without a trace. The same value as long as no file
    changes; of a file that grows, the new lines are read."""
    folder = (run / "traces").absolute()
    return _folders.get(folder, "", lambda: _TraceFolder(folder)).load()
