"""The layers of one stage during a run: which micro-batches have theirs on the device, and which are next.

Micro-batches get their layers in stream order, as far ahead as the budget allows, and keep them until their last update
is done. So the oldest unfinished micro-batch always has its layers or is the next to get them, and nothing deadlocks:

    done | 4 in flight, 5 prefetched, 6 in flight, 7 prefetched | 8 waits for room, and all behind it

The scheduler alone decides which operation runs when; the manager only says whether its layers are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.engine.optimizer import LayerOptimizer
from weft.engine.weight_versions import VersionedLayer
from weft.errors import TrainError
from weft.offload.config import OffloadConfig
from weft.offload.copy_engine import BackgroundWorker, CopyEngine, CudaCopy
from weft.offload.device_memory import DeviceMemory
from weft.offload.host_memory import HostMemory
from weft.offload.layer_memory import LayerMemory, MemoryBlock
from weft.offload.layout import ALIGNMENT, bytes_needed, largest_per_block, least_budget, make_layout
from weft.offload.policy import NextUses
from weft.utils.units import format_bytes

T = TypeVar("T")

FIRST = 2
"""So many micro-batches are prefetched wherever there is room."""

FILL_LIMIT = 0.75
"""The part of the device that prefetched layers of micro-batches beyond those may take. In the rest, the next ones find
a place without a long search, and layers that were used may stay until they are used again."""

Route = Callable[[int], Sequence[str]]
"""The layers that a micro-batch uses on this stage."""


class OffloadManager:
    """Layers that live on the host, and come to the device for the micro-batches that use them."""

    def __init__(
        self,
        weights: Mapping[str, VersionedLayer],
        optimizer: LayerOptimizer | None,
        device: torch.device,
        config: OffloadConfig,
        route: Route,
        routes: Iterable[Sequence[str]] | None,
        deferred_updates: bool = True,
        copy_engine: CopyEngine | None = None,
        host_buffer: Tensor | None = None,
    ) -> None:
        """``routes`` are those that must fit, each by itself; None: those of every subnet. ``deferred_updates`` says
        whether updates may come after their micro-batch has finished."""
        self._config, self._route = config, route
        states: dict[Any, Any] = {}
        owners = {name: w for name, w in weights.items() if any(True for _ in w.module.parameters())}
        layouts = {name: make_layout(w, optimizer, states) for name, w in owners.items()}
        sizes = {name: bytes_needed(layouts[name], owners[name]) for name in owners}
        deferred_updates = deferred_updates or any(
            w.schedule.microbatches_per_update > 1 or not w.single_copy for w in owners.values()
        )
        reserve = max((layout.bytes for layout in layouts.values()), default=0) if deferred_updates else 0
        self.least = least_budget(
            sizes, [largest_per_block(owners, sizes)] if routes is None else routes, reserve, config
        )
        """The least budget that would do, in bytes."""
        useful = sum(layout.bytes for layout in layouts.values()) + (config.prefetch + 2) * sum(
            sizes[name] - layouts[name].bytes for name in owners
        )
        capacity = min(config.bytes // ALIGNMENT * ALIGNMENT - reserve, max(useful, self.least - reserve))
        cuda = device.type == "cuda"
        host = HostMemory([layout.copied_bytes for layout in layouts.values()], cuda, host_buffer)
        copy_engine = copy_engine or (CudaCopy(device) if cuda else CopyEngine())
        self.device = DeviceMemory(device, capacity, reserve, host, copy_engine, self._next_use)
        self.layers = {
            name: LayerMemory(w, optimizer, layouts[name], block, self.device)
            for (name, w), block in zip(owners.items(), host.blocks, strict=True)
        }
        self.uses = 0
        """How often a micro-batch has used a layer."""
        self._misses = 0
        self._cuda = cuda
        self._background = BackgroundWorker(device)
        self._ready: deque[int] = deque()
        """Micro-batches that have their layers and have not started, in stream order."""
        self._put_back: deque[int] = deque()
        """Micro-batches that had their layers and lost them before they started, in stream order. Later ones may be in
        flight, so these come again by themselves."""
        self._beyond = self._total = 0
        """The first micro-batch that never had its layers, and the end of the run."""
        self._layers_of: dict[int, list[LayerMemory]] = {}
        self._held = 0
        self._copies_late = False
        """Whether layers of the last micro-batch that started were still being copied."""
        self._full = False
        """Whether the next micro-batch found no room when it was last tried, and none has been freed since."""
        self.begin_run(0, 0)

    @property
    def misses(self) -> int:
        """How often the device, or the program where there is none, had to wait for a layer."""
        if self._cuda:
            self._misses += self.device.copy_engine.count_late()
        return self._misses

    def begin_run(self, first: int, total: int) -> None:
        """Begins a run of the micro-batches ``first`` to ``total - 1``; nothing of another one may be in flight."""
        while self._ready:
            self._back_off()
        self._layers_of.clear()
        self._put_back.clear()
        self._beyond, self._total = first, total
        self._next_uses = NextUses(self._route, first, total)
        self._next_uses.advance_to(first)
        self.device.policy.reprioritize(self.device.blocks)
        self._full = False
        if self._config.prefetch and total:
            self.prefetch()

    def can_start(self, n: int) -> bool:
        """Whether the layers of a micro-batch are on the device, or can be brought there now."""
        while n >= self._next:
            if not self._admit(ahead=False):
                return False
        return True

    def start(self, n: int) -> None:
        admitted = self.can_start(n)
        assert admitted, f"micro-batch {n} started without its layers"
        self._ready.remove(n)
        passed = [self.layers[name] for name in self._next_uses.advance_to(n) if name in self.layers]
        self.device.policy.reprioritize([block for layer in passed for block in (layer.main, *layer.versions.values())])
        layers = self._layers(n)
        self.uses += len(layers)
        self._copies_late = not all(self.device.copy_engine.done(layer.main.loaded) for layer in layers)
        self._prefetch_urgent()

    def finish(self, n: int) -> None:
        """A micro-batch and all its updates are done."""
        self._record_use(self._layers(n))
        for layer in self._layers(n):
            self._remove_user(layer, n)
        del self._layers_of[n]
        self._prefetch_urgent()

    def prefetch_during(self, work: Callable[[], T]) -> T:
        """Does work that runs outside of Python, such as a backward, while a helper thread prefetches."""
        if self._full or len(self._ready) >= self._config.prefetch or self._next >= self._total:
            return work()
        return self._background(self.prefetch, work)

    def prefetch(self) -> None:
        """Loads the layers of the next micro-batches, as far as there is room."""
        while len(self._ready) < self._config.prefetch and self._next < self._total:
            self._full = not self._admit(ahead=True)
            if self._full:
                return

    def _prefetch_urgent(self) -> None:
        """Prefetches now where the next micro-batch has no layers yet, or where copies limit the speed; all else has
        time until the next backward."""
        if not self._full and len(self._ready) < (FIRST if self._copies_late else 1):
            self.prefetch()

    def apply_updates(self, group: Sequence[VersionedLayer], apply: Callable[[Sequence[VersionedLayer]], None]) -> None:
        """Applies the updates of some layers: of those on the device together, of the others one by one.

        A layer's first update creates its optimizer state outside the block, so it is applied alone too.
        """
        together: list[VersionedLayer] = []
        separate: list[VersionedLayer] = []
        for weights in group:
            layer = self.layers.get(weights.layer.name)
            ready = layer is None or (bool(layer.users) and not layer.lacks_state)
            (together if ready else separate).append(weights)
            if layer is not None and ready:
                layer.wait(None)  # its forward may have read an older version
        if together:
            apply(together)
        self._after_update(together)
        for weights in separate:
            with self.pinned_on_device([weights.layer.name]):
                apply([weights])
                self._after_update([weights])

    @contextmanager
    def pinned_on_device(self, names: Iterable[str]) -> Iterator[None]:
        """A block in which the newest versions of some layers are on the device, for a use outside micro-batches."""
        layers = [self.layers[name] for name in dict.fromkeys(names) if name in self.layers]
        with torch.inference_mode(False):  # tensors that are bound to parameters must allow training too
            self._pin(layers)
        try:
            yield
        finally:
            with torch.inference_mode(False):
                self._record_use(layers)
                for layer in layers:
                    layer.pins -= 1
                    self.device.release(layer.main)

    def bind_restored(self) -> None:
        """To be called after a checkpoint was restored into the layers."""
        for layer in self.layers.values():
            layer.bind_restored()

    def flush(self) -> None:
        """At the end of a run: every layer goes to the host, with all that was computed of it."""
        while self._ready:
            self._back_off()
        self.device.evict_all()
        for layer in self.layers.values():
            layer.synchronize()

    def stats(self) -> dict[str, Any]:
        """For the run's events."""
        misses = min(self.misses, self.uses)
        blocks = self.device.blocks
        return {
            "uses": self.uses,
            "misses": misses,
            "hit_rate": 1.0 - misses / self.uses if self.uses else 1.0,
            "loaded_bytes": self.device.loaded_bytes,
            "evicted_bytes": self.device.evicted_bytes,
            "resident": self.device.used,
            "pinned": sum(block.size for block in blocks if block.pinned),
            "peak": self.device.peak_bytes,
            "budget": self._config.bytes,
            "device_peak": torch.cuda.max_memory_allocated(self.device.memory.device) if self._cuda else 0,
            "layers": sum(block is block.layer.main for block in blocks),
        }

    def _layers(self, n: int) -> list[LayerMemory]:
        layers = self._layers_of.get(n)
        if layers is None:
            names = dict.fromkeys(self._route(n))
            layers = self._layers_of[n] = [self.layers[name] for name in names if name in self.layers]
        return layers

    @property
    def _next(self) -> int:
        """The next micro-batch to get its layers."""
        return self._put_back[0] if self._put_back else self._beyond

    def _admit(self, ahead: bool) -> bool:
        n = self._next
        if n >= self._total:
            return False
        layers = self._layers(n)
        held = self._held + sum(layer.main.size for layer in layers if not layer.users)
        limit = FILL_LIMIT if ahead and len(self._ready) >= FIRST else 1.0
        if held > self.device.capacity * limit:
            return False
        blocks: dict[MemoryBlock, None] = {}
        spares = []
        for layer in layers:
            blocks[layer.main] = None
            blocks[layer.block_read_by(n)] = None
            if layer.spare_size and layer.weights.schedule.forward_reads(n) not in layer.versions_read():
                spares.append(MemoryBlock(layer, layer.spare_size))
        waits = not ahead and not self._cuda
        present = sum(self.device.holds(block) for block in blocks) if waits else 0
        if not self.device.load([*blocks, *spares]):
            return False
        self._held = held
        for layer in layers:
            layer.users.add(n)
        for spare in spares:
            spare.layer.spares.append(spare)
        if waits:
            self._misses += len(blocks) - present
        self._ready.append(n)
        if self._put_back:
            self._put_back.popleft()
        else:
            self._beyond += 1
        return True

    def _pin(self, layers: Sequence[LayerMemory]) -> None:
        blocks = [layer.main for layer in layers]
        while blocks and not self.device.load(blocks):
            if self._ready:
                self._back_off()
            elif len(blocks) == 1 and self.device.place_in_reserve(blocks[0]):
                break
            else:
                together = sum(block.size for block in blocks)
                raise TrainError(
                    f"offload.budget = {format_bytes(self._config.bytes)} cannot hold {len(layers)} layers that are "
                    f"needed at once, {format_bytes(together)}: give it that much"
                )
        for layer in layers:
            layer.pins += 1
            layer.wait(None)

    def _back_off(self) -> None:
        n = self._ready.pop()
        for layer in self._layers(n):
            self._remove_user(layer, n)
        self._put_back.appendleft(n)

    def _remove_user(self, layer: LayerMemory, n: int) -> None:
        layer.users.remove(n)
        if not layer.users:
            self._held -= layer.main.size
        self._full = False
        while layer.spares and len(layer.spares) > len(layer.versions_read()):
            self.device.free(layer.spares.pop())

    def _record_use(self, layers: Sequence[LayerMemory]) -> None:
        """The device has been given all there is to do with these layers so far."""
        for layer in layers:
            layer.weights.to_newest()
        event = self.device.copy_engine.record() if layers else None
        for layer in layers:
            for block in (layer.main, *layer.versions.values()):
                block.last_use = event

    def _after_update(self, group: Iterable[VersionedLayer]) -> None:
        layers = [self.layers[weights.layer.name] for weights in group if weights.layer.name in self.layers]
        for layer in layers:
            layer.main.dirty = True
            if layer.lacks_state:
                layer.bind_optimizer_state()
        self._record_use(layers)  # their users may release them without another use

    def _next_use(self, block: MemoryBlock) -> float:
        return self._next_uses.next(block.layer.weights.layer.name)
