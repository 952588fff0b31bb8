"""Expressions: read like Python, computed like Python, written down without being evaluated."""

from __future__ import annotations

import functools
import json
import pickle

import numpy as np
import pytest
from expression_trees import built, computed, nested
from hypothesis import example, given
from hypothesis import strategies as st

from weft.errors import SpaceError
from weft.space import Expr, maximum, minimum

A, B, C = (Expr.variable(name) for name in "abc")

leaves = st.sampled_from(["a", "b", "c"]) | st.integers(-3, 3) | st.booleans() | st.sampled_from([0.5, -1.25])


trees = nested(leaves)


def outcome(compute):
    """The value with its type, or that there is none."""
    try:
        value = compute()
    except (SpaceError, ZeroDivisionError):
        return "error"
    return type(value), value


def test_an_expression_reads_as_it_was_written():
    ratio, width = Expr.variable("ratio"), Expr.variable("width")
    assert str(ratio * width) == "ratio * width"
    assert str((A + B) * 2 - C) == "(a + b) * 2 - c"
    assert str(A - (B - C)) == "a - (b - c)"
    assert str((A == "conv3") & ~(B < 2)) == "(a == 'conv3') & ~(b < 2)"
    assert str(minimum(A, 3, B)) == "minimum(minimum(a, 3), b)"
    assert (A * B + C).names == {"a", "b", "c"}


def test_operators_compute_what_python_computes():
    values = {"a": 7, "b": 2, "c": 0.5}
    assert (10 % A).value(values) == 3
    assert (1 - C).value(values) == 0.5
    assert (-B).value(values) == -2
    assert maximum(A, B, 9).value(values) == 9
    assert (np.int64(3) * A).value(values) == 21


def test_an_expression_has_no_truth_value_so_that_and_cannot_drop_half_of_it():
    for use in (lambda: A > 1 and B > 2, lambda: not A, lambda: 1 < A < 3, lambda: A in [B]):
        with pytest.raises(SpaceError, match=r"write & \| ~ for and, or, not, and one comparison at a time"):
            use()


def test_equality_of_handles_builds_an_expression_and_hashing_is_by_identity():
    assert isinstance(A == B, Expr)
    assert len({A, B, Expr.variable("a")}) == 3
    assert A.same_as(Expr.variable("a"))
    assert not Expr.of(1).same_as(Expr.of(True))
    assert not (A + B).same_as(B + A)


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (A + B, "'a \\+ b' reads 'b', which has no value here"),
        (A // 0, "cannot evaluate 'a // 0' with a=1: "),
        (A * "x", "arithmetic is for numbers"),
        (A < "x", "cannot evaluate 'a < 'x'' with a=1"),
    ],
)
def test_what_cannot_be_computed_is_an_error_that_shows_the_expression(expr, message):
    with pytest.raises(SpaceError, match=message):
        expr.value({"a": 1})


def test_constants_are_plain_finite_values():
    for wrong in (float("nan"), float("inf"), None, [1], 1j):
        with pytest.raises(SpaceError, match="value"):
            A + wrong


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        [["name", "a"], ["name", "b"]],
        [["name", "a"], ["op", "+"]],
        [["op", "__import__"]],
        [["name", 3]],
        [["int", "3"]],
        [["int", True]],
        [["float", float("nan")]],
        [["code", "1"]],
        ["a"],
        [["name", "a", "b"]],
        [[["name"], "a"]],
    ],
)
def test_malformed_json_is_refused(data):
    with pytest.raises(SpaceError):
        Expr.from_json(data)


@given(trees, st.fixed_dictionaries({name: st.integers(-4, 4) for name in "abc"}))
def test_value_agrees_with_a_recursive_evaluation(tree, values):
    assert outcome(lambda: built(tree).value(values)) == outcome(lambda: computed(tree, values))


@given(trees, st.fixed_dictionaries({name: st.integers(-4, 4) for name in "abc"}), st.sets(st.sampled_from("abc")))
def test_knowing_some_names_first_does_not_change_the_value(tree, values, known):
    left = built(tree).partial({name: values[name] for name in known})
    assert left.names == built(tree).names - known
    assert outcome(lambda: left.value(values)) == outcome(lambda: built(tree).value(values))


@given(trees)
@example(functools.reduce(lambda left, right: ("+", left, right), ["a"] * 400))
def test_json_and_pickle_keep_the_expression(tree):
    expr = built(tree)
    assert Expr.from_json(json.loads(json.dumps(expr.to_json()))).same_as(expr)
    assert pickle.loads(pickle.dumps(expr)).same_as(expr)


@given(nested(st.sampled_from(["a", "b", "c"])))
def test_python_reads_the_text_as_the_same_expression(tree):
    names = {"a": A, "b": B, "c": C, "minimum": minimum, "maximum": maximum}
    assert eval(str(built(tree)), names).same_as(built(tree))
