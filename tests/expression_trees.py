"""Expressions as plain trees, and an evaluation of them that shares nothing with the code under test."""

from __future__ import annotations

import operator

from hypothesis import strategies as st

from weft.space import Expr, maximum, minimum

BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "&": operator.and_,
    "|": operator.or_,
    "min": minimum,
    "max": maximum,
}
LOGIC = {"&": lambda x, y: bool(x) and bool(y), "|": lambda x, y: bool(x) or bool(y), "min": min, "max": max}


def nested(leaves, symbols=tuple(BINARY), max_leaves=12):
    """Names and constants, and tuples of an operator and its operands."""
    unary, binary = st.just("~"), st.sampled_from(symbols)
    return st.recursive(
        leaves, lambda inner: st.tuples(binary, inner, inner) | st.tuples(unary, inner), max_leaves=max_leaves
    )


def built(tree):
    """The tree as an expression."""
    if isinstance(tree, str):
        return Expr.variable(tree)
    if not isinstance(tree, tuple):
        return Expr.of(tree)
    return ~built(tree[1]) if tree[0] == "~" else BINARY[tree[0]](built(tree[1]), built(tree[2]))


def computed(tree, values):
    """The value of the tree; None where it reads a name whose value is None."""
    if isinstance(tree, str):
        return values[tree]
    if not isinstance(tree, tuple):
        return tree
    parts = [computed(part, values) for part in tree[1:]]
    if None in parts:
        return None
    return not parts[0] if tree[0] == "~" else LOGIC.get(tree[0], BINARY[tree[0]])(*parts)
