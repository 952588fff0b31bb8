"""Belady's eviction: the layers whose next use is farthest away go first.

All uses are known ahead, since a stream is a pure function of the step. Nothing here touches memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic

from weft.offload.allocator import AddressAllocator, AddressSpan, Key

HORIZON = 1024
"""Micro-batches that are searched for the next use of a layer; beyond that all are equally far."""

SMALL = 2**-14
"""What takes less than this part of the device is placed at its end and evicted last: evicting it gains no room."""

STALE_ENTRIES = 1024
"""So many heap entries may be stale, or four for every live key, before the heap is rebuilt."""

Priority = tuple[bool, float]


class NextUses:
    """When layers are used next, in a run of micro-batches ``first`` to ``total - 1``."""

    def __init__(self, route: Callable[[int], Sequence[str]], first: int, total: int, horizon: int = HORIZON) -> None:
        self._route, self._total, self._horizon = route, total, horizon
        self._at = self._known = first
        self._routes: deque[Sequence[str]] = deque()
        self._uses: dict[str, deque[int]] = {}
        self._next: dict[str, float] = {}

    def advance_to(self, n: int) -> list[str]:
        """Forgets uses before micro-batch n, which never becomes less, and returns the layers of those uses."""
        reach = min(n + self._horizon, self._total)
        for known in range(self._known, reach):
            self._routes.append(self._route(known))
            for name in self._routes[-1]:
                self._uses.setdefault(name, deque()).append(known)
                self._next.setdefault(name, known)
        self._known = max(self._known, reach)
        passed: list[str] = []
        for _ in range(self._at, min(n, self._known)):
            passed += self._routes[0]
            for name in self._routes.popleft():
                uses = self._uses[name]
                while uses and uses[0] < n:
                    uses.popleft()
                if uses:
                    self._next[name] = uses[0]
                else:
                    self._next.pop(name, None)
        self._at = max(self._at, n)
        return passed

    def next(self, name: str) -> float:
        """The first micro-batch that uses the layer; infinite where none is known."""
        return self._next.get(name, math.inf)


@dataclass(slots=True)
class Relocation(Generic[Key]):
    """The copies that a placement needs: first the evictions, then the loads, in this order."""

    evictions: list[tuple[Key, AddressSpan]] = field(default_factory=list)
    loads: list[tuple[Key, AddressSpan]] = field(default_factory=list)


class EvictionPolicy(Generic[Key]):
    """What lies on a device of ``size`` bytes. ``pinned`` keys stay; ``next_use`` says how soon a key is needed."""

    def __init__(self, size: int, pinned: Callable[[Key], bool], next_use: Callable[[Key], float]) -> None:
        self.allocator: AddressAllocator[Key] = AddressAllocator(size)
        self._pinned, self._next_use = pinned, next_use
        # Keys in the order of their eviction: a heap whose stale entries are recognised when they come up.
        self._heap: list[tuple[Priority, int, Key]] = []
        self._number = count()
        self._heap_limit = STALE_ENTRIES

    def reprioritize(self, keys: Iterable[Key]) -> None:
        """To be called when the next use of these may be farther away than before."""
        for key in keys:
            if key in self.allocator.spans:
                self._enqueue(key)

    def place_at(self, key: Key, span: AddressSpan) -> None:
        """Places the key exactly there, within a hole."""
        self.allocator.allocate_at(key, span)
        self._enqueue(key)

    def place(self, sizes: Mapping[Key, int]) -> Relocation[Key] | None:
        """Places all of these at once; None, with nothing changed, where that cannot be.

        It always succeeds where they fit together and nothing else is pinned.
        """
        allocator = self.allocator
        missing = [key for key in sizes if key not in allocator.spans]
        if not missing:
            return Relocation[Key]()
        relocation = self._try(sizes, missing)
        if relocation is not None:
            return relocation
        if sum(sizes.values()) > allocator.size or any(map(self._pinned, allocator.spans)):
            return None
        # The holes between those that are there may all be too small. Nothing is pinned: place everything anew.
        relocation = Relocation[Key]([(key, allocator.free(key)) for key in list(allocator.spans)])
        for key, size in sizes.items():
            span = self._allocate(key, size)
            assert span is not None
            relocation.loads.append((key, span))
        return relocation

    def _try(self, sizes: Mapping[Key, int], missing: Sequence[Key]) -> Relocation[Key] | None:
        allocator, relocation = self.allocator, Relocation[Key]()

        def movable(key: Key) -> bool:
            return key not in sizes and not self._pinned(key)

        for key in sorted(missing, key=lambda key: -sizes[key]):
            span = self._allocate(key, sizes[key])
            if span is None:
                with closing(self._eviction_order()) as order:
                    freed = allocator.make_room(sizes[key], order, movable)
                    if freed is not None:
                        relocation.evictions += [(other, allocator.free(other)) for other in freed]
                if freed is None:
                    self._undo(relocation)
                    return None
                span = self._allocate(key, sizes[key])
                assert span is not None
            relocation.loads.append((key, span))
        rank = {key: index for index, key in enumerate(missing)}
        relocation.loads.sort(key=lambda pair: rank[pair[0]])
        return relocation

    def _allocate(self, key: Key, size: int) -> AddressSpan | None:
        span = self.allocator.allocate(key, size, high=size < self.allocator.size * SMALL)
        if span is not None:
            self._enqueue(key)
        return span

    def _priority(self, key: Key) -> Priority:
        """Less for what should go first."""
        return self.allocator.spans[key].size < self.allocator.size * SMALL, -self._next_use(key)

    def _enqueue(self, key: Key) -> None:
        """For a new key, and for one that should go sooner than before: that it should go later is noticed anyway."""
        heappush(self._heap, (self._priority(key), next(self._number), key))
        if len(self._heap) > self._heap_limit:
            keys = dict.fromkeys(key for _, _, key in self._heap if key in self.allocator.spans)
            self._heap[:] = [(self._priority(key), next(self._number), key) for key in keys]
            heapify(self._heap)
            self._heap_limit = STALE_ENTRIES + 4 * len(self._heap)

    def _eviction_order(self) -> Generator[Key]:
        """Keys from the first to go to the last. What is still present when the iterator is closed stays queued."""
        heap, picked = self._heap, dict[Key, tuple[Priority, int, Key]]()
        try:
            while heap:
                entry = heappop(heap)
                key = entry[2]
                if key not in self.allocator.spans or key in picked:
                    continue
                priority = self._priority(key)
                if priority != entry[0]:
                    heappush(heap, (priority, next(self._number), key))
                    continue
                picked[key] = entry
                yield key
        finally:
            for key, entry in picked.items():
                if key in self.allocator.spans:
                    heappush(heap, entry)

    def _undo(self, relocation: Relocation[Key]) -> None:
        for key, _ in relocation.loads:
            self.allocator.free(key)
        for key, span in relocation.evictions:
            self.place_at(key, span)
