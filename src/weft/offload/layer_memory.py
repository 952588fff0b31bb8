"""One layer between host and device: which memory its tensors have now, and its older versions.

The layer's parameters and optimizer state are the same tensor objects all the time; only the memory behind them
(``.data``) changes. While the layer is not on the device, that is its block on the host, which holds all that was
written back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from weft.engine.optimizer import LayerOptimizer
from weft.engine.weight_versions import VersionedLayer
from weft.offload.copy_engine import CopyEvent
from weft.offload.layout import BlockLayout, TensorSlot, copy_into

if TYPE_CHECKING:
    from weft.offload.device_memory import DeviceMemory


class MemoryBlock:
    """Something that can lie on the device: a layer's own block, an older version, or spare room for one.

    ``host`` is its memory there; of a version only once it was evicted, of spare room never.
    """

    __slots__ = ("dirty", "evicted", "host", "last_use", "layer", "loaded", "size", "version", "writable")

    def __init__(self, layer: LayerMemory, size: int, version: int | None = None, host: Tensor | None = None) -> None:
        self.layer, self.size, self.version, self.host = layer, size, version, host
        self.dirty = False
        """Whether the device has values that the host does not."""
        self.loaded: CopyEvent = None
        self.evicted: CopyEvent = None
        self.last_use: CopyEvent = None
        self.writable: list[CopyEvent] = []
        """Of spare room: the events that must be done before it is written to."""

    @property
    def pinned(self) -> bool:
        """Whether it must stay where it is."""
        return self.layer.pinned(self)

    @property
    def copied_host(self) -> Tensor:
        """The part of its host memory that is copied."""
        assert self.host is not None
        return self.layer.copied_host if self is self.layer.main else self.host


class LayerMemory:
    """A layer's own block and those of its versions. ``users`` are the micro-batches that keep it on the device."""

    def __init__(
        self,
        weights: VersionedLayer,
        optimizer: LayerOptimizer | None,
        layout: BlockLayout,
        host: Tensor,
        device: DeviceMemory,
    ) -> None:
        self.weights, self.layout = weights, layout
        self._optimizer, self._device = optimizer, device
        self.main = MemoryBlock(self, layout.bytes, host=host)
        self.versions: dict[int, MemoryBlock] = {}
        self.spares: list[MemoryBlock] = []
        self.users: set[int] = set()
        self.pins = 0
        """Open ``pinned_on_device`` blocks."""
        self._parameters = list(weights.module.parameters())
        self._bound: list[tuple[Tensor, TensorSlot]] = list(zip(self._parameters, layout.weights, strict=True))
        trained = {id(p) for p in weights.parameters}
        self._trained_slots = [slot for p, slot in self._bound if id(p) in trained]
        self._with_state: set[int] = set()
        self.lacks_state = optimizer is not None and any(layout.states)
        """Whether an update may create optimizer state that does not exist yet."""
        copy_into(self._parameters, layout.weights, host)
        self._host_views = [slot.view(host) for slot in layout.weights]
        self.copied_host = host
        """The part of the host block that is copied: without the optimizer state where there is none yet."""
        self._bind(None)
        self.bind_optimizer_state()
        weights.memory = self

    @property
    def spare_size(self) -> int:
        """Room that an update may need beside the block, as micro-batches may still read the version that it ends."""
        if self.weights.single_copy:
            return 0
        return self.layout.weight_bytes if self.weights.inplace is not None else self.layout.copied_bytes

    def pinned(self, block: MemoryBlock) -> bool:
        """The layer itself is pinned while it has users, and a version while one of them reads it."""
        if self.pins:
            return True
        if block is self.main:
            return bool(self.users)
        if block.version is None:
            return True  # room that was reserved
        return any(self.block_read_by(n) is block for n in self.users)

    def block_read_by(self, n: int) -> MemoryBlock:
        """The block of the version that the forward of micro-batch n reads, as far as it is known by now."""
        if not self.versions:
            return self.main
        version = self.weights.schedule.forward_reads(n)
        begins = [begin for begin in self.versions if begin <= version] if version < self.weights.newest else []
        # A version that is gone was read by a micro-batch that has only its updates left.
        return self.versions[max(begins)] if begins else self.main

    def versions_read(self) -> set[int]:
        """The versions that its users read. For each, spare room was reserved for the update that ends it."""
        return {self.weights.schedule.forward_reads(n) for n in self.users}

    def wait(self, begin: int | None) -> None:
        """The device is about to read the newest version (None), or an older one."""
        if begin is not None and self.weights.inplace is not None:
            self.wait(None)  # the older one is swapped with the newest, which is backed up first
        block = self.main if begin is None else self.versions[begin]
        if block.loaded is not None:
            self._device.copy_engine.wait(block.loaded)
            block.loaded = None
            if self._device.on_change is not None:
                self._device.on_change("resident", block)

    def synchronize(self) -> None:
        """The host waits until it may read all tensors of the layer."""
        for block in (self.main, *self.versions.values()):
            if self._device.holds(block):
                self._device.copy_engine.wait(block.loaded)
            else:
                self._device.copy_engine.synchronize(block.evicted)
                block.evicted = None

    def rebind(self, block: MemoryBlock) -> None:
        """Binds the tensors of a block to where it is now: on the device, or on the host."""
        there = self._device.holds(block)
        if block is self.main:
            self._bind(self._device.byte_offset(block) if there else None)
            return
        memory = self._device.bytes_of(block) if there else block.host
        assert block.version is not None
        assert memory is not None
        for tensor, slot in zip(self.weights.kept[block.version], self._trained_slots, strict=True):
            tensor.data = slot.view(memory)

    def stash(self, begin: int) -> list[Tensor]:
        """Before an update: memory of its own for the newest version, which becomes an older one.

        It stays on the device where a user reads it, or will; else it goes to the host.
        """
        self.wait(None)
        reads, slot = self.weights.schedule.forward_reads, self.weights.slot
        read = any(begin <= reads(n) <= slot for n in self.users)
        block = self.versions[begin] = MemoryBlock(self, self.layout.weight_bytes, begin)
        if not read:
            return self._device.evict_version(block, self.weights.parameters)
        # Every version that a user reads came with spare room, so there is always some left.
        spare = self.spares.pop()
        if self.weights.inplace is not None:
            self._device.take_spare(spare, block)
            return self.copy_to(self._device.bytes_of(block), self.weights.parameters)
        kept = self.weights.tensors_at(self.weights.newest)  # what forwards under way compute with
        self._device.copy_on_write(self.main, spare, block)
        self._bind(self._device.byte_offset(self.main))
        return kept

    def drop(self, begin: int) -> None:
        block = self.versions.pop(begin)
        self._device.free(block)

    def bind_optimizer_state(self) -> None:
        """Moves newly created optimizer state into the block, wherever that is."""
        block, host = self.main, self.main.host
        assert host is not None
        memory = self._device.bytes_of(block) if self._device.holds(block) else host
        for parameter, slots in zip(self._parameters, self.layout.states, strict=True):
            if id(parameter) in self._with_state or not slots or self._optimizer is None:
                continue
            optimizer, _ = self._optimizer.optimizer(parameter)
            state = optimizer.state.get(parameter)
            for key, value in (state or {}).items():
                slot = slots.get(key)
                # What an optimizer keeps on the host, such as a count of steps, stays there.
                if slot is None or not isinstance(value, Tensor) or value.device != memory.device:
                    continue
                target = slot.view(memory)
                target.copy_(value)
                value.data = target
                self._bound.append((value, slot))
                self._host_views.append(slot.view(host))
                self._with_state.add(id(parameter))
        expected = {id(p) for p, slots in zip(self._parameters, self.layout.states, strict=True) if slots}
        self.lacks_state = self._optimizer is not None and self._with_state != expected
        self.copied_host = host[: self.layout.copied_bytes if self._with_state else self.layout.weight_bytes]

    def bind_restored(self) -> None:
        """After versions, state and gradients were restored from a checkpoint, while the layer was on the host."""
        self._with_state.clear()
        self.versions.clear()
        del self._bound[len(self._parameters) :], self._host_views[len(self._parameters) :]
        self.bind_optimizer_state()
        for begin, tensors in list(self.weights.kept.items()):
            block = self.versions[begin] = MemoryBlock(self, self.layout.weight_bytes, begin)
            self.weights.kept[begin] = self._device.evict_version(block, tensors)
        if self.weights.pending is not None:
            pending, device = self.weights.pending, self._device.memory.device
            pending.gradients = [gradient.to(device) for gradient in pending.gradients]
            pending.records = [[tensor.to(device) for tensor in record] for record in pending.records]

    def copy_to(self, memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies the trained parameters, as a version keeps them, into some memory of their block."""
        copy_into(tensors, self._trained_slots, memory)
        return self.trained_views(memory)

    def trained_views(self, memory: Tensor) -> list[Tensor]:
        """The trained parameters as they lie in some memory of their block."""
        return [slot.trainable_view(memory) for slot in self._trained_slots]

    def _bind(self, begin: int | None) -> None:
        """Binds the layer's tensors to this byte of the device's storage, or to the host."""
        if begin is None:
            for (tensor, _), view in zip(self._bound, self._host_views, strict=True):
                tensor.data = view
        else:
            typed_view = self._device.typed_view
            for tensor, slot in self._bound:
                start = (begin + slot.offset) // slot.itemsize
                tensor.data = typed_view(slot.dtype).as_strided(slot.size, slot.stride, start)
        self.weights.on_rebind()
        inplace = self.weights.inplace
        if inplace is not None and begin is None:
            inplace.rebind(None, None)
        elif inplace is not None:
            memory = self._device.bytes_of(self.main)
            casts = [None if slot is None else slot.view(memory) for slot in self.layout.casts]
            inplace.rebind(casts, [slot.view(memory) for slot in self.layout.backups if slot is not None])
