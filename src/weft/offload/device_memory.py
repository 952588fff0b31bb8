"""The memory of a device that layers may take: one allocation, in which the policy says what lies where.

Everything that leaves or comes is a copy of the mover. Memory that was given up is not overwritten before the copy, or
the computation, that read it last is done: tickets say so, and nothing waits for them but the next copy to that place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import TrainError
from weft.offload.allocator import AddressAllocator, FreeSpan
from weft.offload.copy_engine import CopyEngine, CopyEvent
from weft.offload.host_memory import Host
from weft.offload.layer_memory import MemoryBlock
from weft.offload.layout import ALIGNED
from weft.offload.policy import Policy
from weft.utils.units import format_bytes

MANY = 64
"""Places that were given up; where there are more, those are forgotten that nothing has to wait for any more."""

Heard = Callable[[str, MemoryBlock], None]


@dataclass(slots=True)
class Traffic:
    """Bytes that were moved so far, and the most that lay on the device at once."""

    brought: int = 0
    sent: int = 0
    peak: int = 0


class Device:
    """A memory of ``room`` bytes for what micro-batches use, and ``reserve`` bytes for a layer that is updated late."""

    def __init__(
        self,
        device: torch.device,
        room: int,
        reserve: int,
        host: Host,
        mover: CopyEngine,
        next_use: Callable[[MemoryBlock], float],
    ) -> None:
        self.memory = allocated(room + reserve, device)
        self.typed = Typed(self.memory)
        self._first = int(self.memory.storage_offset())
        self.host, self.mover = host, mover
        self.traffic = Traffic()
        self.on_change: Heard | None = None
        self._policy = Policy(room, lambda block: block.pinned, next_use)
        self.room = room
        self._reserve: AddressAllocator[MemoryBlock] = AddressAllocator(reserve)
        self._freed: list[tuple[FreeSpan, list[CopyEvent]]] = []

    @property
    def blocks(self) -> list[MemoryBlock]:
        """All that is there."""
        return [*self._policy.ground.spans, *self._reserve.spans]

    @property
    def taken(self) -> int:
        """Bytes that something lies on."""
        return self._policy.ground.taken + self._reserve.taken

    def shares(self) -> tuple[int, int, int, int]:
        """Bytes that lie there and have been waited for, that arrive, that leave, and that must stay."""
        blocks = self.blocks
        arriving = sum(block.size for block in blocks if not self.mover.done(block.arrival))
        leaving = sum(span.size for span, open in self._freed if not all(map(self.mover.done, open)))
        return self.taken - arriving, arriving, leaving, sum(block.size for block in blocks if block.pinned)

    def holds(self, block: MemoryBlock) -> bool:
        return block in self._policy.ground.spans or block in self._reserve.spans

    def of(self, block: MemoryBlock) -> Tensor:
        """The memory of a block that is there."""
        span = self._span(block)
        return self._at(span, span.size)

    def begin(self, block: MemoryBlock) -> int:
        """Where a block that is there begins, in bytes of the storage."""
        return self._first + self._span(block).start

    def later(self, blocks: Iterable[MemoryBlock]) -> None:
        """The next use of these may be farther away than before."""
        self._policy.later(blocks)

    def want(self, blocks: Sequence[MemoryBlock]) -> bool:
        """All of these are there afterwards, or on their way; False, with nothing changed, where that cannot be."""
        change = self._policy.want({block: block.size for block in blocks})
        if change is None:
            return False
        for key, span in change.gone:
            self._send(key, span)
        for key, span in change.come:
            self._bring(key, span)
        self.traffic.peak = max(self.traffic.peak, self.taken)
        return True

    def squeeze(self, block: MemoryBlock) -> bool:
        """It comes into the reserve, until ``release`` sends it away; False where that is taken or too small."""
        span = self._reserve.put(block, block.size)
        if span is None:
            return False
        self._bring(block, FreeSpan(self.room + span.start, span.size))
        self.traffic.peak = max(self.traffic.peak, self.taken)
        return True

    def release(self, block: MemoryBlock) -> None:
        """It leaves the reserve, if it is there."""
        if block in self._reserve.spans:
            span = self._reserve.free(block)
            self._send(block, FreeSpan(self.room + span.start, span.size))

    def empty(self) -> None:
        """All that may leave does, and the host has all of it."""
        for key in [key for key in self._policy.ground.spans if not key.pinned]:
            self._send(key, self._policy.ground.free(key))
        for _, tickets in self._freed:
            for ticket in tickets:
                self.mover.settle(ticket)
        self._freed.clear()

    def forget(self, block: MemoryBlock) -> None:
        """Nobody wants the block any more, or its place."""
        if self.holds(block):
            span = self._policy.ground.free(block)
            self._freed.append((span, block.after if block.version is None else [self.mover.mark(), block.arrival]))
        if block.host is not None and block.version is not None:
            self.mover.settle(block.departure)
            self.mover.settle(block.arrival)
            self.host.give(block.host)

    def rename(self, spare: MemoryBlock, block: MemoryBlock) -> None:
        """A block takes a place that was kept free."""
        self._usable(spare)
        self._policy.place(block, self._policy.ground.free(spare))

    def fork(self, main: MemoryBlock, spare: MemoryBlock, version: MemoryBlock) -> None:
        """A layer's block goes on, with its values, in a place that was kept free; its weights stay where they were, as
        an older version."""
        ground = self._policy.ground
        self._usable(spare)
        old, new = ground.free(main), ground.free(spare)
        self._policy.place(version, FreeSpan(old.start, version.size))
        self._policy.place(main, new)
        length = len(main.filled)
        self._at(new, length).copy_(self._at(old, length))
        if version.size < old.size:
            self._freed.append((FreeSpan(old.start + version.size, old.size - version.size), [self.mover.mark()]))
        main.changed = True

    def put_aside(self, block: MemoryBlock, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A version goes to the host: these parameters of a layer that is here, or restored ones that are not."""
        block.host = self.host.take(block.size)
        main = block.home.main
        if not self.holds(main) or tensors[0].data_ptr() != block.home.weights.parameters[0].data_ptr():
            return block.home.aside(tensors, block.host)
        block.departure = self.mover.send(block.host, self.of(main)[: block.size], [self.mover.mark()])
        self.mover.wait(block.departure)  # the update comes after
        self.traffic.sent += block.size
        return block.home.laid(block.host)

    def _usable(self, spare: MemoryBlock) -> None:
        for ticket in spare.after:
            self.mover.wait(ticket)

    def _span(self, block: MemoryBlock) -> FreeSpan:
        span = self._policy.ground.spans.get(block)
        if span is None:
            span = self._reserve.spans[block]
            return FreeSpan(self.room + span.start, span.size)
        return span

    def _at(self, span: FreeSpan, length: int) -> Tensor:
        return self.memory[span.start : span.start + length]

    def _send(self, block: MemoryBlock, span: FreeSpan) -> None:
        tickets = [block.used, block.arrival]
        if block.host is None:  # an older version, made on the device
            block.host = self.host.take(block.size)
            block.changed = True
        if block.changed:
            there = block.filled
            block.departure = self.mover.send(there, self._at(span, len(there)), tickets)
            self.traffic.sent += len(there)
            tickets = [block.departure]
        block.changed, block.arrival, block.used = False, None, None
        if any(ticket is not None for ticket in tickets):
            self._freed.append((span, tickets))
        block.home.leave(block)
        if self.on_change is not None:
            self.on_change("leaving", block)

    def _bring(self, block: MemoryBlock, span: FreeSpan) -> None:
        after = self._claim(span)
        if block.host is None:  # room that is kept free: whoever takes it waits
            block.after = after
            return
        there = block.filled
        after.append(block.departure)
        block.arrival = self.mover.bring(self._at(span, len(there)), there, after)
        self.traffic.brought += len(there)
        block.home.come(block)
        if self.on_change is not None:
            self.on_change("arriving", block)

    def _claim(self, span: FreeSpan) -> list[CopyEvent]:
        """What must be over before anything is written there."""
        found: list[CopyEvent] = []
        if len(self._freed) > MANY:
            self._freed = [(old, open) for old, open in self._freed if not all(map(self.mover.done, open))]
        begin, end = span.start, span.end
        met = [pair for pair in self._freed if pair[0][0] < end and begin < pair[0][0] + pair[0][1]]
        if not met:
            return found
        self._freed = [pair for pair in self._freed if not (pair[0][0] < end and begin < pair[0][0] + pair[0][1])]
        for old, tickets in met:
            found += [ticket for ticket in tickets if ticket is not None]
            if old.start < begin:
                self._freed.append((FreeSpan(old.start, begin - old.start), tickets))
            if end < old.end:
                self._freed.append((FreeSpan(end, old.end - end), tickets))
        return found


class Typed(dict[torch.dtype, Tensor]):
    """A memory of bytes seen as one of any type; offsets count from where its storage begins."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self._memory = memory

    def __missing__(self, dtype: torch.dtype) -> Tensor:
        self[dtype] = self._memory.view(dtype)
        return self[dtype]


def allocated(need: int, device: torch.device) -> Tensor:
    """The one allocation, at an address as torch's own have."""
    try:
        raw = torch.empty(need + (ALIGNED if device.type == "cpu" else 0), dtype=torch.uint8, device=device)
    except RuntimeError as problem:
        raise TrainError(
            f"the device has no {format_bytes(need)} for layers ({str(problem).splitlines()[0]}): "
            f"lower residency.budget"
        ) from None
    begin = -raw.data_ptr() % ALIGNED
    return raw[begin : begin + need]
