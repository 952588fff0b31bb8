"""The layers of one stage in the course of a run: which micro-batches have theirs at hand, and what comes next.

Micro-batches get their layers in stream order, as far ahead as the budget allows, and keep them until their last update
is done. So the oldest that is not through always has its layers or is the next to get them, and nothing deadlocks:

    through | 4 in flight, 5 arriving, 6 in flight, 7 arriving | 8 waits for room, and all behind it

Which operation runs when is up to the scheduler alone; here is only said whether its layers are there.
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
from weft.offload.config import OffloadConfig, largest, least, need
from weft.offload.copy_engine import Beside, CopyEngine, CudaCopy, SyncCopy
from weft.offload.device_memory import Device
from weft.offload.host_memory import Host
from weft.offload.layer_memory import LayerMemory, MemoryBlock
from weft.offload.layout import layout_of
from weft.offload.policy import Uses
from weft.utils.units import format_bytes

T = TypeVar("T")

CLOSE = 2
"""So many micro-batches get their layers wherever there is room."""

FILLED = 0.75
"""The part of the device that layers of micro-batches beyond those may take: in the rest, the next ones find a place
without a long search, and layers that were used may stay until they are used again."""

Route = Callable[[int], Sequence[str]]
"""The layers that a micro-batch uses here."""


class OffloadManager:
    """Layers with a home on the host. ``late`` says whether updates may come when their micro-batch is through."""

    def __init__(
        self,
        weights: Mapping[str, VersionedLayer],
        updater: LayerOptimizer | None,
        device: torch.device,
        said: OffloadConfig,
        route: Route,
        routes: Iterable[Sequence[str]] | None,
        late: bool = True,
        mover: CopyEngine | None = None,
        given: Tensor | None = None,
    ) -> None:
        """``routes`` are those that must fit, each by itself; None: those of every subnet."""
        self._said, self._route = said, route
        known: dict[Any, Any] = {}
        owners = {name: w for name, w in weights.items() if any(True for _ in w.module.parameters())}
        layouts = {name: layout_of(w, updater, known) for name, w in owners.items()}
        sizes = {name: need(layouts[name], owners[name]) for name in owners}
        late = late or any(w.clock.span > 1 or not w.single for w in owners.values())
        reserve = max((layout.bytes for layout in layouts.values()), default=0) if late else 0
        self.least = least(sizes, [largest(owners, sizes)] if routes is None else routes, reserve, said)
        whole = sum(layout.bytes for layout in layouts.values()) + (said.ahead + 2) * sum(
            sizes[name] - layouts[name].bytes for name in owners
        )
        room = min(said.bytes // 512 * 512 - reserve, max(whole, self.least - reserve))
        host = Host([layout.moved_bytes for layout in layouts.values()], _cuda(device), given)
        mover = mover or (CudaCopy(device) if _cuda(device) else SyncCopy())
        self.device = Device(device, room, reserve, host, mover, self._next_use)
        self.homes = {
            name: LayerMemory(w, updater, layouts[name], block, self.device)
            for (name, w), block in zip(owners.items(), host.blocks, strict=True)
        }
        self.uses = 0
        """How often a micro-batch has used a layer."""
        self._misses = 0
        self._timed = _cuda(device)
        self._beside = Beside(device)
        self._queue = Queue()
        self._of: dict[int, list[LayerMemory]] = {}
        self._held = 0
        """Bytes of all layers that some micro-batch has at hand."""
        self._pressed = False
        """Whether layers of the last one that began were still on their way."""
        self._full = False
        """Whether the next one found no room when it was last tried, and none has been given back since."""
        self.begin(0, 0)

    @property
    def misses(self) -> int:
        """How often the device, or the program where there is none, had to wait for a layer."""
        if self._timed:
            self._misses += self.device.mover.late()
        return self._misses

    def begin(self, first: int, total: int) -> None:
        """A run of the micro-batches ``first`` to ``total - 1`` begins; nothing of another one may be in flight."""
        while self._queue.ready:
            self._back_off()
        self._of.clear()
        self._queue.fill(first, total)
        self._uses_of = Uses(self._route, first, total)
        self._uses_of.move(first)
        self.device.later(self.device.blocks)
        self._full = False
        if self._said.ahead and total:
            self.advance()

    def may(self, n: int) -> bool:
        """Whether the layers of a micro-batch are at hand, or can be."""
        if n in self._queue:
            return True
        while True:
            coming = self._queue.next()
            if coming is None or not self._admit(coming, ahead=False):
                return False
            if coming == n:
                return True

    def start(self, n: int) -> None:
        """A micro-batch begins; its layers are at hand."""
        found = self.may(n)
        assert found, f"micro-batch {n} began without its layers"
        self._queue.begin(n)
        passed = [self.homes[name] for name in self._uses_of.move(n) if name in self.homes]
        self.device.later([block for home in passed for block in (home.main, *home.versions.values())])
        layers = self._layers(n)
        self.uses += len(layers)
        self._pressed = not all(self.device.mover.done(home.main.arrival) for home in layers)
        self._advance_soon()

    def finish(self, n: int) -> None:
        """All is done with the layers of a micro-batch."""
        self._queue.end(n)
        self._used(self._layers(n))
        for home in self._layers(n):
            self._leave(home, n)
        del self._of[n]
        self._advance_soon()

    def beside(self, work: Callable[[], T]) -> T:
        """Does the work, which is no business of Python's, while the next micro-batches get their layers."""
        if self._full or len(self._queue.ready) >= self._said.ahead or self._queue.next() is None:
            return work()
        return self._beside(self.advance, work)

    def advance(self) -> None:
        """The next micro-batches get their layers, as far as there is room."""
        while len(self._queue.ready) < self._said.ahead:
            n = self._queue.next()
            if n is None:
                return
            self._full = not self._admit(n, ahead=True)
            if self._full:
                return

    def _advance_soon(self) -> None:
        """Where the next one has its layers, there is time until a backward; but not where this one's are still on
        their way, since then copies are what all wait for."""
        if not self._full and len(self._queue.ready) < (CLOSE if self._pressed else 1):
            self.advance()

    def update(self, group: Sequence[VersionedLayer], apply: Callable[[Sequence[VersionedLayer]], None]) -> None:
        """Applies the updates of some layers: of those that are at hand at once, of the others one by one.

        An optimizer makes the first state of a layer elsewhere; so that comes one by one too.
        """
        at_hand: list[VersionedLayer] = []
        apart: list[VersionedLayer] = []
        for weights in group:
            home = self.homes.get(weights.layer.name)
            ready = home is None or (bool(home.users) and not home.is_new)
            (at_hand if ready else apart).append(weights)
            if home is not None and ready:
                home.wait(None)  # its forward may have seen an older version
        if at_hand:
            apply(at_hand)
        self._changed(at_hand)
        for weights in apart:
            with self.lending([weights.layer.name]):
                apply([weights])
                self._changed([weights])

    @contextmanager
    def lending(self, names: Iterable[str]) -> Iterator[None]:
        """A block in which some layers are on the device, for whoever is not a micro-batch: the newest version."""
        homes = [self.homes[name] for name in dict.fromkeys(names) if name in self.homes]
        blocks = [home.main for home in homes]
        while blocks and not self.device.want(blocks):
            if self._queue.ready:
                self._back_off()
            elif len(blocks) == 1 and self.device.squeeze(homes[0].main):
                break
            else:
                together = sum(block.size for block in blocks)
                raise TrainError(
                    f"residency.budget = {format_bytes(self._said.bytes)} cannot hold {len(homes)} "
                    f"layers that are needed at "
                    f"once, {format_bytes(together)}: give it that much"
                )
        for home in homes:
            home.lent += 1
            home.wait(None)
        try:
            yield
        finally:
            self._used(homes)
            for home in homes:
                home.lent -= 1
                self.device.release(home.main)

    def adopt(self) -> None:
        """After a checkpoint was put into the layers."""
        for home in self.homes.values():
            home.restored()

    def settle(self) -> None:
        """Nobody is at it any more: every layer is on the host, with all that was made of it."""
        while self._queue.ready:
            self._back_off()
        self.device.empty()
        for home in self.homes.values():
            home.readable()

    def figures(self) -> dict[str, Any]:
        """For the log."""
        misses = min(self.misses, self.uses)
        blocks = self.device.blocks
        return {
            "uses": self.uses,
            "misses": misses,
            "hit_rate": 1.0 - misses / self.uses if self.uses else 1.0,
            "brought": self.device.traffic.brought,
            "sent": self.device.traffic.sent,
            "resident": self.device.taken,
            "pinned": sum(block.size for block in blocks if block.pinned),
            "peak": self.device.traffic.peak,
            "budget": self._said.bytes,
            "device_peak": torch.cuda.max_memory_allocated(self.device.memory.device) if self._timed else 0,
            "layers": sum(block is block.home.main for block in blocks),
        }

    def _layers(self, n: int) -> list[LayerMemory]:
        found = self._of.get(n)
        if found is None:
            names = dict.fromkeys(self._route(n))
            found = self._of[n] = [self.homes[name] for name in names if name in self.homes]
        return found

    def _admit(self, n: int, ahead: bool) -> bool:
        homes = self._layers(n)
        held = self._held + sum(home.main.size for home in homes if not home.users)
        if held > self.device.room * (FILLED if ahead and len(self._queue.ready) >= CLOSE else 1.0):
            return False
        blocks: dict[MemoryBlock, None] = {}
        spares = []
        for home in homes:
            blocks[home.main] = None
            blocks[home.reads(n)] = None
            if home.spare_size and home.weights.clock.forward_reads(n) not in home.seen():
                spares.append(MemoryBlock(home, home.spare_size))
        waits = not ahead and not self._timed
        there = sum(self.device.holds(block) for block in blocks) if waits else 0
        if not self.device.want([*blocks, *spares]):
            return False
        self._held = held
        for home in homes:
            home.users.add(n)
        for spare in spares:
            spare.home.spares.append(spare)
        if waits:
            self._misses += len(blocks) - there
        self._queue.admit()
        return True

    def _back_off(self) -> None:
        n = self._queue.back_off()
        for home in self._layers(n):
            self._leave(home, n)

    def _leave(self, home: LayerMemory, n: int) -> None:
        home.users.remove(n)
        if not home.users:
            self._held -= home.main.size
        self._full = False
        while home.spares and len(home.spares) > len(home.seen()):
            self.device.forget(home.spares.pop())

    def _used(self, homes: Sequence[LayerMemory]) -> None:
        """The device has been given all that there is to do with these layers so far."""
        for home in homes:
            home.weights.to_newest()
        ticket = self.device.mover.mark() if homes else None
        for home in homes:
            for block in (home.main, *home.versions.values()):
                block.used = ticket

    def _changed(self, group: Iterable[VersionedLayer]) -> None:
        homes = [self.homes[weights.layer.name] for weights in group if weights.layer.name in self.homes]
        for home in homes:
            home.main.changed = True
            if home.is_new:
                home.adopt()
        self._used(homes)  # those that have them at hand may give them up before they use them

    def _next_use(self, block: MemoryBlock) -> float:
        return self._uses_of.next(block.home.name)


def _cuda(device: torch.device) -> bool:
    return device.type == "cuda"


# Which micro-batch gets its layers next: they come in the order of the stream.


class Queue:
    """Micro-batches come, are ``ready`` once they have their layers, and begin; whoever is ready can be put back."""

    def __init__(self) -> None:
        self.ready: deque[int] = deque()
        self._source: Iterator[int] = iter(())
        self._coming: deque[int] = deque()
        self._begun: set[int] = set()

    def __contains__(self, n: int) -> bool:
        """Whether it has its layers."""
        return n in self._begun or n in self.ready

    def fill(self, first: int, total: int) -> None:
        """From here on the micro-batches ``first`` to ``total - 1`` come."""
        self._coming.clear()
        self._source = iter(range(first, total))

    def next(self) -> int | None:
        if not self._coming:
            n = next(self._source, None)
            if n is None:
                return None
            self._coming.append(n)
        return self._coming[0]

    def admit(self) -> None:
        """The next one is ready."""
        self.ready.append(self._coming.popleft())

    def back_off(self) -> int:
        """The last one that became ready comes again."""
        n = self.ready.pop()
        self._coming.appendleft(n)
        return n

    def begin(self, n: int) -> None:
        self.ready.remove(n)
        self._begun.add(n)

    def end(self, n: int) -> None:
        self._begun.remove(n)
