"""Expressions over the choices of a space: conditions, constraints and derived dimensions are written in them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from weft.errors import SpaceError

Value = str | bool | int | float
Token = tuple[str, Value]  # ("name", n), ("op", symbol), or a constant under its type: ("int", 3)
MAX_TOKENS = 100_000


def _operator(symbol: str, reflected: bool = False) -> Callable[[Expr, object], Expr]:
    """The method for an operator, or for one whose left operand is a constant."""

    def method(self: Expr, other: object) -> Expr:
        return _join(symbol, other, self) if reflected else _join(symbol, self, other)

    return method


@dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """An immutable expression, built by Python's operators on handles; kept as a postfix program.

    `& | ~` stand for and, or, not, and evaluate both sides. `==` builds an expression, so an Expr hashes by identity
    and has no truth value; `same_as` compares two of them.

    >>> ratio, width = Expr.variable("ratio"), Expr.variable("width")
    >>> hidden = ratio * width
    >>> str(hidden), hidden.value({"ratio": 4, "width": 16})
    ('ratio * width', 64)
    """

    program: tuple[Token, ...]
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.program) > MAX_TOKENS:
            raise SpaceError(
                f"an expression of {len(self.program)} parts is longer than {MAX_TOKENS}; derive its parts"
            )
        object.__setattr__(self, "names", frozenset(str(item) for kind, item in self.program if kind == "name"))

    @staticmethod
    def variable(name: str) -> Expr:
        return Expr((("name", name),))

    @staticmethod
    def of(operand: object) -> Expr:
        """The expression itself, or a constant as one."""
        return operand if isinstance(operand, Expr) else Expr((_constant(plain(operand)),))

    def value(self, assignment: Mapping[str, Value]) -> Value:
        """What the expression comes to; raises SpaceError where a name is missing or an operation is impossible."""
        stack: list[Value] = []
        for kind, item in self.program:
            if kind == "name":
                if item not in assignment:
                    raise SpaceError(f"'{self}' reads '{item}', which has no value here")
                stack.append(assignment[str(item)])
            elif kind == "op":
                arity, _, function = _OPS[str(item)]
                operands = stack[-arity:]
                del stack[-arity:]
                try:
                    stack.append(function(*operands))
                except (TypeError, ZeroDivisionError, OverflowError) as error:
                    values = " ".join(f"{name}={assignment[name]!r}" for name in sorted(self.names))
                    raise SpaceError(f"cannot evaluate '{self}' with {values or 'constants'}: {error}") from None
            else:
                stack.append(item)
        return stack[0]

    def partial(self, assignment: Mapping[str, Value]) -> Expr:
        """The expression that is left once some names are known; what cannot be computed stays as it is."""
        return self.substitute({name: Expr.of(value) for name, value in assignment.items()})

    def substitute(self, meanings: Mapping[str, Expr]) -> Expr:
        """The expression with names replaced by what they stand for; what is known then is computed."""
        if self.names.isdisjoint(meanings):
            return self
        stack: list[tuple[Token, ...]] = []
        for token in self.program:
            kind, item = token
            if kind == "op":
                arity, _, function = _OPS[str(item)]
                operands = stack[-arity:]
                del stack[-arity:]
                joined = tuple(part for operand in operands for part in operand) + (token,)
                if all(len(operand) == 1 and operand[0][0] != "name" for operand in operands):
                    with suppress(TypeError, ZeroDivisionError, OverflowError):  # an error counts in `value` only
                        joined = (_constant(function(*(operand[0][1] for operand in operands))),)
                stack.append(joined)
            elif kind == "name" and item in meanings:
                stack.append(meanings[str(item)].program)
            else:
                stack.append((token,))
        return Expr(stack[0])

    def same_as(self, other: Expr) -> bool:
        """Whether both are written alike, constants of the same type included."""
        return self.program == other.program

    def to_json(self) -> list[list[Value]]:
        return [[kind, item] for kind, item in self.program]

    @staticmethod
    def from_json(data: object) -> Expr:
        """Reads what `to_json` wrote; nothing is evaluated."""
        if not isinstance(data, list):
            raise SpaceError(f"an expression is a list of [kind, item] pairs, not {data!r}")
        depth, program = 0, []
        for pair in data:
            if not (isinstance(pair, list | tuple) and len(pair) == 2):
                raise SpaceError(f"an expression is a list of [kind, item] pairs; {pair!r} is none")
            kind, item = pair
            if kind == "op" and isinstance(item, str) and item in _OPS and depth >= _OPS[item][0]:
                depth -= _OPS[item][0]
            elif (
                kind == "op"
                or (kind != "name" and _constant(plain(item))[0] != kind)
                or (kind == "name" and not isinstance(item, str))
            ):
                raise SpaceError(f"{pair!r} is no part of an expression at this place")
            depth += 1
            program.append((str(kind), item))
        if depth != 1:
            raise SpaceError(f"an expression leaves one value, this one leaves {depth}")
        return Expr(tuple(program))

    def __str__(self) -> str:
        stack: list[tuple[str, int]] = []
        for kind, item in self.program:
            if kind != "op":
                stack.append((str(item) if kind == "name" else repr(item), _ATOM))
                continue
            symbol = str(item)
            arity, rank, _ = _OPS[symbol]
            operands = stack[-arity:]
            del stack[-arity:]
            if rank == _ATOM:
                stack.append((f"{symbol}({', '.join(text for text, _ in operands)})", _ATOM))
            elif arity == 1:
                text, inner = operands[0]
                stack.append(("~" + (text if inner >= rank else f"({text})"), rank))
            else:
                (left, low), (right, high) = operands
                # Equal ranks group to the left; comparisons do not chain at all.
                left = left if low > rank or (low == rank and rank != _COMPARE) else f"({left})"
                right = right if high > rank else f"({right})"
                stack.append((f"{left} {symbol} {right}", rank))
        return stack[0][0]

    def __repr__(self) -> str:
        return f"Expr({self})"

    def __bool__(self) -> bool:
        raise SpaceError(
            f"'{self}' has no truth value before a subnet is picked; write & | ~ for and, or, not, "
            "and one comparison at a time"
        )

    __hash__ = object.__hash__
    __array_ufunc__ = None  # so that a NumPy number on the left leaves the operator to us

    __add__, __radd__ = _operator("+"), _operator("+", True)
    __sub__, __rsub__ = _operator("-"), _operator("-", True)
    __mul__, __rmul__ = _operator("*"), _operator("*", True)
    __floordiv__, __rfloordiv__ = _operator("//"), _operator("//", True)
    __truediv__, __rtruediv__ = _operator("/"), _operator("/", True)
    __mod__, __rmod__ = _operator("%"), _operator("%", True)
    __and__, __rand__ = _operator("&"), _operator("&", True)
    __or__, __ror__ = _operator("|"), _operator("|", True)
    __eq__ = _operator("==")  # type: ignore[assignment]
    __ne__ = _operator("!=")  # type: ignore[assignment]
    __lt__ = _operator("<")
    __le__ = _operator("<=")
    __gt__ = _operator(">")
    __ge__ = _operator(">=")

    def __neg__(self) -> Expr:
        return _join("-", 0, self)

    def __invert__(self) -> Expr:
        return _join("~", self)


def minimum(first: object, *others: object) -> Expr:
    """The smallest of expressions and constants."""
    return reduce(lambda left, right: _join("minimum", left, right), others, Expr.of(first))


def maximum(first: object, *others: object) -> Expr:
    """The largest of expressions and constants."""
    return reduce(lambda left, right: _join("maximum", left, right), others, Expr.of(first))


def plain(value: object) -> Value:
    """The value as a plain str, bool, int or finite float; NumPy scalars are unwrapped, all else is a SpaceError."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return value
    for kind in (int, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SpaceError(f"{value!r} cannot be a value of a space; values are finite")
        return float(value) + 0.0  # -0.0 becomes 0.0: equal values are written alike
    raise SpaceError(f"{value!r} is a {type(value).__name__}; values are str, bool, int or float")


def _constant(value: Value) -> Token:
    return type(value).__name__, value


def _join(symbol: str, *operands: object) -> Expr:
    return Expr(tuple(token for operand in operands for token in Expr.of(operand).program) + (("op", symbol),))


def _numeric(function: Callable[[Any, Any], Any]) -> Callable[..., Value]:
    def apply(left: Value, right: Value) -> Value:
        if isinstance(left, str) or isinstance(right, str):
            raise TypeError(f"arithmetic is for numbers, not {left!r} and {right!r}")
        return function(left, right)  # type: ignore[no-any-return]

    return apply


_COMPARE, _OR, _AND, _SUM, _PRODUCT, _NOT, _ATOM = range(7)  # how tightly each binds, as in Python
_OPS: dict[str, tuple[int, int, Callable[..., Value]]] = {
    "+": (2, _SUM, _numeric(operator.add)),
    "-": (2, _SUM, _numeric(operator.sub)),
    "*": (2, _PRODUCT, _numeric(operator.mul)),
    "/": (2, _PRODUCT, _numeric(operator.truediv)),
    "//": (2, _PRODUCT, _numeric(operator.floordiv)),
    "%": (2, _PRODUCT, _numeric(operator.mod)),
    "==": (2, _COMPARE, operator.eq),
    "!=": (2, _COMPARE, operator.ne),
    "<": (2, _COMPARE, operator.lt),
    "<=": (2, _COMPARE, operator.le),
    ">": (2, _COMPARE, operator.gt),
    ">=": (2, _COMPARE, operator.ge),
    "&": (2, _AND, lambda left, right: bool(left) and bool(right)),
    "|": (2, _OR, lambda left, right: bool(left) or bool(right)),
    "~": (1, _NOT, lambda operand: not operand),
    "minimum": (2, _ATOM, lambda left, right: min(left, right)),
    "maximum": (2, _ATOM, lambda left, right: max(left, right)),
}
