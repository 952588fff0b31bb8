"""Copies between host and device: each way on a stream of its own, ordered by tickets, and nobody waits but who reads.

A ticket is what a copy, or the work on the device so far, will have done. The device waits for one with ``wait``, the
host with ``settle``. Copies begin once the tickets that they come ``after`` are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Ticket = Any
"""Known to the mover that made it alone; None is done."""


class Mover(Protocol):
    """Moves bytes; memory on the CPU may stand in for a device."""

    def bring(self, target: Tensor, source: Tensor, after: Sequence[Ticket]) -> Ticket:
        """From host to device."""

    def send(self, target: Tensor, source: Tensor, after: Sequence[Ticket]) -> Ticket:
        """From device to host."""

    def mark(self) -> Ticket:
        """All that the device has been given to do so far."""

    def wait(self, ticket: Ticket) -> None:
        """What the device is given from here on comes after it."""

    def settle(self, ticket: Ticket) -> None:
        """The host waits for it."""

    def done(self, ticket: Ticket) -> bool:
        """Whether nothing need wait for it any more."""

    def late(self) -> int:
        """How many copies to the device, of those that it waited for since the last call, were not done in time."""


class Plain:
    """Copies at once: for a CPU that stands in for a device."""

    def bring(self, target: Tensor, source: Tensor, after: Sequence[Ticket]) -> Ticket:
        target.copy_(source)
        return True

    def send(self, target: Tensor, source: Tensor, after: Sequence[Ticket]) -> Ticket:
        target.copy_(source)

    def mark(self) -> Ticket:
        return None

    def wait(self, ticket: Ticket) -> None:
        return

    def settle(self, ticket: Ticket) -> None:
        return

    def done(self, ticket: Ticket) -> bool:
        return True

    def late(self) -> int:
        return 0


class Cuda:
    """Two streams beside that of the computation; tickets are events."""

    def __init__(self, device: torch.device) -> None:
        self._inward: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._outward: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # As a number: a torch.device is looked into at every use, which takes longer than all the rest.
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._waits: list[tuple[Any, Any]] = []

    def bring(self, target: Tensor, source: Tensor, after: Sequence[Ticket]) -> Ticket:
        return self._copy(self._inward, target, source, after, timed=True)

    def send(self, target: Tensor, source: Tensor, after: Sequence[Ticket]) -> Ticket:
        return self._copy(self._outward, target, source, after, timed=False)

    def mark(self) -> Ticket:
        return self._event(torch.cuda.current_stream(self._device), timed=False)

    def wait(self, ticket: Ticket) -> None:
        if self.done(ticket):
            return
        stream = torch.cuda.current_stream(self._device)
        if ticket.timed and len(self._waits) < 4096:
            self._waits.append((ticket, self._event(stream, timed=True)))
        stream.wait_event(ticket)

    def settle(self, ticket: Ticket) -> None:
        if ticket is not None:
            ticket.synchronize()

    def done(self, ticket: Ticket) -> bool:
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

    def _copy(self, stream: Any, target: Tensor, source: Tensor, after: Sequence[Ticket], timed: bool) -> Ticket:
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
