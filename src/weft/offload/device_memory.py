"""The device memory that layers may take: one allocation, in which the eviction policy says what lies where.

All that comes and goes is copied by the copy engine. Freed memory is not overwritten before the copy, or the
computation, that read it last is done: events stand for these, and only the next copy to that place waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from weft.errors import TrainError
from weft.offload.allocator import AddressAllocator, AddressSpan
from weft.offload.copy_engine import CopyEngine, CopyEvent
from weft.offload.host_memory import HostMemory
from weft.offload.layer_memory import MemoryBlock
from weft.offload.layout import ALIGNMENT
from weft.offload.policy import EvictionPolicy
from weft.utils.units import format_bytes

MAX_FREED = 64
"""Freed spans that are remembered; where there are more, those with all events done are forgotten."""

OnChange = Callable[[str, MemoryBlock], None]
"""Called with "arriving", "resident" or "leaving", the words of traces."""


class DeviceMemory:
    """``capacity`` bytes for what micro-batches use, and ``reserve`` bytes for a layer whose update comes late."""

    def __init__(
        self,
        device: torch.device,
        capacity: int,
        reserve: int,
        host: HostMemory,
        copy_engine: CopyEngine,
        next_use: Callable[[MemoryBlock], float],
    ) -> None:
        self.memory = allocate_device(capacity + reserve, device)
        self.typed_view: Callable[[torch.dtype], Tensor] = cache(self.memory.view)
        """The memory as another type; offsets count from where its storage begins."""
        self._storage_offset = int(self.memory.storage_offset())
        self.host, self.copy_engine = host, copy_engine
        self.loaded_bytes = self.evicted_bytes = self.peak_bytes = 0
        self.on_change: OnChange | None = None
        self.capacity = capacity
        self.policy = EvictionPolicy(capacity, lambda block: block.pinned, next_use)
        self._allocator = self.policy.allocator
        self._reserve: AddressAllocator[MemoryBlock] = AddressAllocator(reserve)
        self._freed: list[tuple[AddressSpan, list[CopyEvent]]] = []

    @property
    def blocks(self) -> list[MemoryBlock]:
        return [*self._allocator.spans, *self._reserve.spans]

    @property
    def used(self) -> int:
        return self._allocator.used + self._reserve.used

    def usage(self) -> tuple[int, int, int, int]:
        """Bytes that are resident (there and waited for), arriving, leaving, and pinned."""
        blocks = self.blocks
        arriving = sum(block.size for block in blocks if not self.copy_engine.done(block.loaded))
        leaving = sum(span.size for span, events in self._freed if not all(map(self.copy_engine.done, events)))
        return self.used - arriving, arriving, leaving, sum(block.size for block in blocks if block.pinned)

    def holds(self, block: MemoryBlock) -> bool:
        return block in self._allocator.spans or block in self._reserve.spans

    def bytes_of(self, block: MemoryBlock) -> Tensor:
        span = self._span(block)
        return self._bytes_at(span, span.size)

    def byte_offset(self, block: MemoryBlock) -> int:
        """Where a block on the device begins, in bytes of the storage."""
        return self._storage_offset + self._span(block).start

    def load(self, blocks: Sequence[MemoryBlock]) -> bool:
        """Brings all of these to the device; False, with nothing changed, where they cannot be there together."""
        relocation = self.policy.place({block: block.size for block in blocks})
        if relocation is None:
            return False
        for block, span in relocation.evictions:
            self._evict(block, span)
        for block, span in relocation.loads:
            self._load(block, span)
        return True

    def place_in_reserve(self, block: MemoryBlock) -> bool:
        """Loads a block into the reserve, until ``release``; False where that is taken or too small."""
        if self._reserve.allocate(block, block.size) is None:
            return False
        self._load(block, self._span(block))
        return True

    def release(self, block: MemoryBlock) -> None:
        """Evicts the block from the reserve, if it is there."""
        if block in self._reserve.spans:
            span = self._span(block)
            self._reserve.free(block)
            self._evict(block, span)

    def evict_all(self) -> None:
        """Evicts all that is not pinned, and waits until the host has it."""
        for block in [block for block in self._allocator.spans if not block.pinned]:
            self._evict(block, self._allocator.free(block))
        for _, events in self._freed:
            for event in events:
                self.copy_engine.synchronize(event)
        self._freed.clear()

    def free(self, block: MemoryBlock) -> None:
        """The block is needed no more, on the device or on the host."""
        if self.holds(block):
            span = self._allocator.free(block)
            events = block.writable if block.version is None else [self.copy_engine.record(), block.loaded]
            self._freed.append((span, events))
        if block.host is not None and block.version is not None:
            self.copy_engine.synchronize(block.evicted)
            self.copy_engine.synchronize(block.loaded)
            self.host.give_back(block.host)

    def take_spare(self, spare: MemoryBlock, block: MemoryBlock) -> None:
        """A block takes the place of spare room."""
        self._wait_writable(spare)
        self.policy.place_at(block, self._allocator.free(spare))

    def copy_on_write(self, main: MemoryBlock, spare: MemoryBlock, version: MemoryBlock) -> None:
        """Copies a layer's block into spare room, where updates go on; the old weights stay as an older version."""
        self._wait_writable(spare)
        old, new = self._allocator.free(main), self._allocator.free(spare)
        self.policy.place_at(version, AddressSpan(old.start, version.size))
        self.policy.place_at(main, new)
        length = len(main.copied_host)
        self._bytes_at(new, length).copy_(self._bytes_at(old, length))
        if version.size < old.size:
            rest = AddressSpan(old.start + version.size, old.size - version.size)
            self._freed.append((rest, [self.copy_engine.record()]))
        main.dirty = True

    def evict_version(self, block: MemoryBlock, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sends a version to the host: parameters of a layer that is on the device, or restored ones that are not."""
        block.host = self.host.take(block.size)
        main = block.layer.main
        if not self.holds(main) or tensors[0].data_ptr() != block.layer.weights.parameters[0].data_ptr():
            return block.layer.copy_to(block.host, tensors)
        source = self.bytes_of(main)[: block.size]
        block.evicted = self.copy_engine.to_host(block.host, source, [self.copy_engine.record()])
        self.copy_engine.wait(block.evicted)  # the update comes after
        self.evicted_bytes += block.size
        return block.layer.trained_views(block.host)

    def _wait_writable(self, spare: MemoryBlock) -> None:
        for event in spare.writable:
            self.copy_engine.wait(event)

    def _span(self, block: MemoryBlock) -> AddressSpan:
        span = self._allocator.spans.get(block)
        if span is None:
            span = self._reserve.spans[block]
            return AddressSpan(self.capacity + span.start, span.size)
        return span

    def _bytes_at(self, span: AddressSpan, length: int) -> Tensor:
        return self.memory[span.start : span.start + length]

    def _evict(self, block: MemoryBlock, span: AddressSpan) -> None:
        events = [block.last_use, block.loaded]
        if block.host is None:  # an older version, made on the device
            block.host = self.host.take(block.size)
            block.dirty = True
        if block.dirty:
            target = block.copied_host
            block.evicted = self.copy_engine.to_host(target, self._bytes_at(span, len(target)), events)
            self.evicted_bytes += len(target)
            events = [block.evicted]
        block.dirty, block.loaded, block.last_use = False, None, None
        if any(event is not None for event in events):
            self._freed.append((span, events))
        block.layer.rebind(block)
        if self.on_change is not None:
            self.on_change("leaving", block)

    def _load(self, block: MemoryBlock, span: AddressSpan) -> None:
        after = self._claim(span)
        self.peak_bytes = max(self.peak_bytes, self.used)
        if block.host is None:  # spare room: whoever takes it waits
            block.writable = after
            return
        source = block.copied_host
        after.append(block.evicted)
        block.loaded = self.copy_engine.to_device(self._bytes_at(span, len(source)), source, after)
        self.loaded_bytes += len(source)
        block.layer.rebind(block)
        if self.on_change is not None:
            self.on_change("arriving", block)

    def _claim(self, span: AddressSpan) -> list[CopyEvent]:
        """The events that must be done before anything is written to the span."""
        if len(self._freed) > MAX_FREED:
            self._freed = [(old, events) for old, events in self._freed if not all(map(self.copy_engine.done, events))]
        start, end = span.start, span.end
        # By index: the properties of a named tuple cost here.
        overlapping = [pair for pair in self._freed if pair[0][0] < end and start < pair[0][0] + pair[0][1]]
        if not overlapping:
            return []
        self._freed = [pair for pair in self._freed if not (pair[0][0] < end and start < pair[0][0] + pair[0][1])]
        pending: list[CopyEvent] = []
        for old, events in overlapping:
            pending += [event for event in events if event is not None]
            if old.start < start:
                self._freed.append((AddressSpan(old.start, start - old.start), events))
            if end < old.end:
                self._freed.append((AddressSpan(end, old.end - end), events))
        return pending


def allocate_device(size: int, device: torch.device) -> Tensor:
    """The one allocation, aligned as torch's own are."""
    try:
        raw = torch.empty(size + (ALIGNMENT if device.type == "cpu" else 0), dtype=torch.uint8, device=device)
    except RuntimeError as problem:
        raise TrainError(
            f"the device has no {format_bytes(size)} for layers ({str(problem).splitlines()[0]}): lower offload.budget"
        ) from None
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size]
