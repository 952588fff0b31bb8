"""The rows of a Gantt chart: an operation or update each, with its step, its subnet and what it waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
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


class InWindow(NamedTuple):
    """The operations and updates of one stage that lie in a window, by their places."""

    ops: Numbers
    updates: Numbers

    @property
    def rows(self) -> int:
        return len(self.ops) + len(self.updates)


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
    subnets = _Subnets(trace, picked, trace.stages, subnets_of)
    found: list[Row] = []
    for number, (stage, own) in enumerate(zip(trace.stages, picked, strict=True)):
        waited = _waits_by_op(trace, number, own.ops, waits[number])
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
            found.append([number, chr(kind), n, *subnets.of(n), start, end, *versions, *why])
        found += _updates(trace, number, own.updates, subnets)
    return found


def simulated_rows(trace: Trace, picked: list[InWindow], subnets_of: SubnetsOf) -> list[Row]:
    """The same rows of the simulation."""
    subnets = _Subnets(trace, picked, trace.simulated, subnets_of)
    found: list[Row] = []
    for number, (stage, own) in enumerate(zip(trace.simulated, picked, strict=True)):
        ops = stage.ops
        for kind, n, start, end in zip(
            ops.kind[own.ops].tolist(),
            ops.microbatch[own.ops].tolist(),
            np.round(ops.start[own.ops], 6).tolist(),
            np.round(ops.end[own.ops], 6).tolist(),
            strict=True,
        ):
            found.append([number, chr(kind), n, *subnets.of(n), start, end, None, None, None, 0])
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
            n = int(ops.microbatch[before])
            found.append([number, "U", n, *subnets.of(n), begin, until, version, None, None, 0])
        else:
            found.append([number, "U", None, None, None, begin, until, version, None, None, 0])
    return found


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


class _Subnets:
    """The step and the subnet of micro-batches."""

    def __init__(
        self, trace: Trace, picked: list[InWindow], stages: tuple[StageTrace, ...], subnets_of: SubnetsOf
    ) -> None:
        self._each = trace.head.microbatches
        steps: set[int] = set()
        for stage, own in zip(stages, picked, strict=True):
            steps.update((stage.ops.microbatch[own.ops] // self._each).tolist())
        self._known = subnets_of(steps)

    def of(self, n: int) -> tuple[int, str | None]:
        step, within = divmod(n, self._each)
        ids = self._known.get(step, ())
        return step, ids[within % len(ids)] if ids else None


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
