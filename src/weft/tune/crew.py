"""The crew of a job: the worker processes that run it, and what goes wrong with them."""

from __future__ import annotations

import math
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from weft.tune.job import Ended, Job, Lost
from weft.tune.wire import Line, Message

GRACE = 1.0
"""Seconds that a failure in one process of a split job waits for the others', of which it may only be a consequence."""


@dataclass(eq=False)
class Worker:
    """A process with the driver's end of its line."""

    process: Any
    line: Line
    place: int
    ready: bool = False
    job: Running | None = None

    def send(self, message: Message) -> None:
        with suppress(OSError):  # that it is gone is seen by its sentinel
            self.line.send(message)


@dataclass(eq=False)
class Running:
    """A job with its workers, rank by rank."""

    job: Job
    crew: list[Worker]
    ended: set[int] = field(default_factory=set)
    began: float = 0.0
    deadline: float = math.inf
    failures: list[Ended | Lost] = field(default_factory=list)
    judged_at: float = math.inf
    store: Any = None

    def fail(self, event: Ended | Lost) -> None:
        """One process of a split job went wrong, perhaps only since another did."""
        self.failures.append(event)
        self.judged_at = min(self.judged_at, time.monotonic() + GRACE)

    def worst(self) -> Ended | Lost:
        """The cause: too little memory, else a process that is gone, else what was raised first."""

        def rank(event: Ended | Lost) -> int:
            return 1 if isinstance(event, Lost) else 0 if event.state == "out-of-memory" else 2

        return min(self.failures, key=rank)

    def next_look(self) -> float:
        """When time may decide something about it."""
        return min(self.deadline, self.judged_at)


def cause(worker: Worker) -> str:
    """Why a worker's process is gone."""
    code, pid = worker.process.exitcode, worker.process.pid
    if code is not None and code < 0:
        hint = " (the machine may have run out of memory)" if code == -signal.SIGKILL else ""
        return f"worker process {pid} was killed by signal {-code}{hint}"
    return f"worker process {pid} ended with exit code {code}"
