"""Cuts of a chain into stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConsistencyError
from weft.supernet.partition import best_cut, stage_of


def largest(costs: list[float], cut: tuple[int, ...]) -> float:
    edges = [0, *cut, len(costs)]
    return max(sum(costs[a:b]) for a, b in pairwise(edges))


def test_a_block_that_costs_as_much_as_the_rest_gets_a_stage_of_its_own() -> None:
    assert best_cut([1, 1, 4, 1, 1], 3) == (2, 3)
    assert best_cut([1, 2, 3], 1) == ()
    assert stage_of((2, 3), 5) == [0, 0, 1, 2, 2]


@given(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=8), st.data())
def test_no_other_cut_has_a_faster_slowest_stage(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = best_cut(costs, stages)
    assert len(set(stage_of(found, len(costs)))) == stages
    every = combinations(range(1, len(costs)), stages - 1)
    assert largest(costs, found) == min(largest(costs, cut) for cut in every)


def test_more_stages_than_blocks_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConsistencyError, match="4 stages cannot share 3 blocks: use 1 to 3"):
        best_cut([1, 1, 1], 4)
    for cut in ((0,), (3,), (2, 2), (2, 1)):
        with pytest.raises(ConsistencyError, match="no stage may be empty"):
            stage_of(cut, 3)
