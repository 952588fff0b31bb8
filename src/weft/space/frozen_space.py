"""The rules of a space: which choices are active, and which picks are valid; a frozen form for all who pick."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.errors import SpaceError
from weft.space.choice import Choice
from weft.space.expression import Expr, Value
from weft.space.subnet import Subnet, SubnetSchema


@dataclass(frozen=True, slots=True, eq=False)
class Requirement:
    """Something that holds in every subnet where all that it reads is active."""

    expr: Expr  # as written
    meaning: Expr  # in choices alone
    message: str = ""

    def __str__(self) -> str:
        return f"'{self.expr}'" + (f" ({self.message})" if self.message else "")


@dataclass(frozen=True, slots=True, eq=False)
class FrozenSpace:
    """Choices in order, their conditions and the constraints, all written in choices alone."""

    choices: Mapping[str, Choice]
    conditions: Mapping[str, Expr]
    constraints: tuple[Requirement, ...]
    layout: SubnetSchema
    memo: dict[str, Any] = field(default_factory=dict, repr=False)  # what others have worked out about these rules

    def is_active(self, name: str, values: Mapping[str, Value]) -> bool:
        """Whether the choice exists, given the active choices before it; a condition on an inactive choice is false."""
        condition = self.conditions.get(name)
        return condition is None or (condition.names <= values.keys() and bool(condition.value(values)))

    def broken(self, values: Mapping[str, Value]) -> Requirement | None:
        """The first constraint that does not hold; one that reads an inactive choice holds."""
        for constraint in self.constraints:
            meaning = constraint.meaning
            if meaning.names <= values.keys() and not meaning.value(values):
                return constraint
        return None

    def settle(self, pick: Callable[[str, Choice], Value]) -> dict[str, Value]:
        """Values of every choice that turns out active, each asked of `pick` in order; constraints are not checked."""
        values: dict[str, Value] = {}
        for name, choice in self.choices.items():
            if name not in self.conditions or self.is_active(name, values):
                values[name] = pick(name, choice)
        return values

    def subnet(self, values: dict[str, Value]) -> Subnet:
        """A subnet of values that are known to be valid."""
        return Subnet(self.layout, values)

    def empty(self) -> SpaceError:
        """The error that says why there is nothing to pick."""
        if not self.choices:
            return SpaceError(
                "the space is empty: it has no choices; add one, or take its only subnet by space.subnet()"
            )
        shown = "; ".join(str(constraint) for constraint in self.constraints[:4])
        more = f" and {len(self.constraints) - 4} more" if len(self.constraints) > 4 else ""
        return SpaceError(f"the space is empty: no subnet satisfies {shown}{more}; relax a constraint")
