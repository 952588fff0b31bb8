"""Objectives and constraints: reading them, and what they say of scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import SearchError
from weft.search.objectives import (
    Constraint,
    losses,
    parse_constraints,
    parse_objectives,
    require,
    violations,
)

GOALS = parse_objectives("accuracy", "flops")
OPS = ["<=", ">=", "<", ">"]


@pytest.mark.parametrize(("maximize", "minimize"), [((), ()), ("a", "a"), (["a", "b", "a"], ()), ("", ())])
def test_no_objective_and_one_named_twice_are_refused(maximize: object, minimize: object) -> None:
    with pytest.raises(SearchError):
        parse_objectives(maximize, minimize)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "flops<=", "<=5", "flops=5", "flops<=big", "flops<=nan", "3<=5", "a<=1<=2"])
def test_nonsense_is_no_constraint_and_the_error_repeats_it_or_its_value(text: str) -> None:
    with pytest.raises(SearchError) as caught:
        Constraint.parse(text)
    assert text in str(caught.value) or "finite" in str(caught.value)


@given(st.sampled_from(OPS), st.floats(-1e12, 1e12), st.from_regex(r"[a-z_][a-z_0-9.@/-]{,9}", fullmatch=True))
def test_a_constraint_survives_being_written_and_read(op: str, bound: float, name: str) -> None:
    for text in (str(Constraint(name, op, bound)), f" {name} {op} {bound} "):
        assert Constraint.parse(text) == Constraint(name, op, bound)


@given(st.sampled_from(OPS), st.floats(-10, 10), st.floats(allow_nan=True, allow_infinity=True))
def test_the_violation_is_zero_exactly_where_the_comparison_holds(op: str, bound: float, value: float) -> None:
    holds = {"<=": value <= bound, ">=": value >= bound, "<": value < bound, ">": value > bound}[op]
    violation = Constraint("m", op, bound).violation({"m": value})
    assert (violation == 0) == holds
    assert violation >= 0


def test_the_violation_is_in_units_of_the_bound_and_an_absent_metric_is_no_violation() -> None:
    assert Constraint("flops", "<=", 100.0).violation({"flops": 150.0}) == 0.5
    assert Constraint("top", ">=", 0.8).violation({"top": 0.4}) == 0.5
    assert Constraint("gap", "<=", 0.0).violation({"gap": 3.0}) == 3.0
    assert Constraint("flops", "<=", 100.0).violation({"flops": math.nan}) == math.inf
    assert Constraint("flops", "<=", 100.0).violation({}) == 0.0


def test_losses_turn_signs_and_keep_the_order_of_the_objectives() -> None:
    rows = losses([{"accuracy": 0.5, "flops": 2.0}, {"flops": 3.0}], GOALS)
    np.testing.assert_array_equal(rows, [[-0.5, 2.0], [math.nan, 3.0]])


def test_violations_add_up_and_a_nan_objective_is_infinitely_bad_only_for_the_feasible() -> None:
    rules = parse_constraints(["flops<=10", "params<=100"])
    scores = [
        {"accuracy": 0.5, "flops": 10.0, "params": 100.0},
        {"accuracy": 0.5, "flops": 15.0, "params": 200.0},
        {"accuracy": math.nan, "flops": 1.0, "params": 1.0},
        {"flops": 20.0},
    ]
    assert violations(scores, GOALS, rules).tolist() == [0.0, 1.5, math.inf, 1.0]
    assert violations([], GOALS, rules).shape == (0,)


def test_a_missing_metric_is_named_with_the_nearest_one() -> None:
    with pytest.raises(SearchError, match=r"'acuracy'.*did you mean 'accuracy'"):
        require({"accuracy": 1.0, "flops": 2.0}, ["flops", "acuracy"])
    require({"accuracy": 1.0}, ["accuracy"])
