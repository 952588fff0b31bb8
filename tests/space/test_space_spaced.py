"""Spaced permutations: fair in every round, distinct in every window, uniform at every step, reached from anywhere."""

from __future__ import annotations

import itertools
import math
from collections import Counter as Tally

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.space.permutation_streams import SpacedPermutation, bits_per_step, bridge_round, eras, free_round
from weft.utils.rng import generator

shapes = st.integers(2, 14).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count)))


def pools(count: int, slack: int) -> list[int]:
    return [min(slack + 1, count - at) for at in range(count)]


def moved_earlier(before: list[int], after: list[int]) -> int:
    """By how many places the option that gained most comes earlier."""
    return max(before.index(option) - after.index(option) for option in before)


def test_a_free_round_by_hand():
    # pool of two:  [0 1] emits 1, takes 2: [0 2] emits 0, takes 3: [3 2] emits 2: [3] emits 3
    assert free_round([0, 1, 2, 3], 1, [1, 0, 1, 0]) == [1, 0, 2, 3]


def test_a_bridging_round_by_hand():
    # one pass of bubble sort, which carries the largest to the end
    assert bridge_round([3, 1, 2, 0], [0, 1, 2, 3], 1) == [1, 2, 0, 3]
    # towards another target: rank of 3 is 0, of 2 is 1, ...
    assert bridge_round([0, 2, 1, 3], [3, 2, 1, 0], 1) == [2, 1, 3, 0]


@pytest.mark.parametrize(("count", "slack"), [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (5, 1), (5, 3)])
def test_the_draws_of_a_free_round_give_every_valid_round_exactly_once(count, slack):
    order = list(range(count))
    made = [free_round(order, slack, list(d)) for d in itertools.product(*(range(p) for p in pools(count, slack)))]
    valid = [list(after) for after in itertools.permutations(order) if moved_earlier(order, list(after)) <= slack]
    assert sorted(made) == sorted(valid)


@settings(max_examples=200, deadline=None)
@given(shapes.filter(lambda shape: shape[0] > shape[1]), st.integers(0, 2**32))
def test_bridging_rounds_are_valid_and_arrive_at_the_target(shape, seed):
    count, spacing = shape
    slack, rng = count - spacing, generator(seed)
    base, target = rng.permutation(count).tolist(), rng.permutation(count).tolist()
    order = base
    for number in range(1, eras(count, spacing)[1] + 1):
        after = bridge_round(order, target, slack)
        assert moved_earlier(order, after) <= slack
        assert after == bridge_round(base, target, slack * number)  # so that any bridge is reached in one pass
        order = after
    assert order == target


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(0, 2**32), st.integers(0, 50))
def test_every_round_holds_each_option_once_and_every_window_is_distinct(shape, seed, era):
    count, spacing = shape
    order = SpacedPermutation(seed, "choice", count, spacing)
    rounds = order.free + order.bridges
    first = (era * rounds + max(rounds - 12, 0)) * count  # from the last rounds of an era into the next
    steps = [order.at(first + step) for step in range(24 * count)]
    for start in range(0, len(steps), count):
        assert sorted(steps[start : start + count]) == list(range(count))
    for start in range(len(steps) - spacing + 1):
        assert len(set(steps[start : start + spacing])) == spacing


@pytest.mark.parametrize("place", [0, 1021, 1040, 1056])
def test_the_option_at_one_step_is_uniform_over_seeds(place):
    count, spacing, seeds = 8, 6, 1600  # free rounds are steps 0..1023, bridging rounds 1024..1055
    assert eras(count, spacing) == (128, 4)
    seen = Tally(SpacedPermutation(seed, "choice", count, spacing).at(place) for seed in range(seeds))
    expected = seeds / count
    assert sum((seen[option] - expected) ** 2 / expected for option in range(count)) < 24.3  # 99.9 %, 7 degrees


def test_all_valid_rounds_follow_each_other_equally_often():
    order, seen, rounds = SpacedPermutation(3, "choice", 4, 2), Tally(), 4000
    for number in range(rounds):
        era, place = divmod(number, order.free)
        first = era * (order.free + order.bridges) + place
        if place:  # between two free rounds
            before, after = order.round(first - 1), order.round(first)
            seen[tuple(before.index(option) for option in after)] += 1
    valid = [p for p in itertools.permutations(range(4)) if moved_earlier([0, 1, 2, 3], list(p)) <= 2]
    assert len(valid) == 18
    assert set(seen) == set(valid)
    expected = seen.total() / 18
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < 40.8  # 99.9 %, 17 degrees


def test_seeds_and_names_make_different_sequences():
    def start(seed, name):
        return tuple(SpacedPermutation(seed, name, 12, 8).at(step) for step in range(24))

    assert len({start(seed, name) for seed in range(5) for name in ("a", "b")}) == 10


def test_without_slack_the_order_never_changes():
    order = SpacedPermutation(0, "choice", 5, 5)
    assert {tuple(order.round(number)) for number in range(500)} == {tuple(order.round(0))}
    assert bits_per_step(5, 5) == 0


@pytest.mark.parametrize(("count", "spacing"), [(2, 1), (4, 3), (4, 1), (6, 4)])
def test_the_entropy_is_the_logarithm_of_the_number_of_eras_that_there_are(count, spacing):
    free, bridges = eras(count, spacing)
    rounds = math.prod(pools(count, count - spacing))
    exact = (free * math.log2(rounds) + math.log2(math.factorial(count))) / ((free + bridges) * count)
    assert bits_per_step(count, spacing) == pytest.approx(exact)
    assert bits_per_step(count, spacing) <= math.log2(rounds) / count + 1e-12
    assert math.log2(math.factorial(count)) <= bridges * math.log2(rounds) + 1e-9
