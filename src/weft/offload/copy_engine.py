"""Copies between host and device: each direction on its own stream, ordered by events; only a reader ever waits.

An event stands for a copy, or for the work that the device was given so far. The device waits for one with ``wait``,
the host with ``synchronize``. A copy begins once the events that it comes ``after`` are done.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

CopyEvent = Any
"""Known to the engine that made it alone; None is done."""


class CopyEngine:
    """Copies bytes at once, for a CPU that stands in for a device."""

    def to_device(self, target: Tensor, source: Tensor, after: Sequence[CopyEvent]) -> CopyEvent:
        target.copy_(source)
        return True

    def to_host(self, target: Tensor, source: Tensor, after: Sequence[CopyEvent]) -> CopyEvent:
        target.copy_(source)

    def record(self) -> CopyEvent:
        """All that the device has been given to do so far."""

    def wait(self, event: CopyEvent) -> None:
        """What the device is given from here on comes after the event."""

    def synchronize(self, event: CopyEvent) -> None:
        """The host waits for the event."""

    def done(self, event: CopyEvent) -> bool:
        """Whether nothing needs to wait for the event any more."""
        return True

    def count_late(self) -> int:
        """How many copies to the device that were waited for since the last call were not done in time."""
        return 0


class CudaCopy(CopyEngine):
    """Two streams beside that of the computation; the events are CUDA's."""

    def __init__(self, device: torch.device) -> None:
        self._to_device: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._to_host: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A number: torch parses a torch.device at every use, which takes longer than all the rest.
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._waits: list[tuple[Any, Any]] = []

    def to_device(self, target: Tensor, source: Tensor, after: Sequence[CopyEvent]) -> CopyEvent:
        return self._copy(self._to_device, target, source, after, timed=True)

    def to_host(self, target: Tensor, source: Tensor, after: Sequence[CopyEvent]) -> CopyEvent:
        return self._copy(self._to_host, target, source, after, timed=False)

    def record(self) -> CopyEvent:
        return self._record(torch.cuda.current_stream(self._device), timed=False)

    def wait(self, event: CopyEvent) -> None:
        if self.done(event):
            return
        stream = torch.cuda.current_stream(self._device)
        if event.timed and len(self._waits) < 4096:
            self._waits.append((event, self._record(stream, timed=True)))
        stream.wait_event(event)

    def synchronize(self, event: CopyEvent) -> None:
        if event is not None:
            event.synchronize()

    def done(self, event: CopyEvent) -> bool:
        return event is None or bool(event.query())

    def count_late(self) -> int:
        misses, open_waits = 0, []
        for copied, needed in self._waits:
            if copied.query() and needed.query():
                misses += copied.elapsed_time(needed) < -0.01  # milliseconds; less is the resolution of the clock
            else:
                open_waits.append((copied, needed))
        self._waits = open_waits
        return misses

    def _record(self, stream: Any, timed: bool) -> Any:
        event: Any = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.timed = timed  # torch has no getter for it
        event.record(stream)
        return event

    def _copy(self, stream: Any, target: Tensor, source: Tensor, after: Sequence[CopyEvent], timed: bool) -> CopyEvent:
        for event in after:
            if not self.done(event):
                stream.wait_event(event)
        before = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(stream)
        try:
            target.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(before)
        return self._record(stream, timed)


# A helper thread that prefetches while the main thread waits outside of Python, as in a backward.

T = TypeVar("T")
Work = Callable[[], None]

SWITCH_INTERVAL = 1e-4
"""Seconds for which one thread may keep the other from Python meanwhile. A backward returns to Python for a moment
whenever a tensor that Python once knew is freed, and would lose up to 5 ms each time at Python's default."""


class BackgroundWorker:
    """Runs one function in the thread and another one here, and returns when both are done.

    No lock is needed: neither ever sees the other's work half done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: SimpleQueue[tuple[Work, Any] | None] = SimpleQueue()
        self._results: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: Thread | None = None

    def __call__(self, background: Work, foreground: Callable[[], T]) -> T:
        """The result of ``foreground``. An error of ``background`` is raised where ``foreground`` raised none."""
        if self._thread is None:
            # The thread holds the queues alone, so that dropping this object ends it.
            arguments = (self._jobs, self._results)
            self._thread = Thread(target=_serve, args=arguments, name="weft-offload", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        cuda = self._device.type == "cuda"
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._jobs.put((background, torch.cuda.current_stream(self._device) if cuda else None))
        try:
            result = foreground()
        finally:
            problem = self._results.get()
            sys.setswitchinterval(before)
        if problem is not None:
            raise problem
        return result


def _serve(jobs: SimpleQueue[tuple[Work, Any] | None], results: SimpleQueue[BaseException | None]) -> None:
    while (job := jobs.get()) is not None:
        work, stream = job
        problem: BaseException | None = None
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                work()
        except BaseException as caught:
            problem = caught
        del job, work, stream
        results.put(problem)
        problem = None
