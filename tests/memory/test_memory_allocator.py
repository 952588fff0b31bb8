"""The simulated caching allocator against sums by hand and a simpler one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.memory.allocator import (
    ADDRESS_SPACE,
    MIB,
    AllocationFailed,
    AllocatorConfig,
    CachingAllocator,
    ExpandableAllocator,
    MonotonicAddresses,
    SlotAddresses,
)
from weft.memory.timeline import AllocationTimeline, repeat_last_step

EXPANDABLE = AllocatorConfig(expandable=True)
SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(MIB, 40 * MIB))


@pytest.mark.parametrize(
    ("asked", "taken", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (21 * MIB, 21 * MIB, 22 * MIB),
    ],
)
def test_a_request_takes_its_rounded_size_from_a_segment_of_its_class(asked: int, taken: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.alloc(asked)
    # What is left of a large segment is cut off only if it is above 1 MiB.
    assert (allocator.allocated, allocator.reserved) == (taken if asked != 21 * MIB else 22 * MIB, reserved)


def test_at_the_limit_cached_segments_are_given_back_before_memory_is_out() -> None:
    allocator = CachingAllocator(limit=50 * MIB)
    allocator.free(allocator.alloc(30 * MIB))
    allocator.alloc(40 * MIB)
    assert allocator.reserved == 40 * MIB
    assert allocator.reserved_peak == 40 * MIB
    with pytest.raises(AllocationFailed, match="52428800 are there"):
        allocator.alloc(30 * MIB)


def test_a_block_that_cannot_grow_is_taken_before_the_last_one_though_it_is_larger() -> None:
    allocator = ExpandableAllocator(EXPANDABLE)
    first, _ = allocator.alloc(12 * MIB), allocator.alloc(2 * MIB)
    allocator.free(first)  # a hole of 12 MiB; behind the second are 6 MiB, and no end
    taken = allocator.alloc(5 * MIB)
    assert (taken.address, allocator.reserved) == (0, 20 * MIB)
    assert allocator.alloc(30 * MIB).address == 14 * MIB  # the end grows from what it has


def test_at_the_limit_pages_under_free_blocks_go_back_and_their_addresses_are_used_again() -> None:
    allocator = ExpandableAllocator(EXPANDABLE, limit=120 * MIB)
    first, second = allocator.alloc(50 * MIB), allocator.alloc(30 * MIB)
    allocator.free(first)
    assert allocator.reserved == 80 * MIB
    # Two pages of three go back; the second block begins on the third one. What is left there is too near to it.
    assert (allocator.alloc(60 * MIB).address, allocator.reserved) == (80 * MIB, 100 * MIB)
    allocator.free(second)
    assert (allocator.alloc(44 * MIB).address, allocator.reserved) == (0, 120 * MIB)
    with pytest.raises(AllocationFailed):
        allocator.alloc(17 * MIB)
    assert allocator.alloc(16 * MIB).address == 44 * MIB


class Pages:
    """Expandable segments over one list a pool: for every 512 bytes its owner, 0 if free, -1 where no page is."""

    def __init__(self) -> None:
        self.cells: dict[bool, list[int]] = {True: [], False: []}

    def alloc(self, size: int, owner: int) -> None:
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        cells, need, page = self.cells[small], size // 512, (2 * MIB if small else 20 * MIB) // 512
        bare = {a: b - a for a, b in self._runs(cells, (-1,))}
        end = len(cells)
        # How far a free stretch could grow counts: to the end of what is bare behind it, or for ever.
        free = sorted(
            (b - a, a, b - a + (ADDRESS_SPACE if b == end or b + bare.get(b, 0) == end else bare.get(b, 0)))
            for a, b in self._runs(cells, (0,))
            if b - a >= need
        )
        while len(free) > 1 and free[1][2] < free[0][2]:
            free.pop(0)
        if free:
            at = free[0][1]
        else:
            open_ = [(a, b) for a, b in self._runs(cells, (0, -1)) if b == end or -1 in cells[a:b]]
            at = next((a for a, b in open_ if b == end or b - a >= need), end)
            for place in range(at, at + need):
                if place >= len(cells):
                    cells += [0] * page
                elif cells[place] == -1:
                    cells[place : place + page] = [0] * page
        assert set(cells[at : at + need]) == {0}
        cells[at : at + need] = [owner] * need

    @staticmethod
    def _runs(cells: list[int], kinds: tuple[int, ...]) -> list[tuple[int, int]]:
        found, begin = [], None
        for place, cell in enumerate([*cells, 1]):
            if cell in kinds and begin is None:
                begin = place
            elif cell not in kinds and begin is not None:
                found.append((begin, place))
                begin = None
        return found

    def free(self, owner: int) -> None:
        for small, cells in self.cells.items():
            self.cells[small] = [0 if cell == owner else cell for cell in cells]

    def release(self) -> None:
        for small, cells in self.cells.items():
            page = (2 * MIB if small else 20 * MIB) // 512
            for place in range(0, len(cells), page):
                if not any(cells[place : place + page]):
                    cells[place : place + page] = [-1] * page

    @property
    def reserved(self) -> int:
        return sum(512 * (len(cells) - cells.count(-1)) for cells in self.cells.values())


class Simple:
    """The same rules over plain lists: every segment a list of [size, number of its owner or None]."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[list[int | None]]]] = []
        self.reserved = 0

    def alloc(self, size: int, owner: int) -> None:
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        free = [
            (block[0], number, place)
            for number, (kind, blocks) in enumerate(self.segments)
            for place, block in enumerate(blocks)
            if kind == small and block[1] is None and (block[0] or 0) >= size
        ]
        if free:
            _, number, place = min(free)
        else:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.reserved += whole
            self.segments.append((small, [[whole, None]]))
            number, place = len(self.segments) - 1, 0
        blocks = self.segments[number][1]
        left = (blocks[place][0] or 0) - size
        if left >= 512 if small else left > MIB:
            blocks[place : place + 1] = [[size, owner], [left, None]]
        else:
            blocks[place][1] = owner

    def free(self, owner: int) -> None:
        for number, (kind, blocks) in enumerate(self.segments):
            for block in blocks:
                if block[1] == owner:
                    block[1] = None
            joined: list[list[int | None]] = []
            for block in blocks:
                if joined and joined[-1][1] is None and block[1] is None:
                    joined[-1][0] = (joined[-1][0] or 0) + (block[0] or 0)
                else:
                    joined.append(block)
            self.segments[number] = (kind, joined)

    @property
    def allocated(self) -> int:
        return sum(block[0] or 0 for _, blocks in self.segments for block in blocks if block[1] is not None)


def play(allocator: CachingAllocator, simple: Pages | Simple, script: list[tuple[int, int]]) -> None:
    """Allocates, frees and releases on both, and compares what they hold after each step."""
    held = {}
    for number, (size, drop) in enumerate(script, 1):
        held[number] = allocator.alloc(size)
        simple.alloc(size, number)
        if drop < len(held) and drop % 2:
            gone = sorted(held)[drop]
            allocator.free(held.pop(gone))
            simple.free(gone)
        if drop == 6 and isinstance(simple, Pages):
            allocator._release()
            simple.release()
        assert allocator.reserved == simple.reserved
        assert allocator.allocated == sum(block.size for block in held.values())
        assert isinstance(simple, Pages) or allocator.allocated == simple.allocated
    for block in held.values():
        allocator.free(block)
    assert allocator.allocated == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(0, 5)), max_size=40))
def test_it_reserves_and_allocates_exactly_as_the_simpler_one(script: list[tuple[int, int]]) -> None:
    play(CachingAllocator(addresses=MonotonicAddresses()), Simple(), script)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.one_of(st.integers(1, 2 * MIB), st.integers(MIB, 50 * MIB)), st.integers(0, 7)), max_size=12)
)
def test_expandable_segments_reserve_as_those_drawn_cell_by_cell(script: list[tuple[int, int]]) -> None:
    play(ExpandableAllocator(EXPANDABLE), Pages(), script)


@settings(max_examples=40, deadline=None)
@given(st.booleans(), st.lists(SIZES, min_size=1, max_size=30))
def test_after_all_is_freed_the_whole_device_can_be_had_in_one_piece(expandable: bool, sizes: list[int]) -> None:
    allocator = ExpandableAllocator(EXPANDABLE, 2000 * MIB) if expandable else CachingAllocator(limit=2000 * MIB)
    for block in [allocator.alloc(size) for size in sizes]:
        allocator.free(block)
    allocator.alloc(2000 * MIB)
    assert (allocator.allocated, allocator.reserved) == (2000 * MIB, 2000 * MIB)


def test_segments_fill_the_holes_of_earlier_slots_the_lowest_first_and_those_that_were_given_back() -> None:
    slots = SlotAddresses()
    large, small = slots.place(50 * MIB), slots.place(20 * MIB)
    assert small == large - 32 * MIB
    assert slots.place(12 * MIB) == small + 20 * MIB
    assert slots.place(14 * MIB) == large + 50 * MIB
    assert slots.place(2 * MIB) < small
    slots.give_back(large, 50 * MIB)
    assert slots.place(40 * MIB) == large


def timeline_of(*steps: list[int]) -> AllocationTimeline:
    """A timeline of forwards and updates of 12 MiB each, whose events are block numbers, freed where negative."""
    order = [event for events in steps for event in (0, *events, 0)]
    count = max(map(abs, order))
    phases = ("setup", *("forward", "optimizer") * len(steps))
    return AllocationTimeline(tuple(order), (12 * MIB,) * count, ("activations",) * count, ("",) * count, phases)


def test_a_third_step_is_the_second_once_more_with_what_that_one_left_in_place_of_what_it_found() -> None:
    """Each step frees what the one before left (12, then 12 again, as block 24 of as many bytes) in its middle."""
    timeline = timeline_of([15, 12, -15], [18, -12, 24, -18])
    more = repeat_last_step(timeline, 4)
    assert len(more.phases) == len(timeline.phases) + 4
    assert more.events[: len(timeline.events)] == timeline.events
    assert more.events[len(timeline.events) :] == (0, 25, -24, 26, -25, 0, 0, 27, -26, 28, -27, 0)
    assert set(more.sizes) == {12 * MIB}
    alive: set[int] = set()
    for event in more.events:
        if event > 0:
            alive.add(event)
        elif event < 0:
            alive.remove(-event)
    assert alive == {28}


def test_a_step_that_leaves_other_blocks_than_it_found_is_not_repeated() -> None:
    timeline = timeline_of([15, 12, -15], [18, -12, 14, -18])
    sizes = tuple(number * MIB for number in range(1, len(timeline) + 1))
    assert repeat_last_step(replace(timeline, sizes=sizes), 3).events == timeline.events
