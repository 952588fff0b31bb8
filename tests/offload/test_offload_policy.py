"""Where layers lie on a device, and which one is evicted: by hand, by rule, and by brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.offload.allocator import AddressAllocator, AddressSpan
from weft.offload.policy import EvictionPolicy, NextUses


def test_the_smallest_hole_that_is_large_enough_is_taken_and_holes_are_merged() -> None:
    ground = AddressAllocator(100)
    assert [ground.allocate(key, size) for key, size in (("a", 30), ("b", 10), ("c", 40))] == [
        AddressSpan(0, 30),
        AddressSpan(30, 10),
        AddressSpan(40, 40),
    ]
    ground.free("b")
    assert ground.allocate("d", 10) == AddressSpan(30, 10)  # not the hole of 20 at the end
    ground.free("a")
    ground.free("d")
    assert ground.allocate("e", 40) == AddressSpan(0, 40)
    assert ground.allocate("f", 21) is None
    assert ground.used == 80


def test_the_layer_whose_next_use_is_farthest_goes() -> None:
    routes = [["a"], ["b"], ["c"], ["b"], ["a"], ["c"]]
    uses = NextUses(lambda n: routes[n], 0, len(routes))
    policy = EvictionPolicy(2, lambda key: False, lambda key: uses.next(str(key)))
    gone = []
    for at, route in enumerate(routes):
        policy.reprioritize(uses.advance_to(at))
        change = policy.place(dict.fromkeys(route, 1))
        assert change is not None
        gone.append([key for key, _ in change.evictions])
    assert gone == [[], [], ["a"], [], ["b"], []]  # before c, a is used later than b; before a, b never again


@given(
    st.lists(st.lists(st.sampled_from("abcd"), max_size=3), min_size=1, max_size=20),
    st.integers(1, 6),
    st.lists(st.integers(0, 4), max_size=12),
)
def test_the_next_use_is_the_first_one_within_the_horizon(
    routes: list[list[str]], horizon: int, moves: list[int]
) -> None:
    uses, n = NextUses(lambda n: routes[n], 0, len(routes), horizon), 0
    for by in [0, *moves]:
        n = min(n + by, len(routes))
        uses.advance_to(n)
        for name in "abcd":
            first = next((k for k in range(n, min(n + horizon, len(routes))) if name in routes[k]), math.inf)
            assert uses.next(name) == first


def test_what_is_small_lies_at_the_end_and_goes_last() -> None:
    uses = {"large": 9.0, "tiny": 99.0, "other": 10.0}
    policy = EvictionPolicy(2 * 2**20, lambda key: False, uses.__getitem__)
    policy.place({"large": 2**20, "tiny": 16})
    assert policy.allocator.spans == {"large": AddressSpan(0, 2**20), "tiny": AddressSpan(2 * 2**20 - 16, 16)}
    change = policy.place({"other": 2**20})
    assert change is not None
    assert change.evictions == [("large", AddressSpan(0, 2**20))]  # although the other is used later


class Bytes:
    """The oracle of a ground: one entry a byte."""

    def __init__(self, size: int) -> None:
        self.owner: list[int | None] = [None] * size

    def set(self, span: AddressSpan, key: int) -> None:
        assert all(owner is None for owner in self.owner[span.start : span.end])
        assert span.start >= 0
        assert span.end <= len(self.owner)
        self.owner[span.start : span.end] = [key] * span.size

    def clear(self, key: int) -> None:
        self.owner = [None if owner == key else owner for owner in self.owner]

    def largest_hole(self) -> int:
        best = run = 0
        for owner in self.owner:
            run = run + 1 if owner is None else 0
            best = max(best, run)
        return best


@settings(max_examples=200)
@given(st.data())
def test_a_ground_is_a_map_of_bytes(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 40))
    ground, oracle = AddressAllocator(size), Bytes(size)
    for key in range(data.draw(st.integers(1, 25))):
        there = sorted(map(int, ground.spans))  # type: ignore[call-overload]
        what = data.draw(st.sampled_from(["put", "put", "free"] if there else ["put"]))
        if what == "put":
            wanted = data.draw(st.integers(1, size))
            hole = oracle.largest_hole()
            span = ground.allocate(key, wanted)
            assert (span is None) == (wanted > hole)
            if span is not None:
                oracle.set(span, key)
            continue
        old = data.draw(st.sampled_from(there))
        ground.free(old)
        oracle.clear(old)
        assert ground.used == sum(owner is not None for owner in oracle.owner)


@settings(max_examples=150)
@given(st.data())
def test_what_is_wanted_comes_and_what_is_pinned_stays_where_it_is(data: st.DataObject) -> None:
    size = data.draw(st.integers(4, 60))
    sizes = {key: data.draw(st.integers(1, max(size // 2, 1))) for key in range(8)}
    soon = {key: data.draw(st.integers(0, 20)) for key in sizes}
    pinned: set[int] = set()
    policy = EvictionPolicy(size, lambda key: key in pinned, lambda key: soon[key])  # type: ignore[index]
    for _ in range(data.draw(st.integers(1, 12))):
        wanted = data.draw(st.lists(st.sampled_from(range(8)), min_size=1, max_size=4, unique=True))
        before = dict(policy.allocator.spans)
        kept = {key: before[key] for key in pinned & set(before)}
        change = policy.place({key: sizes[key] for key in wanted})
        after = policy.allocator.spans
        if change is None:
            assert after == before
            need = sum(sizes[key] for key in wanted)
            assert need > size or any(key in pinned for key in before)  # progress
        else:
            assert set(wanted) <= set(after)
            assert all(after[key] == span for key, span in kept.items())
            assert {key for key, _ in change.evictions} <= set(before) - set(kept)
            moved = {key: span for key, span in after.items() if before.get(key) != span}
            assert moved.items() <= dict(change.loads).items() <= after.items()
        spans = sorted(after.values())
        assert all(a.end <= b.start for a, b in pairwise(spans))
        assert all(span.start >= 0 and span.end <= size for span in spans)
        pinned = set(data.draw(st.lists(st.sampled_from(sorted(after)), max_size=2, unique=True))) if after else set()  # type: ignore[type-var]


def fewest(routes: Sequence[frozenset[int]], room: int) -> int:
    """The fewest copies with which every route is there in its turn: all ways to evict are tried."""
    ways: dict[frozenset[int], int] = {frozenset(): 0}
    for route in routes:
        found: dict[frozenset[int], int] = {}
        for there, copies in ways.items():
            cost = copies + len(route - there)
            others = there - route
            for count in range(min(len(others), room - len(route)) + 1):
                for some in combinations(sorted(others), count):
                    state = route | frozenset(some)
                    found[state] = min(found.get(state, cost), cost)
        ways = found
    return min(ways.values())


@settings(max_examples=150)
@given(
    routes=st.lists(st.frozensets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=9),
    room=st.integers(3, 5),
)
def test_no_other_way_to_evict_needs_fewer_copies(routes: list[frozenset[int]], room: int) -> None:
    uses = NextUses(lambda n: [str(layer) for layer in routes[n]], 0, len(routes))
    policy = EvictionPolicy(room, lambda key: False, lambda key: uses.next(str(key)))
    copies = 0
    for at, route in enumerate(routes):
        policy.reprioritize(uses.advance_to(at))
        change = policy.place({str(layer): 1 for layer in sorted(route)})
        assert change is not None
        copies += len(change.loads)
    assert copies == fewest(routes, room)
