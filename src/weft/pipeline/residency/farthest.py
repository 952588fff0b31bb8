"""Things in the order in which they should go: a heap, in which what has become wrong is found when it comes up."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic

from weft.pipeline.residency.ground import Key

Worth = tuple[bool, float]

SPARE = 1024
"""So many entries may be wrong, or four for every thing that is there, before they are all made anew."""


class Farthest(Generic[Key]):
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
