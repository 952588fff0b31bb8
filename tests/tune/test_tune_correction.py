"""Corrected estimates: never below what was seen, and never below the estimate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.tune.fit.correction import MemoryCorrection


def test_what_took_less_than_its_estimate_does_not_lower_the_next_one() -> None:
    correction = MemoryCorrection()
    for _ in range(5):
        correction.on_finished(1000, 500, shape="s", family="f")
    assert correction.apply(1000, shape="s", family="f") == 1000
    assert correction.apply(1000, shape="new", family="f") == 1000


def test_one_that_exceeded_is_tried_again_with_more_each_time() -> None:
    correction = MemoryCorrection(growth=1.5)
    assert correction.on_oom(100, 100, shape="s", family="f") == 150
    assert correction.apply(100, shape="s") == 150
    assert correction.on_oom(100, 150, needed=400, shape="s", family="f") == 400
    assert correction.apply(100, shape="s", family="f") >= 400
    assert correction.apply(100, shape="new", family="f") >= 400


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=20))
def test_no_shape_or_family_is_given_less_than_it_was_seen_to_take(seen: list[tuple[int, int]]) -> None:
    correction = MemoryCorrection()
    for estimate, peak in seen:
        correction.on_finished(estimate, peak, shape="s", family="f")
    estimate, peak = seen[-1]
    assert correction.apply(estimate, shape="s") >= max(peak for _, peak in seen)
    assert correction.apply(estimate, family="f") >= peak
