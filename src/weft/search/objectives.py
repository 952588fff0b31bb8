"""Objectives and constraints: values over the scores of a subnet."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.errors import SearchError, nearest

Scores = Mapping[str, float]
Array = npt.NDArray[np.float64]

_RULE = re.compile(r"\s*([^\W\d][\w.@/-]*)\s*(<=|>=|<|>)\s*(\S+)\s*")
_OPS = ("<=", ">=", "<", ">")


@dataclass(frozen=True, slots=True)
class Objective:
    """A metric to make as large (`maximize`) or as small as possible."""

    name: str
    maximize: bool

    def loss(self, scores: Scores) -> float:
        """The metric with its sign turned so that lower is better; NaN where it is absent or not a number."""
        value = float(scores.get(self.name, math.nan))
        return -value if self.maximize else value


@dataclass(frozen=True, slots=True)
class Constraint:
    """A bound on a metric that a subnet must meet to be on the front."""

    name: str
    op: str
    bound: float

    def __post_init__(self) -> None:
        if self.op not in _OPS:
            raise SearchError(
                f"constraint on '{self.name}': unknown comparison '{self.op}'; use one of {', '.join(_OPS)}"
            )
        if not math.isfinite(self.bound):
            raise SearchError(f"constraint on '{self.name}': the bound must be a finite number, not {self.bound}")

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Reads `flops<=5e7`.

        >>> Constraint.parse("flops <= 5e7")
        Constraint(name='flops', op='<=', bound=50000000.0)
        """
        match = _RULE.fullmatch(text)
        try:
            if match:
                return cls(match[1], match[2], float(match[3]))
        except ValueError:
            pass
        raise SearchError(
            f"cannot read constraint '{text}'; write a metric, one of {' '.join(_OPS)}, and a number: flops<=5e7"
        )

    def __str__(self) -> str:
        return f"{self.name}{self.op}{self.bound!r}"

    @property
    def upper(self) -> bool:
        """Whether the bound is from above."""
        return self.op[0] == "<"

    def violation(self, scores: Scores) -> float:
        """How far the metric is beyond the bound, in units of the bound: 0.0 exactly where met, inf where NaN.

        A metric that is absent counts as met, since a subnet refused for a cheap metric is never given the others.
        """
        if self.name not in scores:
            return 0.0
        value = float(scores[self.name])
        if math.isnan(value):
            return math.inf
        excess = value - self.bound if self.upper else self.bound - value
        if excess < 0 or (excess == 0 and "=" in self.op):
            return 0.0
        # A strict bound that is hit exactly is violated, by the least number above 0.
        return max(excess / (abs(self.bound) or 1.0), math.ulp(0.0))


def names(value: str | Iterable[str]) -> tuple[str, ...]:
    """One name or several, always as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def parse_objectives(maximize: str | Iterable[str] = (), minimize: str | Iterable[str] = ()) -> tuple[Objective, ...]:
    """Those to maximize, then those to minimize; the first of all is the one that `Front.best` follows.

    >>> parse_objectives("accuracy", ["flops"])
    (Objective(name='accuracy', maximize=True), Objective(name='flops', maximize=False))
    """
    found = tuple([Objective(n, True) for n in names(maximize)] + [Objective(n, False) for n in names(minimize)])
    if not found:
        raise SearchError("a search needs an objective: name a metric to maximize or to minimize")
    counts = Counter(objective.name for objective in found)
    for name, count in counts.items():
        if not name or count > 1:
            raise SearchError(f"objective '{name}' is named {count} times; name each metric once, and none empty")
    return found


def parse_constraints(constraints: str | Constraint | Iterable[str | Constraint]) -> tuple[Constraint, ...]:
    """One constraint or several, as text or as values."""
    several = (constraints,) if isinstance(constraints, (str, Constraint)) else constraints
    return tuple(Constraint.parse(one) if isinstance(one, str) else one for one in several)


def dominates(a: Scores, b: Scores, objectives: Sequence[Objective]) -> bool:
    """Whether a is nowhere worse than b and somewhere better. With a NaN on either side the answer is no."""
    pairs = [(objective.loss(a), objective.loss(b)) for objective in objectives]
    return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)


def losses(scores: Sequence[Scores], objectives: Sequence[Objective]) -> Array:
    """One row a subnet, one column an objective, lower is better."""
    rows = [[objective.loss(one) for objective in objectives] for one in scores]
    return np.array(rows, dtype=np.float64).reshape(len(scores), len(objectives))


def violations(scores: Sequence[Scores], objectives: Sequence[Objective], constraints: Sequence[Constraint]) -> Array:
    """One number a subnet: the sum over the constraints, 0 where feasible; inf if only an objective is NaN."""
    total = np.array([sum(rule.violation(one) for rule in constraints) for one in scores], dtype=np.float64)
    broken = np.isnan(losses(scores, objectives)).any(axis=1)
    return np.where((total == 0) & broken, np.inf, total)


def metrics(objectives: Iterable[Objective], constraints: Iterable[Constraint]) -> tuple[str, ...]:
    """Every metric that they read."""
    return tuple([one.name for one in objectives] + [one.name for one in constraints])


def require(scores: Scores, wanted: Iterable[str]) -> None:
    """Raises SearchError for the first wanted metric that the scores do not have."""
    for name in wanted:
        if name not in scores:
            raise SearchError(f"no metric '{name}' among the scores{nearest(name, scores)}")
