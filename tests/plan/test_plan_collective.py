"""Collectives: known costs by hand, and the laws that rings and trees obey."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.hardware.collectives import all_gather, all_reduce, all_to_all, reduce_scatter

ALL: list[Callable[..., Any]] = [all_reduce, reduce_scatter, all_to_all]
SIZES, GROUPS = st.floats(0, 1e12), st.integers(1, 2000)
LINKS = st.tuples(st.floats(1e6, 1e12), st.floats(0, 1e-3))


def test_a_long_message_goes_round_the_ring() -> None:
    # Eight devices, 8 GB at 1 GB/s: seven steps of an eighth each for half of an all-reduce.
    assert reduce_scatter(8e9, 8, 1e9, 0.01) == pytest.approx(7 + 0.07)
    assert all_gather(8e9, 8, 1e9, 0.01) == pytest.approx(7 + 0.07)
    assert all_reduce(8e9, 8, 1e9, 0.01) == pytest.approx(14 + 0.14)
    assert all_to_all(8e9, 8, 1e9, 0.01) == pytest.approx(7 + 0.07)


def test_a_short_message_climbs_the_tree() -> None:
    # Sixteen devices: four rounds up and four down beat thirty steps.
    assert all_reduce(1, 16, 1e9, 0.01) == pytest.approx(8 * 0.01, rel=1e-6)
    assert reduce_scatter(1, 16, 1e9, 0.01) == pytest.approx(8 * 0.01, rel=1e-6)
    assert all_to_all(1, 16, 1e9, 0.01) == pytest.approx(4 * 0.01, rel=1e-6)
    assert all_reduce(1, 9, 1e9, 0.01) == pytest.approx(8 * 0.01, rel=1e-6)  # no power of two: rounded up


@pytest.mark.parametrize("collective", ALL)
def test_one_device_or_nothing_to_send_costs_nothing(collective: Callable[..., Any]) -> None:
    assert collective([1e9, 0.0, 0.0], [1, 8, 1], 1e9, 0.01).tolist() == [0.0, 0.0, 0.0]
    assert collective(1e9, 1, math.inf, 0.0) == 0.0


@pytest.mark.parametrize("collective", ALL)
@given(SIZES, SIZES, GROUPS, LINKS)
def test_more_bytes_never_cost_less(
    collective: Callable[..., Any], a: float, b: float, q: int, link: tuple[float, float]
) -> None:
    small, large = collective(sorted((a, b)), q, *link)
    assert small <= large


@pytest.mark.parametrize("collective", ALL)
@given(st.floats(1, 1e12), st.integers(2, 2000), LINKS)
def test_no_collective_beats_what_a_device_must_send(
    collective: Callable[..., Any], size: float, q: int, link: tuple[float, float]
) -> None:
    least = {all_reduce: 2 * (q - 1) / q, all_to_all: 0.5}.get(collective, (q - 1) / q)
    assert collective(size, q, *link) >= least * size / link[0] * (1 - 1e-12)
