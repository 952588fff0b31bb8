"""Fronts, ranks and crowding of points, against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.utils.pareto import Array, crowding, non_dominated, ranks


def grids(columns: int, top: int = 4, size: int = 9) -> st.SearchStrategy[Array]:
    """A few points on a small grid, so that ties and doubles are common."""
    row = st.lists(st.integers(0, top), min_size=columns, max_size=columns)
    return st.lists(row, max_size=size).map(lambda rows: np.array(rows, dtype=np.float64).reshape(-1, columns))


def beats(a: Array, b: Array) -> bool:
    return bool((a <= b).all() and (a < b).any())


@given(st.one_of(grids(1), grids(2), grids(3)))
def test_a_row_is_on_the_front_exactly_if_no_other_beats_it(points: Array) -> None:
    expected = [not any(beats(other, row) for other in points) for row in points]
    assert non_dominated(points).tolist() == expected


@given(grids(2), st.lists(st.sampled_from([0.0, 0.0, 0.5, 2.0, math.inf]), min_size=9, max_size=9))
def test_ranks_peel_fronts_by_constrained_domination(points: Array, some: list[float]) -> None:
    worse = np.array(some[: len(points)])

    def constrained(i: int, j: int) -> bool:
        return beats(points[i], points[j]) if worse[i] == worse[j] == 0 else bool(worse[i] < worse[j])

    if not any(some[: len(points)]):
        assert ranks(points).tolist() == ranks(points, worse).tolist()
    expected, left, level = [-1] * len(points), set(range(len(points))), 0
    while left:
        front = {j for j in left if not any(constrained(i, j) for i in left)}
        for j in front:
            expected[j] = level
        left, level = left - front, level + 1
    assert ranks(points, worse).tolist() == expected


def test_crowding_by_hand() -> None:
    points = np.array([[0.0, 10.0], [2.0, 5.0], [4.0, 4.0], [10.0, 0.0], [11.0, 11.0]])
    rank = np.array([0, 0, 0, 0, 1])
    expected = [math.inf, 0.4 + 0.6, 0.8 + 0.5, math.inf, math.inf]
    assert crowding(points, rank).tolist() == pytest.approx(expected)


def test_crowding_is_never_nan_even_with_equal_or_infinite_points() -> None:
    points = np.array([[1.0, math.inf], [1.0, math.inf], [1.0, math.inf], [1.0, -math.inf]])
    assert not np.isnan(crowding(points, np.zeros(4, dtype=np.int64))).any()
    assert crowding(np.zeros((0, 2)), np.zeros(0, dtype=np.int64)).tolist() == []
