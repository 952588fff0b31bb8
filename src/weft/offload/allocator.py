"""Addresses within one range of memory: what lies where, and what must go so that something else fits.

Nothing here touches memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class AddressSpan(NamedTuple):
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class AddressAllocator(Generic[Key]):
    """Best fit over ``size`` bytes: adjacent holes are merged, and the smallest hole that is large enough is taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.spans: dict[Key, AddressSpan] = {}
        self._key_at: dict[int, Key] = {}
        self._key_ending_at: dict[int, Key] = {}
        self._holes: dict[int, int] = {}
        self._hole_ends: dict[int, int] = {}
        self._hole_sizes: list[tuple[int, int]] = []
        self.used = size
        if size:
            self._add_hole(0, size)

    def allocate(self, key: Key, size: int, high: bool = False) -> AddressSpan | None:
        """A span at the start of the smallest hole that fits, or with ``high`` at the end of the last one; None where
        no hole is large enough."""
        index = bisect_left(self._hole_sizes, (size, -1))
        if index == len(self._hole_sizes):
            return None
        start = self._hole_sizes[index][1]
        if high:
            start = max(start + length for length, start in self._hole_sizes[index:]) - size
        span = AddressSpan(start, size)
        self.allocate_at(key, span)
        return span

    def allocate_at(self, key: Key, span: AddressSpan) -> None:
        """Takes exactly this span, which must lie within a hole."""
        hole = span.start
        if hole not in self._holes:
            hole = max(start for start in self._holes if start <= span.start)
        end = self._holes[hole]
        assert hole <= span.start and span.end <= end and key not in self.spans  # noqa: PT018
        self._remove_hole(hole)
        if hole < span.start:
            self._add_hole(hole, span.start)
        if span.end < end:
            self._add_hole(span.end, end)
        self.spans[key] = span
        self._key_at[span.start] = self._key_ending_at[span.end] = key

    def free(self, key: Key) -> AddressSpan:
        span = self.spans.pop(key)
        del self._key_at[span.start], self._key_ending_at[span.end]
        start, end = span.start, span.end
        if start in self._hole_ends:
            start = self._hole_ends[start]
            self._remove_hole(start)
        if end in self._holes:
            after = self._holes[end]
            self._remove_hole(end)
            end = after
        self._add_hole(start, end)
        return span

    def neighbours(self, key: Key, size: int, movable: Callable[[Key], bool]) -> tuple[list[Key], bool]:
        """What must be freed around ``key``, itself included, so that ``size`` bytes are free in one piece.

        The second value says whether they then are; if not, the list is all that could go between two immovable keys.
        """
        span = self.spans[key]
        freed = [key]
        start = self._hole_ends.get(span.start, span.start)
        end = self._holes.get(span.end, span.end)
        while end - start < size:
            right, left = self._key_at.get(end), self._key_ending_at.get(start)
            if right is not None and movable(right):
                freed.append(right)
                behind = self.spans[right].end
                end = self._holes.get(behind, behind)
            elif left is not None and movable(left):
                freed.append(left)
                before = self.spans[left].start
                start = self._hole_ends.get(before, before)
            else:
                return freed, False
        return freed, True

    def make_room(self, size: int, order: Iterable[Key], movable: Callable[[Key], bool]) -> list[Key] | None:
        """What to free so that ``size`` bytes are free in one piece: around the first key in order where it works."""
        too_small: set[Key] = set()
        for key in order:
            if key in self.spans and key not in too_small and movable(key):
                freed, enough = self.neighbours(key, size, movable)
                if enough:
                    return freed
                too_small.update(freed)
        return None

    def _add_hole(self, start: int, end: int) -> None:
        self._holes[start], self._hole_ends[end] = end, start
        insort(self._hole_sizes, (end - start, start))
        self.used -= end - start

    def _remove_hole(self, start: int) -> None:
        end = self._holes.pop(start)
        del self._hole_ends[end]
        del self._hole_sizes[bisect_left(self._hole_sizes, (end - start, start))]
        self.used += end - start
