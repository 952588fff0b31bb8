"""Agreement of rankings, against definitions and SciPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import SearchError
from weft.search.rank import _inversions, kendall_tau, regret, top_hit

pairs = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=40)


def test_kendall_tau_by_hand() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert kendall_tau([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(2 * 3))
    assert kendall_tau([-math.inf, 0, math.inf], [1, 2, 3]) == 1.0


def test_kendall_tau_of_a_constant_or_of_too_few_is_nan() -> None:
    assert math.isnan(kendall_tau([1, 1, 1], [1, 2, 3]))
    assert math.isnan(kendall_tau([1], [1]))
    assert math.isnan(kendall_tau([], []))


@given(pairs)
def test_kendall_tau_is_its_definition_over_all_pairs(pairs: list[tuple[int, int]]) -> None:
    agreement, free_a, free_b = 0, 0, 0
    for (a, b), (c, d) in itertools.combinations(pairs, 2):
        agreement += int(np.sign(a - c) * np.sign(b - d))
        free_a, free_b = free_a + (a != c), free_b + (b != d)
    found = kendall_tau([a for a, _ in pairs], [b for _, b in pairs])
    if free_a and free_b:
        assert found == pytest.approx(agreement / math.sqrt(free_a * free_b), abs=1e-12)
    else:
        assert math.isnan(found)


def test_kendall_tau_is_scipys_on_thousands_of_numbers_with_ties() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    a = rng.normal(size=5000)
    b = np.round(a + rng.normal(size=5000), 1)
    assert kendall_tau(a, b) == pytest.approx(float(stats.kendalltau(a, b).statistic), abs=1e-12)
    assert kendall_tau(b, a) == pytest.approx(kendall_tau(a, b), abs=1e-12)


@given(st.lists(st.integers(0, 20), max_size=60))
def test_inversions_are_the_pairs_out_of_order(values: list[int]) -> None:
    expected = sum(a > b for a, b in itertools.combinations(values, 2))
    assert _inversions(np.array(values, dtype=np.int64)) == expected


def test_rankings_of_other_lengths_or_with_nan_are_refused() -> None:
    with pytest.raises(SearchError, match=r"\(2,\) and \(3,\)"):
        kendall_tau([1, 2], [1, 2, 3])
    with pytest.raises(SearchError, match="NaN"):
        kendall_tau([1, math.nan], [1, 2])


def test_hits_and_regret_by_hand() -> None:
    scores, truth = [5, 4, 3, 2, 1], [0.5, 0.9, 0.1, 0.8, 0.2]
    assert top_hit(scores, truth, 0.4) == 0.5  # takes 0.5 and 0.9, where 0.9 and 0.8 are best
    assert top_hit(scores, truth, 0.2) == 0.0
    assert top_hit(scores, truth, 1.0) == 1.0
    assert regret(scores, truth) == pytest.approx(0.4)
    assert regret(scores, truth, 0.4) == 0.0


def test_ties_never_flatter_a_ranking() -> None:
    assert top_hit([1, 1, 1, 1], [1, 2, 3, 4], 0.5) == 0.0
    assert regret([1, 1, 1, 1], [1, 2, 3, 4]) == 3.0
    assert top_hit([4, 3, 2, 1], [7, 7, 7, 7], 0.25) == 1.0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12), st.floats(0, 1))
def test_hits_are_a_share_and_regret_falls_as_more_is_kept(pairs: list[tuple[int, int]], fraction: float) -> None:
    scores, truth = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    assert 0 <= top_hit(scores, truth, fraction) <= 1
    assert top_hit(truth, truth, fraction) == 1
    assert 0 <= regret(scores, truth, fraction) <= regret(scores, truth)
    assert regret(truth, truth) == regret(scores, truth, 1.0) == 0


def test_a_fraction_beyond_one_and_an_empty_ranking_are_refused() -> None:
    with pytest.raises(SearchError, match=r"1\.5"):
        top_hit([1], [1], 1.5)
    with pytest.raises(SearchError, match="nothing"):
        regret([], [])
