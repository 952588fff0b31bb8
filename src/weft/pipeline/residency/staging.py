"""Blocks that lie on disk: copies between the device and a file, by way of the host."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from weft.pipeline.residency.mover import Mover, Ticket


class Staged:
    """For blocks on disk: a thread for each way reads or writes the file, by way of two buffers that are pinned where
    the others are. Tickets are what the threads promise; those of the ``inner`` mover hold for the rest."""

    def __init__(self, inner: Mover, disk: Tensor, largest: int, pin: bool) -> None:
        self._inner = inner
        self._begin, self._end = disk.data_ptr(), disk.data_ptr() + disk.numel()
        self._ways = {way: _Way(way, largest, pin) for way in ("in", "out")}

    def bring(self, target: Tensor, source: Tensor, after: Sequence[Ticket]) -> Ticket:
        if not self._on_disk(source):
            return self._inner.bring(target, source, self._known(after))

        def work(buffer: Tensor) -> Ticket:
            for ticket in after:  # also what was just written must be in the file before it is read
                if isinstance(ticket, Future):
                    self._inner.settle(ticket.result())
            buffer.copy_(source)
            return self._inner.bring(target, buffer, self._known(after))

        return self._ways["in"].submit(self._inner, source.numel(), work)

    def send(self, target: Tensor, source: Tensor, after: Sequence[Ticket]) -> Ticket:
        if not self._on_disk(target):
            return self._inner.send(target, source, self._known(after))

        def work(buffer: Tensor) -> Ticket:
            self._inner.settle(self._inner.send(buffer, source, self._known(after)))
            target.copy_(buffer)
            return None

        return self._ways["out"].submit(self._inner, source.numel(), work)

    def mark(self) -> Ticket:
        return self._inner.mark()

    def wait(self, ticket: Ticket) -> None:
        self._inner.wait(ticket.result() if isinstance(ticket, Future) else ticket)

    def settle(self, ticket: Ticket) -> None:
        self._inner.settle(ticket.result() if isinstance(ticket, Future) else ticket)

    def done(self, ticket: Ticket) -> bool:
        if isinstance(ticket, Future):
            return ticket.done() and self._inner.done(ticket.result())
        return self._inner.done(ticket)

    def late(self) -> int:
        return self._inner.late()

    def _on_disk(self, memory: Tensor) -> bool:
        return self._begin <= memory.data_ptr() < self._end

    def _known(self, after: Sequence[Ticket]) -> list[Ticket]:
        return [ticket.result() if isinstance(ticket, Future) else ticket for ticket in after]


class _Way:
    """A thread, and two buffers that it uses in turn: one is copied while the file is read into the other."""

    def __init__(self, name: str, largest: int, pin: bool) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"weft-disk-{name}")
        self._buffers = [torch.empty(largest, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self._busy: list[Ticket] = [None, None]
        self._turn = 0

    def submit(self, mover: Mover, need: int, work: Any) -> Future[Ticket]:
        def run() -> Ticket:
            turn = self._turn
            self._turn = 1 - turn
            mover.settle(self._busy[turn])
            ticket = self._busy[turn] = work(self._buffers[turn][:need])
            return ticket

        return self._thread.submit(run)
