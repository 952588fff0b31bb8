"""PyTorch's expandable segments: one stretch of addresses a pool, under which pages of memory come and go.

    addresses  | used | free | used | free  . . . . . | used |  . . . . . . . . .
    pages      |=======|=======|=======|               |======|                       nothing lies under the dots

A request that no free block is large enough for gets pages under what follows the first free block that can grow, so
that no hole is too small for ever; at a limit, pages under which nothing is used go back to the device.
"""

from __future__ import annotations

from weft.plan.memory.allocator import Block, CachingAllocator, Rules

ENDLESS = 1 << 60
"""Bytes of addresses of a pool."""


class ExpandableAllocator(CachingAllocator):
    """Reserves pages of `small_segment` bytes for small requests, and of `large_segment` for others."""

    def __init__(self, rules: Rules, limit: int | None = None) -> None:
        super().__init__(rules, limit)
        self._bare: dict[bool, list[Block]] = {small: [self._unmapped(0, ENDLESS, small)] for small in (True, False)}
        """Addresses without pages, lowest first."""

    def _unmapped(self, address: int, size: int, small: bool) -> Block:
        block = Block(address, size, small)
        block.free = False  # nobody can have it as it is
        return block

    def _chosen(self, free: list[tuple[int, int, Block]], place: int) -> int:
        """A block that can grow counts as large as it can become: others of the right size go first."""
        while place + 1 < len(free) and self._reach(free[place + 1][2]) < self._reach(free[place][2]):
            place += 1
        return place

    def _reach(self, block: Block) -> int:
        after = block.after
        return block.size + (after.size if after is not None and after in self._bare[block.small] else 0)

    def _grow(self, size: int, small: bool) -> Block:
        self._room(self._segment(size, small))  # as if nothing of it were there, which is how PyTorch asks
        block = self._growing(size, small)
        while block.size < size:
            bare = block.after
            assert bare is not None
            block = self._map(bare, size - block.size, block)
        return block

    def _growing(self, size: int, small: bool) -> Block:
        """The first free block, taken, that has enough addresses behind it which are free or bare; perhaps empty."""
        bares = self._bare[small]
        for bare in bares:
            first = bare.before if bare.before is not None and bare.before.free else bare
            room, last = 0, first
            while room < size and last is not None and (last.free or last in bares):
                room, last = room + last.size, last.after  # type: ignore[assignment]
            if room < size:
                continue
            if first is not bare:
                self._take(first)
                return first
            empty = Block(bare.address, 0, small)
            empty.before, empty.after, bare.before = bare.before, bare, empty
            if empty.before is not None:
                empty.before.after = empty
            return empty
        raise AssertionError("the last addresses have no end")

    def _map(self, bare: Block, size: int, block: Block) -> Block:
        """The block with pages for so many bytes more, and with the free block behind them, if all that was bare is
        used up."""
        page = self._page(bare.small)
        grown = min(-(-size // page) * page, bare.size)
        self._reserve(grown)
        block.size += grown
        bare.address, bare.size = bare.address + grown, bare.size - grown
        if bare.size:
            return block
        self._bare[bare.small].remove(bare)
        block.after = bare.after
        if block.after is not None:
            block.after.before = block
            if block.after.free:
                self._take(block.after)
                block.join(block.after)
        return block

    def _page(self, small: bool) -> int:
        return self.rules.small_segment if small else self.rules.large_segment

    def _release(self) -> None:
        """Whole pages under free blocks go back to the device."""
        for small, free in self._free.items():
            page = self._page(small)
            for _, address, block in list(free):
                first, last = -(-address // page) * page, (address + block.size) // page * page
                if first < last:
                    self._take(block)
                    self._unmap(block, first, last)

    def _unmap(self, block: Block, first: int, last: int) -> None:
        bare = block
        if first > block.address:
            bare = block.cut(first - block.address)
            self._put(block)
        if bare.address + bare.size > last:
            self._put(bare.cut(last - first))
        bare.free = False
        self.reserved -= last - first
        bares = self._bare[bare.small]
        for near in (bare.before, bare.after):
            if near is not None and near in bares:
                bares.remove(near)
                bare = near.join(bare) if near is bare.before else bare.join(near)
        bares.append(bare)
        bares.sort(key=lambda one: one.address)
