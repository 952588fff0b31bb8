"""A simulator of PyTorch's caching allocator: which bytes it reserves from the device for the bytes that are asked."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.memory.addresses import Addresses, Slots

MIB = 2**20


class OutOfMemory(PlanError):
    """More bytes are reserved than the simulated device has, even after all that is cached was given back."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the allocator does with a request; the defaults are PyTorch's (c10/cuda/CUDACachingAllocator)."""

    granule: int = 512
    """Every request is rounded up to a multiple of it."""
    small: int = MIB
    """Requests up to it share segments of `small_segment`."""
    small_segment: int = 2 * MIB
    large: int = 10 * MIB
    """Requests below it share segments of `large_segment`; others get one of their own, rounded up to `rounding`."""
    large_segment: int = 20 * MIB
    rounding: int = 2 * MIB
    expandable: bool = False
    """``expandable_segments:True``: one segment a pool, which grows and shrinks by whole pages (`expandable`)."""


class Block:
    """A stretch of addresses between its neighbours."""

    __slots__ = ("address", "after", "before", "free", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address, self.size, self.small = address, size, small
        self.free = True
        self.before: Block | None = None
        self.after: Block | None = None

    def cut(self, size: int) -> Block:
        """Keeps so many bytes; the rest, which follows, is a free block."""
        rest = Block(self.address + size, self.size - size, self.small)
        rest.before, rest.after, self.after, self.size = self, self.after, rest, size
        if rest.after is not None:
            rest.after.before = rest
        return rest

    def join(self, after: Block) -> Block:
        """This block with the one that follows it."""
        self.size += after.size
        self.after = after.after
        if after.after is not None:
            after.after.before = self
        return self


class CachingAllocator:
    """Blocks are cut from segments, best fit first, and joined with free neighbours when they are freed.

    ``allocated`` and ``reserved`` are bytes now, ``peak`` and ``reserved_peak`` the most so far. With a ``limit``,
    segments that hold nothing are given back when it is met, and `OutOfMemory` is raised if that does not help.
    Of free blocks of one size that at the lowest address is taken: ``addresses`` says where segments lie.
    """

    def __init__(
        self, rules: Rules | None = None, limit: int | None = None, addresses: Addresses | None = None
    ) -> None:
        self.rules, self.limit = rules or Rules(), limit
        self._addresses = addresses or Slots()
        self.allocated = self.peak = self.reserved = self.reserved_peak = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def rounded(self, size: int) -> int:
        granule = self.rules.granule
        return max(granule, -(-size // granule) * granule)

    def alloc(self, size: int) -> Block:
        """A block of at least so many bytes."""
        rules, size = self.rules, self.rounded(size)
        small = size <= rules.small
        free = self._free[small]
        place = bisect_left(free, size, key=lambda entry: entry[0])
        if place < len(free):
            block = free.pop(self._chosen(free, place))[2]
        else:
            block = self._grow(size, small)
        block.free = False
        left = block.size - size
        if left >= rules.granule if small or rules.expandable else left > rules.small:
            self._put(block.cut(size))
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        block.free = True
        for near in (block.before, block.after):
            if near is not None and near.free:
                self._take(near)
                block = near.join(block) if near is block.before else block.join(near)
        self._put(block)

    def _chosen(self, free: list[tuple[int, int, Block]], place: int) -> int:
        """Of free blocks in the order of their sizes, the first of which that is large enough is at this place."""
        return place

    def _grow(self, size: int, small: bool) -> Block:
        segment = self._segment(size, small)
        self._room(segment)
        self._reserve(segment)
        return Block(self._addresses.place(segment), segment, small)

    def _segment(self, size: int, small: bool) -> int:
        """The bytes that are asked of the device for a request."""
        rules = self.rules
        if small:
            return rules.small_segment
        return rules.large_segment if size < rules.large else -(-size // rules.rounding) * rules.rounding

    def _room(self, size: int) -> None:
        """Sees to it that so many bytes can be reserved."""
        if self.limit is not None and self.reserved + size > self.limit:
            self._release()
            if self.reserved + size > self.limit:
                raise OutOfMemory(
                    f"{self.reserved} bytes are in use, {size} more are asked, and {self.limit} are there"
                )

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _release(self) -> None:
        """Segments of which nothing is in use go back to the device."""
        for small, free in self._free.items():
            kept: list[tuple[int, int, Block]] = []
            for entry in free:
                size, address, block = entry
                if block.before is not None or block.after is not None:
                    kept.append(entry)
                else:
                    self.reserved -= size
                    self._addresses.back(address, size)
            self._free[small] = kept

    def _put(self, block: Block) -> None:
        insort(self._free[block.small], (block.size, block.address, block), key=lambda entry: entry[:2])

    def _take(self, block: Block) -> None:
        free = self._free[block.small]
        free.pop(bisect_left(free, (block.size, block.address), key=lambda entry: entry[:2]))
