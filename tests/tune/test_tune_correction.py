"""Corrected estimates: never below what was seen, and no lower without evidence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.tune.correction import Correction


def test_a_shape_that_ran_before_needs_what_it_needed() -> None:
    correction = Correction(repeat=0.0)
    correction.observed(1000, 700, shape="s")
    assert correction.corrected(1000, shape="s") == 700
    correction.observed(1000, 800, shape="s")
    correction.observed(1000, 600, shape="s")
    assert correction.corrected(1000, shape="s") == 800


def test_a_family_is_lowered_only_after_three_trials() -> None:
    correction = Correction(margin=0.0)
    for count, expected in ((1, 1000), (2, 1000), (3, 500)):
        correction.observed(100, 50, family="f")
        assert correction.corrected(1000, family="f") == expected, count


def test_a_family_is_raised_by_its_worst_trial_at_once() -> None:
    correction = Correction(margin=0.0)
    for peak in (90, 130, 80):
        correction.observed(100, peak, family="f")
    assert correction.corrected(1000, family="f") == 1300
    assert correction.corrected(1000, family="other") == 1000


def test_one_that_exceeded_is_tried_again_with_more_each_time() -> None:
    correction = Correction(growth=1.5)
    assert correction.exceeded(100, 100, shape="s", family="f") == 150
    assert correction.corrected(100, shape="s") == 150
    assert correction.exceeded(100, 150, needed=400, shape="s", family="f") == 400
    assert correction.corrected(100, shape="s", family="f") >= 400
    assert correction.corrected(100, shape="new", family="f") >= 400


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=20))
def test_no_shape_or_family_is_given_less_than_it_was_seen_to_take(seen: list[tuple[int, int]]) -> None:
    correction = Correction()
    for estimate, peak in seen:
        correction.observed(estimate, peak, shape="s", family="f")
    estimate, peak = seen[-1]
    assert correction.corrected(estimate, shape="s") >= max(peak for _, peak in seen)
    assert correction.corrected(estimate, family="f") >= peak
