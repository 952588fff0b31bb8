"""Choices: what is an option, what is near to it, what is drawn."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import SpaceError
from weft.space import Categorical, Floats, Integers
from weft.space.choice import choice_from_json
from weft.utils.rng import generator

values = st.text(max_size=3) | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2)
categoricals = st.lists(values, min_size=1, max_size=6, unique=True).map(lambda options: Categorical(tuple(options)))
integers = st.builds(
    Integers, st.lists(st.integers(-50, 50), min_size=1, max_size=8, unique=True).map(tuple), st.booleans()
)
floats = st.builds(
    lambda low, width, log: Floats(low, low + width, log), st.floats(1e-6, 1e3), st.floats(1e-3, 1e3), st.booleans()
)
choices = categoricals | integers | floats


def test_integers_are_sorted_and_only_adjacent_ones_are_neighbours() -> None:
    widths = Integers((64, 16, 32))
    assert widths.options == (16, 32, 64)
    assert [widths.neighbours(width) for width in (16, 32, 64)] == [(32,), (16, 64), (32,)]
    assert Integers((64, 16, 32), ordered=False).neighbours(16) == (64, 32)
    assert Categorical(("a", "b", "c")).neighbours("b") == ("a", "c")


def test_neighbours_of_a_real_number_are_small_steps_inside_of_the_interval():
    assert Floats(0, 1).neighbours(0.5) == pytest.approx((0.4, 0.49, 0.51, 0.6))
    assert Floats(0, 1).neighbours(0.0) == pytest.approx((0.01, 0.1))
    assert Floats(1e-4, 1, log=True).neighbours(1e-2) == pytest.approx((10**-2.4, 10**-2.04, 10**-1.96, 10**-1.6))


def test_a_value_that_equals_an_option_becomes_that_option_but_a_bool_is_no_number():
    choice = Integers((1, 2))
    assert type(choice.canonical(np.int64(2))) is int
    assert type(choice.canonical(1.0)) is int
    assert not choice.contains(True)
    assert Categorical((True, False)).contains(True)
    assert not Categorical((True, False)).contains(1)
    assert math.copysign(1, Floats(-1, 1).canonical(-0.0)) == 1
    with pytest.raises(SpaceError, match="3 is not an option; options: 1, 2"):
        choice.canonical(3)
    with pytest.raises(SpaceError, match=r"2.0 is not in \[0.0, 1.0\]"):
        Floats(0, 1).canonical(2.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Categorical(()), "at least one option"),
        (lambda: Categorical(("a", "a")), "'a' and 'a' are the same value"),
        (lambda: Categorical((1, True)), "1 and True are the same value"),
        (lambda: Categorical((None,)), "values are str, bool, int or float"),
        (lambda: Categorical((math.nan,)), "finite"),
        (lambda: Integers((1, 2.0)), "2.0 is no integer"),
        (lambda: Integers((True,)), "True is no integer"),
        (lambda: Floats(math.nan, 1), "finite"),
        (lambda: Floats(0, math.inf), "finite"),
        (lambda: Floats(1, 1), "low < high"),
        (lambda: Floats("0", 1), "are numbers"),
        (lambda: Floats(0, 1, log=True), "low > 0"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(make, message):
    with pytest.raises(SpaceError, match=message):
        make()


@given(choices, st.integers(0, 1000))
def test_what_is_drawn_or_near_is_contained(choice, seed):
    value = choice.sample(generator(seed))
    assert choice.contains(value)
    assert choice.canonical(value) == value
    near = choice.neighbours(value)
    assert all(choice.contains(other) for other in near)
    assert value not in near
    assert len(set(near)) == len(near)
    assert near or (choice.options is not None and len(choice.options) == 1)


@given(choices)
def test_json_keeps_a_choice(choice):
    again = choice_from_json(json.loads(json.dumps(choice.to_json())))
    assert again == choice
    assert json.dumps(again.to_json()) == json.dumps(choice.to_json())


def test_every_option_is_drawn_equally_often():
    rng, choice = generator(1, "uniform"), Categorical(("a", "b", "c", "d"))
    drawn = [choice.sample(rng) for _ in range(4000)]
    expected = 1000
    chi_square = sum((drawn.count(option) - expected) ** 2 / expected for option in choice.options)
    assert chi_square < 16.3  # 99.9 % of fair draws are below, with 3 degrees of freedom
