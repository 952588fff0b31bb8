"""Copies between host and device: each way on a stream of its own, ordered by tickets, and nobody waits but who reads.

A ticket is what a copy, or the work on the device so far, will have done. The device waits for one with ``wait``, the
host with ``settle``. Copies begin once the tickets that they come ``after`` are done.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

CopyEvent = Any
"""Known to the mover that made it alone; None is done."""


class CopyEngine(Protocol):
    """Moves bytes; memory on the CPU may stand in for a device."""

    def bring(self, target: Tensor, source: Tensor, after: Sequence[CopyEvent]) -> CopyEvent:
        """From host to device."""

    def send(self, target: Tensor, source: Tensor, after: Sequence[CopyEvent]) -> CopyEvent:
        """From device to host."""

    def mark(self) -> CopyEvent:
        """All that the device has been given to do so far."""

    def wait(self, ticket: CopyEvent) -> None:
        """What the device is given from here on comes after it."""

    def settle(self, ticket: CopyEvent) -> None:
        """The host waits for it."""

    def done(self, ticket: CopyEvent) -> bool:
        """Whether nothing need wait for it any more."""

    def late(self) -> int:
        """How many copies to the device, of those that it waited for since the last call, were not done in time."""


class SyncCopy:
    """Copies at once: for a CPU that stands in for a device."""

    def bring(self, target: Tensor, source: Tensor, after: Sequence[CopyEvent]) -> CopyEvent:
        target.copy_(source)
        return True

    def send(self, target: Tensor, source: Tensor, after: Sequence[CopyEvent]) -> CopyEvent:
        target.copy_(source)

    def mark(self) -> CopyEvent:
        return None

    def wait(self, ticket: CopyEvent) -> None:
        return

    def settle(self, ticket: CopyEvent) -> None:
        return

    def done(self, ticket: CopyEvent) -> bool:
        return True

    def late(self) -> int:
        return 0


class CudaCopy:
    """Two streams beside that of the computation; tickets are events."""

    def __init__(self, device: torch.device) -> None:
        self._inward: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._outward: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # As a number: a torch.device is looked into at every use, which takes longer than all the rest.
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._waits: list[tuple[Any, Any]] = []

    def bring(self, target: Tensor, source: Tensor, after: Sequence[CopyEvent]) -> CopyEvent:
        return self._copy(self._inward, target, source, after, timed=True)

    def send(self, target: Tensor, source: Tensor, after: Sequence[CopyEvent]) -> CopyEvent:
        return self._copy(self._outward, target, source, after, timed=False)

    def mark(self) -> CopyEvent:
        return self._event(torch.cuda.current_stream(self._device), timed=False)

    def wait(self, ticket: CopyEvent) -> None:
        if self.done(ticket):
            return
        stream = torch.cuda.current_stream(self._device)
        if ticket.timed and len(self._waits) < 4096:
            self._waits.append((ticket, self._event(stream, timed=True)))
        stream.wait_event(ticket)

    def settle(self, ticket: CopyEvent) -> None:
        if ticket is not None:
            ticket.synchronize()

    def done(self, ticket: CopyEvent) -> bool:
        return ticket is None or bool(ticket.query())

    def late(self) -> int:
        found, left = 0, []
        for copied, needed in self._waits:
            if copied.query() and needed.query():
                found += copied.elapsed_time(needed) < -0.01  # milliseconds: less is no wait, but the clock
            else:
                left.append((copied, needed))
        self._waits = left
        return found

    def _event(self, stream: Any, timed: bool) -> Any:
        event: Any = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.timed = timed  # which torch does not tell
        event.record(stream)
        return event

    def _copy(self, stream: Any, target: Tensor, source: Tensor, after: Sequence[CopyEvent], timed: bool) -> CopyEvent:
        for ticket in after:
            if not self.done(ticket):
                stream.wait_event(ticket)
        before = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(stream)
        try:
            target.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(before)
        return self._event(stream, timed)


# A thread that prepares what comes next while the program's own waits outside of Python, as in a backward.

T = TypeVar("T")
Work = Callable[[], None]

SWITCH = 1e-4
"""Seconds that either may keep the other from Python meanwhile: a backward comes back to it for a moment whenever a
tensor that Python once knew goes, and would lose up to 5 ms each time."""


class Beside:
    """Runs one thing in the thread, another one here, and returns when both are done: they never see each other's
    halves, so that nothing of either has to be locked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked: SimpleQueue[tuple[Work, Any] | None] = SimpleQueue()
        self._told: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: Thread | None = None

    def __call__(self, there: Work, here: Callable[[], T]) -> T:
        """What ``here`` gives. An error of ``there`` is raised where there is none of ``here``."""
        if self._thread is None:
            # It knows the queues alone: whoever forgets this object ends it.
            self._thread = Thread(target=_serve, args=(self._asked, self._told), name="weft-residency", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._asked.put, None)
        cuda = self._device.type == "cuda"
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH)
        self._asked.put((there, torch.cuda.current_stream(self._device) if cuda else None))
        try:
            found = here()
        finally:
            problem = self._told.get()
            sys.setswitchinterval(before)
        if problem is not None:
            raise problem
        return found


def _serve(asked: SimpleQueue[tuple[Work, Any] | None], told: SimpleQueue[BaseException | None]) -> None:
    while (job := asked.get()) is not None:
        work, stream = job
        problem: BaseException | None = None
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                work()
        except BaseException as caught:
            problem = caught
        del job, work, stream
        told.put(problem)
        problem = None
