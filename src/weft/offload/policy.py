"""Which layers go when others are needed: those whose next use is farthest away, as Belady showed. All of it is known,
since a stream is a pure function; nothing here touches memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic

from weft.offload.allocator import AddressAllocator, FreeSpan, Key

HORIZON = 1024
"""Micro-batches that are looked ahead to find the next use of a layer; beyond that all are equally far."""

SMALL = 2**-14
"""What takes less than this part of the device lies apart, at its end, and goes last: to send it away gains no room."""


class Uses:
    """When layers are used next, in a run of micro-batches ``first`` to ``total - 1``."""

    def __init__(self, route: Callable[[int], Sequence[str]], first: int, total: int, horizon: int = HORIZON) -> None:
        self._route, self._total, self._horizon = route, total, horizon
        self._at = self._known = first
        self._routes: deque[Sequence[str]] = deque()
        self._uses: dict[str, deque[int]] = {}
        self._next: dict[str, float] = {}

    def move(self, n: int) -> list[str]:
        """From here on, uses before micro-batch n do not count; n never becomes less. The layers of those."""
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
        """The first micro-batch that uses the layer; infinite where none is in sight."""
        return self._next.get(name, math.inf)


@dataclass(slots=True)
class Change(Generic[Key]):
    """What has to be done so that all that is wanted is there: first some go, then others come, in this order."""

    gone: list[tuple[Key, FreeSpan]] = field(default_factory=list)
    come: list[tuple[Key, FreeSpan]] = field(default_factory=list)


class Policy(Generic[Key]):
    """What lies on a device of ``size`` bytes. ``pinned`` must stay; ``next_use`` says how soon a thing is needed."""

    def __init__(self, size: int, pinned: Callable[[Key], bool], next_use: Callable[[Key], float]) -> None:
        self.ground: AddressAllocator[Key] = AddressAllocator(size)
        self._pinned, self._next_use = pinned, next_use
        self._order = EvictionQueue(self._worth, self.ground.spans)

    def later(self, keys: Iterable[Key]) -> None:
        """Their next use may be farther away than before; ``next_use`` says by how much."""
        for key in keys:
            if key in self.ground.spans:
                self._order.add(key)

    def place(self, key: Key, span: FreeSpan) -> None:
        """It lies just there, which must be within a hole."""
        self.ground.put_at(key, span)
        self._order.add(key)

    def want(self, sizes: Mapping[Key, int]) -> Change[Key] | None:
        """All of these, at once, are on the device afterwards; None, with nothing changed, where that cannot be.

        It always can be where they fit together and nothing else is pinned.
        """
        ground = self.ground
        coming = [key for key in sizes if key not in ground.spans]
        if not coming:
            return Change[Key]()
        change = self._try(sizes, coming)
        if change is not None:
            return change
        if sum(sizes.values()) > ground.size or any(map(self._pinned, ground.spans)):
            return None
        # Holes between those of them that are there may all be too small. Nothing has to stay where it is: begin anew.
        change = Change[Key]([(key, ground.free(key)) for key in list(ground.spans)])
        for key, size in sizes.items():
            span = self._put(key, size)
            assert span is not None
            change.come.append((key, span))
        return change

    def _try(self, sizes: Mapping[Key, int], coming: Sequence[Key]) -> Change[Key] | None:
        ground, change = self.ground, Change[Key]()

        def movable(key: Key) -> bool:
            return key not in sizes and not self._pinned(key)

        for key in sorted(coming, key=lambda key: -sizes[key]):
            span = self._put(key, sizes[key])
            if span is None:
                with closing(self._order.pick()) as order:
                    gone = ground.make_room(sizes[key], order, movable)
                    if gone is not None:
                        change.gone += [(other, ground.free(other)) for other in gone]
                if gone is None:
                    self._undo(change)
                    return None
                span = self._put(key, sizes[key])
                assert span is not None
            change.come.append((key, span))
        rank = {key: index for index, key in enumerate(coming)}
        change.come.sort(key=lambda pair: rank[pair[0]])
        return change

    def _put(self, key: Key, size: int) -> FreeSpan | None:
        span = self.ground.put(key, size, high=size < self.ground.size * SMALL)
        if span is not None:
            self._order.add(key)
        return span

    def _worth(self, key: Key) -> tuple[bool, float]:
        """Less for what should go first."""
        return self.ground.spans[key].size < self.ground.size * SMALL, -self._next_use(key)

    def _undo(self, change: Change[Key]) -> None:
        for key, _ in change.come:
            self.ground.free(key)
        for key, span in change.gone:
            self.place(key, span)


# Things in the order in which they should go: a heap, in which what has become wrong is found when it comes up.

Worth = tuple[bool, float]

SPARE = 1024
"""So many entries may be wrong, or four for every thing that is there, before they are all made anew."""


class EvictionQueue(Generic[Key]):
    """``worth`` is less for what should go first, and ``there`` holds all that can go.

    Whoever adds a thing, or knows that it should go sooner than before, says so with ``add``. That one should go later
    is seen by itself.
    """

    def __init__(self, worth: Callable[[Key], Worth], there: Container[Key]) -> None:
        self._worth, self._there = worth, there
        self._heap: list[tuple[Worth, int, Key]] = []
        self._number = count()
        self._most = SPARE

    def add(self, key: Key) -> None:
        heappush(self._heap, (self._worth(key), next(self._number), key))
        if len(self._heap) > self._most:
            self._renew()

    def pick(self) -> Generator[Key]:
        """From the first to go to the last, as long as somebody asks. What is still there when the iterator is closed
        stays in the order."""
        heap, picked = self._heap, dict[Key, tuple[Worth, int, Key]]()
        try:
            while heap:
                entry = heappop(heap)
                key = entry[2]
                if key not in self._there or key in picked:
                    continue
                worth = self._worth(key)
                if worth != entry[0]:
                    heappush(heap, (worth, next(self._number), key))
                    continue
                picked[key] = entry
                yield key
        finally:
            for key, entry in picked.items():
                if key in self._there:
                    heappush(heap, entry)

    def _renew(self) -> None:
        keys = dict.fromkeys(key for _, _, key in self._heap if key in self._there)
        self._heap[:] = [(self._worth(key), next(self._number), key) for key in keys]
        heapify(self._heap)
        self._most = SPARE + 4 * len(self._heap)
