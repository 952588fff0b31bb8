"""Which layers go when others are needed: those whose next use is farthest away, as Belady showed. All of it is known,
since a stream is a pure function; nothing here touches memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Generic

from weft.pipeline.residency.farthest import Farthest
from weft.pipeline.residency.ground import Ground, Key, Span

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

    gone: list[tuple[Key, Span]] = field(default_factory=list)
    come: list[tuple[Key, Span]] = field(default_factory=list)


class Policy(Generic[Key]):
    """What lies on a device of ``size`` bytes. ``pinned`` must stay; ``next_use`` says how soon a thing is needed."""

    def __init__(self, size: int, pinned: Callable[[Key], bool], next_use: Callable[[Key], float]) -> None:
        self.ground: Ground[Key] = Ground(size)
        self._pinned, self._next_use = pinned, next_use
        self._order = Farthest(self._worth, self.ground.spans)

    def later(self, keys: Iterable[Key]) -> None:
        """Their next use may be farther away than before; ``next_use`` says by how much."""
        for key in keys:
            if key in self.ground.spans:
                self._order.add(key)

    def place(self, key: Key, span: Span) -> None:
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

    def _put(self, key: Key, size: int) -> Span | None:
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
