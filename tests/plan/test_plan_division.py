"""Divisions of a line into stages, against all that there are."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.division import Division, divide


def test_a_smaller_sum_is_worth_a_slower_stage() -> None:
    # From 0 to 1 or 2, and on to 3: the even one sends more.
    spans = np.full((4, 4), math.inf)
    spans[0, 1], spans[1, 3] = 5.0, 5.0
    spans[0, 2], spans[2, 3] = 5.5, 1.0
    assert divide([spans, spans], 2) == Division((0, 2, 3), (6.5 + 5.5) / 2, (6.5 + 5.5) / 2)
    assert divide([spans, spans], 9) == Division((0, 1, 3), (10 + 8 * 5) / 9, (10 + 8 * 5) / 9)


def test_among_equal_sums_the_slowest_stage_is_fastest() -> None:
    sums = np.arange(5.0)
    spans = np.where(np.tri(5, dtype=bool), math.inf, sums[None, :] - sums[:, None])
    found = divide([spans, spans], 1)
    assert found is not None
    assert found.marks == (0, 2, 4)


def test_where_no_stage_may_lie_there_is_no_division() -> None:
    spans = np.full((3, 3), math.inf)
    spans[0, 1] = 1.0
    assert divide([spans, spans], 4) is None


@given(st.integers(0, 10_000), st.integers(2, 9), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_no_division_is_better_and_the_bound_is_below_all(
    seed: int, ends: int, stages: int, microbatches: int, summed: bool
) -> None:
    rng = np.random.default_rng(seed)
    never = np.tri(ends, dtype=bool)
    every = [np.where(never | (rng.random((ends, ends)) < 0.1), math.inf, rng.gamma(2.0, 1.0, (ends, ends)))]
    every += [every[0] if rng.random() < 0.5 else np.where(never, math.inf, rng.gamma(2.0, 1.0, (ends, ends)))] * 3
    spans = every[:stages]
    sums, total = (rng.gamma(1.0, 1.0, (ends, ends)), float(rng.gamma(2.0, 2.0))) if summed else (None, 0.0)

    def step(marks: tuple[int, ...]) -> float:
        own = [float(span[a, b]) for span, (a, b) in zip(spans, pairwise(marks), strict=True)]
        if math.inf in own:
            return math.inf
        together = math.fsum(own) if sums is None else total + math.fsum(float(sums[a, b]) for a, b in pairwise(marks))
        return (together + (microbatches - 1) * max(*own, together / stages)) / microbatches

    ways = [(0, *inner, ends - 1) for inner in combinations(range(1, ends - 1), stages - 1)]
    best = min(map(step, ways), default=math.inf)
    found = divide(spans, microbatches, sums, total)
    if found is None:
        assert math.isinf(best)
        return
    assert found.step == pytest.approx(step(found.marks))
    assert found.bound <= best * (1 + 1e-12)
    assert found.step >= best * (1 - 1e-12)
    if ends <= 5:  # so few values are all tried
        assert found.step == pytest.approx(best)
        assert found.bound == pytest.approx(best)


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_a_long_line_meets_the_division(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ends, stages = 200, 12
    sums = np.concatenate([[0.0], np.cumsum(rng.gamma(0.5, 1.0, ends - 1))])
    sent = np.array([0.0, *rng.choice([0.1, 0.5, 2.0], ends - 2), 0.0])
    spans = np.where(np.tri(ends, dtype=bool), math.inf, sums[None, :] - sums[:, None] + sent[None, :] + sent[:, None])
    found = divide([spans] * stages, 16)
    assert found is not None
    assert found.bound <= found.step <= found.bound * (1 + 2e-4)
