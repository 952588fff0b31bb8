"""Records what a stage does and when, at little cost.

It appends to ``traces/stage<r>.jsonl`` in the run directory. Each start of the run begins with a line of its own,
``{"start": 0, "stage": 1, "stages": 4, "cut": [...], "microbatches": 2, "time": ...}``, to which stage 0 adds
``"simulated": [[stage, kind, micro-batch, start, end], ...]`` in seconds where that is known. Then follow

    ["op", kind, micro-batch, start, end, in flight]       ["sent", kind, micro-batch, time, bytes]
    ["update", layers, version, start, end]                ["received", kind, micro-batch, time]
    ["memory", layer, state, time, resident, arriving, leaving, pinned]

Where backwards see newer weights than their forwards, an op also has the version that its forward sees, and a backward
behind it the one that it sees itself. Where layers live on the host, one is ``arriving``, ``resident`` or ``leaving``
from that time on, and the numbers are the bytes of all on the device; copies are told of when they are asked for.
"""

from __future__ import annotations

import json
import math
import time as clock
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.pipeline.scheduler import Kind, Op
from weft.pipeline.simulator import Span
from weft.supernet.partition import Cut
from weft.utils.files import AppendFile, disk_errors


class TraceRecorder:
    """The trace of one stage, for its hot loop: a call costs one append to a list, until ``flush`` writes the lines.

    Times are seconds of ``time.time()``, on which all processes of a machine agree. Threads may share it.
    """

    def __init__(self, path: Path, stage: int) -> None:
        self.path, self.stage = path, stage
        self._rows: list[tuple[Any, ...] | dict[str, Any]] = []
        self._file = AppendFile(path, every=math.inf)

    def start(
        self,
        restart: int,
        stages: int,
        cut: Cut,
        microbatches: int = 1,
        simulated: Sequence[Span] | None = None,
    ) -> None:
        """The first call of a process. ``microbatches`` are those of a step; stage 0 may give the ``simulated`` spans.

        The folder is made here; a torn line that a killed process left is closed.
        """
        with disk_errors(self.path, 0):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size:
            self._file.add(b"\n")
        head = {"start": restart, "stage": self.stage, "stages": stages, "cut": list(cut), "microbatches": microbatches}
        if simulated is not None:
            head["simulated"] = [[*span.op, span.start, span.end] for span in simulated]
        self._rows.append({**head, "time": clock.time()})
        self.flush()

    def op(self, op: Op, start: float, end: float, in_flight: int, versions: Sequence[int] = ()) -> None:
        """An operation is over; ``in_flight`` micro-batches were so while it ran, its own among them.

        ``versions`` are those of its forward and, for a backward, of itself, where they may differ.
        """
        self._rows.append(("op", op.kind, op.microbatch, start, end, in_flight, *versions))

    def sent(self, kind: Kind, microbatch: int, time: float, bytes: int) -> None:
        """The outcome of the stage's own operation was handed to the transport."""
        self._rows.append(("sent", kind, microbatch, time, bytes))

    def received(self, kind: Kind, microbatch: int, time: float) -> None:
        """The input of the stage's own operation has arrived."""
        self._rows.append(("received", kind, microbatch, time))

    def update(self, layers: int, version: int, start: float, end: float) -> None:
        """Layers got new weights, after an operation and not within it; ``version`` counts the updates of the stage."""
        self._rows.append(("update", layers, version, start, end))

    def memory(self, layer: str, state: str, time: float, shares: Sequence[int]) -> None:
        """A layer is on its way to the device, has come to be used there, or leaves it."""
        self._rows.append(("memory", layer, state, time, *shares))

    def flush(self) -> None:
        """Write what was recorded."""
        count = len(self._rows)  # what other threads add meanwhile waits for the next flush
        rows = self._rows[:count]
        if rows:
            self._file.add("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode())
            del self._rows[:count]
        self._file.flush(sync=False)

    def close(self) -> None:
        self.flush()
        self._file.close()
