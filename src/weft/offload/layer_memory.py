"""One layer between host and device: which memory its tensors have just now, and its older versions.

The layer's parameters and optimizer state are the same tensors all the time; only the memory that they stand for
changes (``.data``). While the layer is away, that is its block on the host, which holds all that the device wrote back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from weft.engine.optimizer import LayerOptimizer
from weft.engine.weight_versions import VersionedLayer
from weft.offload.copy_engine import CopyEvent
from weft.offload.layout import BlockLayout, Part, copied

if TYPE_CHECKING:
    from weft.offload.device_memory import Device


class MemoryBlock:
    """Something that lies on the device or does not: a layer's own block, an older version, or room kept free for one.

    ``host`` is its memory there; of a version only where that has been sent away.
    """

    __slots__ = ("after", "arrival", "changed", "departure", "home", "host", "size", "used", "version")

    def __init__(self, home: LayerMemory, size: int, version: int | None = None, host: Tensor | None = None) -> None:
        self.home, self.size, self.version, self.host = home, size, version, host
        self.changed = False
        """Whether the device has what the host does not."""
        self.arrival: CopyEvent = None
        self.departure: CopyEvent = None
        self.used: CopyEvent = None
        self.after: list[CopyEvent] = []
        """Of room that is kept free: what must be over before it is written to."""

    @property
    def pinned(self) -> bool:
        """Whether it must stay where it is."""
        return self.home.pinned(self)

    @property
    def filled(self) -> Tensor:
        """What of its memory on the host moves."""
        assert self.host is not None
        return self.home.filled if self is self.home.main else self.host


class LayerMemory:
    """A layer's own block and those of its versions. ``users`` are the micro-batches that have it at hand."""

    def __init__(
        self, weights: VersionedLayer, updater: LayerOptimizer | None, layout: BlockLayout, host: Tensor, device: Device
    ) -> None:
        self.weights, self.layout = weights, layout
        self._updater, self._device = updater, device
        self.main = MemoryBlock(self, layout.bytes, host=host)
        self.versions: dict[int, MemoryBlock] = {}
        self.spares: list[MemoryBlock] = []
        self.users: set[int] = set()
        self.lent = 0
        self._parameters = list(weights.module.parameters())
        self._bound: list[tuple[Tensor, Part]] = list(zip(self._parameters, layout.weights, strict=True))
        trained = {id(p) for p in weights.parameters}
        self._parts = [part for p, part in self._bound if id(p) in trained]
        self._stateful: set[int] = set()
        self.is_new = updater is not None and any(layout.states)
        """Whether an update may make optimizer state that was not there."""
        copied(self._parameters, layout.weights, host)
        self._there = [part.view(host) for part in layout.weights]
        self.filled = host
        """What of the block on the host moves: there may be no optimizer state yet."""
        self._bind(None)
        self.adopt()
        weights.home = self

    @property
    def name(self) -> str:
        return self.weights.layer.name

    @property
    def spare_size(self) -> int:
        """What an update may need beside the block, since micro-batches may still read the version that it ends."""
        if self.weights.single:
            return 0
        return self.layout.weight_bytes if self.weights.inplace is not None else self.layout.moved_bytes

    def pinned(self, block: MemoryBlock) -> bool:
        """The layer itself while somebody uses it, and a version while one of them reads it."""
        if self.lent:
            return True
        if block is self.main:
            return bool(self.users)
        if block.version is None:
            return True  # room that was promised
        return any(self.reads(n) is block for n in self.users)

    def reads(self, n: int) -> MemoryBlock:
        """The block of the version that the forward of micro-batch n sees, as far as it is known by now."""
        if not self.versions:
            return self.main
        version = self.weights.clock.forward_reads(n)
        begins = [begin for begin in self.versions if begin <= version] if version < self.weights.newest else []
        # One that is gone was read by a micro-batch that is through but for its updates.
        return self.versions[max(begins)] if begins else self.main

    def seen(self) -> set[int]:
        """The versions that its users see. Each of them needs room for an update that ends it, and brought it along."""
        return {self.weights.clock.forward_reads(n) for n in self.users}

    def wait(self, begin: int | None) -> None:
        """The device comes to read the newest version, or an older one."""
        if begin is not None and self.weights.inplace is not None:
            self.wait(None)  # the older one takes the place of the newest, which is laid aside
        block = self.main if begin is None else self.versions[begin]
        if block.arrival is not None:
            self._device.mover.wait(block.arrival)
            block.arrival = None
            if self._device.on_change is not None:
                self._device.on_change("resident", block)

    def readable(self) -> None:
        """The host comes to read whatever there is of the layer."""
        for block in (self.main, *self.versions.values()):
            if self._device.holds(block):
                self._device.mover.wait(block.arrival)
            else:
                self._device.mover.settle(block.departure)
                block.departure = None

    def come(self, block: MemoryBlock) -> None:
        """A block has got its place on the device."""
        if block is self.main:
            self._bind(self._device.begin(block))
        else:
            self._bind_version(block, self._device.of(block))

    def leave(self, block: MemoryBlock) -> None:
        """A block has lost its place on the device."""
        assert block.host is not None
        if block is self.main:
            self._bind(None)
        else:
            self._bind_version(block, block.host)

    def keep(self, begin: int) -> list[Tensor]:
        """Before an update: the newest version, which is to become an older one, with memory of its own.

        Where somebody who is at it reads it, or will, there is room for that; else it goes to the host.
        """
        self.wait(None)
        reads, slot = self.weights.clock.forward_reads, self.weights.slot
        read = any(begin <= reads(n) <= slot for n in self.users)
        block = self.versions[begin] = MemoryBlock(self, self.layout.weight_bytes, begin)
        if not read:
            return self._device.put_aside(block, self.weights.parameters)
        # For every version that somebody at it sees there came room for one: there is always some left.
        spare = self.spares.pop()
        if self.weights.inplace is not None:
            self._device.rename(spare, block)
            return self.aside(self.weights.parameters, self._device.of(block))
        kept = self.weights.current()  # what forwards under way compute with
        self._device.fork(self.main, spare, block)
        self._bind(self._device.begin(self.main))
        return kept

    def drop(self, begin: int) -> None:
        """Nobody reads the version any more."""
        block = self.versions.pop(begin)
        self._device.forget(block)

    def adopt(self) -> None:
        """Takes the optimizer state that is new into the block, wherever that is."""
        block, host = self.main, self.main.host
        assert host is not None
        memory = self._device.of(block) if self._device.holds(block) else host
        for parameter, parts in zip(self._parameters, self.layout.states, strict=True):
            if id(parameter) in self._stateful or not parts or self._updater is None:
                continue
            optimizer, _ = self._updater.optimizer(parameter)
            state = optimizer.state.get(parameter)
            for key, value in (state or {}).items():
                part = parts.get(key)
                # What an optimizer keeps on the host, such as a count of steps, stays there.
                if part is None or not isinstance(value, Tensor) or value.device != memory.device:
                    continue
                target = part.view(memory)
                target.copy_(value)
                value.data = target
                self._bound.append((value, part))
                self._there.append(part.view(host))
                self._stateful.add(id(parameter))
        wanted = {id(p) for p, parts in zip(self._parameters, self.layout.states, strict=True) if parts}
        self.is_new = self._updater is not None and self._stateful != wanted
        self.filled = host[: self.layout.moved_bytes if self._stateful else self.layout.weight_bytes]

    def restored(self) -> None:
        """Versions, states and gradients were put into the layer from elsewhere, while it was away."""
        self._stateful.clear()
        self.versions.clear()
        del self._bound[len(self._parameters) :], self._there[len(self._parameters) :]
        self.adopt()
        for begin, tensors in list(self.weights.kept.items()):
            block = self.versions[begin] = MemoryBlock(self, self.layout.weight_bytes, begin)
            self.weights.kept[begin] = self._device.put_aside(block, tensors)
        if self.weights.pending is not None:
            pending, device = self.weights.pending, self._device.memory.device
            pending.gradients = [gradient.to(device) for gradient in pending.gradients]
            pending.records = [[tensor.to(device) for tensor in record] for record in pending.records]

    def aside(self, tensors: Sequence[Tensor], memory: Tensor) -> list[Tensor]:
        """Copies of the trained parameters, as a version is kept, in some memory of their block."""
        copied(tensors, self._parts, memory)
        return self.laid(memory)

    def laid(self, memory: Tensor) -> list[Tensor]:
        """The trained parameters as they lie in some memory of their block."""
        return [part.own(memory) for part in self._parts]

    def _bind(self, begin: int | None) -> None:
        """The layer's tensors are those at this byte of the device's storage, or those on the host."""
        if begin is None:
            for (tensor, _), there in zip(self._bound, self._there, strict=True):
                tensor.data = there
        else:
            typed = self._device.typed
            for tensor, part in self._bound:
                tensor.data = typed[part.dtype].as_strided(part.size, part.stride, (begin + part.offset) // part.width)
        self.weights.moved()
        inplace = self.weights.inplace
        if inplace is not None and begin is None:
            inplace.moved(None, None)
        elif inplace is not None:
            memory = self._device.of(self.main)
            casts = [None if part is None else part.view(memory) for part in self.layout.casts]
            inplace.moved(casts, [part.view(memory) for part in self.layout.asides if part is not None])

    def _bind_version(self, block: MemoryBlock, memory: Tensor) -> None:
        assert block.version is not None
        for tensor, part in zip(self.weights.kept[block.version], self._parts, strict=True):
            tensor.data = part.view(memory)
