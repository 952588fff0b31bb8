"""Addresses of a stretch of memory: what lies where, and what has to go so that something else fits. No memory here."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class FreeSpan(NamedTuple):
    """From ``start``, so many bytes."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class AddressAllocator(Generic[Key]):
    """A stretch of ``size`` bytes; holes are merged, and the smallest that is large enough is taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.spans: dict[Key, FreeSpan] = {}
        self._at: dict[int, Key] = {}
        self._ending: dict[int, Key] = {}
        self._holes: dict[int, int] = {}
        self._hole_ends: dict[int, int] = {}
        self._sizes: list[tuple[int, int]] = []
        self.taken = size
        """Bytes that something lies on."""
        if size:
            self._add_hole(0, size)

    def put(self, key: Key, size: int, high: bool = False) -> FreeSpan | None:
        """A place in a hole, if there is one: where the smallest begins, or where the last one ends."""
        index = bisect_left(self._sizes, (size, -1))
        if index == len(self._sizes):
            return None
        start = self._sizes[index][1]
        if high:
            start = max(start + length for length, start in self._sizes[index:]) - size
        span = FreeSpan(start, size)
        self.put_at(key, span)
        return span

    def put_at(self, key: Key, span: FreeSpan) -> None:
        """Just there, which must be within a hole."""
        at = span.start
        if at not in self._holes:
            at = max(start for start in self._holes if start <= span.start)
        end = self._holes[at]
        assert at <= span.start and span.end <= end and key not in self.spans  # noqa: PT018
        self._drop_hole(at)
        if at < span.start:
            self._add_hole(at, span.start)
        if span.end < end:
            self._add_hole(span.end, end)
        self._note(key, span)

    def free(self, key: Key) -> FreeSpan:
        """Nothing lies there any more."""
        span = self.spans.pop(key)
        del self._at[span.start], self._ending[span.end]
        start, end = span.start, span.end
        if start in self._hole_ends:
            start = self._hole_ends[start]
            self._drop_hole(start)
        if end in self._holes:
            after = self._holes[end]
            self._drop_hole(end)
            end = after
        self._add_hole(start, end)
        return span

    def around(self, key: Key, size: int, movable: Callable[[Key], bool]) -> tuple[list[Key], bool]:
        """What has to go, this one among it, so that so many bytes are free in one piece, and whether they then are: if
        not, that is all that could go between two that stay."""
        span = self.spans[key]
        gone = [key]
        start = self._hole_ends.get(span.start, span.start)
        end = self._holes.get(span.end, span.end)
        while end - start < size:
            right, left = self._at.get(end), self._ending.get(start)
            if right is not None and movable(right):
                gone.append(right)
                behind = self.spans[right].end
                end = self._holes.get(behind, behind)
            elif left is not None and movable(left):
                gone.append(left)
                before = self.spans[left].start
                start = self._hole_ends.get(before, before)
            else:
                return gone, False
        return gone, True

    def make_room(self, size: int, order: Iterable[Key], movable: Callable[[Key], bool]) -> list[Key] | None:
        """What goes so that so many bytes are free in one piece: the first in order for whom that can be."""
        cramped: set[Key] = set()
        for key in order:
            if key in self.spans and key not in cramped and movable(key):
                gone, found = self.around(key, size, movable)
                if found:
                    return gone
                cramped.update(gone)
        return None

    def _note(self, key: Key, span: FreeSpan) -> None:
        self.spans[key] = span
        self._at[span.start] = self._ending[span.end] = key

    def _add_hole(self, start: int, end: int) -> None:
        self._holes[start], self._hole_ends[end] = end, start
        insort(self._sizes, (end - start, start))
        self.taken -= end - start

    def _drop_hole(self, start: int) -> None:
        end = self._holes.pop(start)
        del self._hole_ends[end]
        del self._sizes[bisect_left(self._sizes, (end - start, start))]
        self.taken += end - start
