"""A subnet: one immutable pick from a space; and the rules that decide which picks are valid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from weft.errors import SpaceError, nearest
from weft.space.choice import Choice
from weft.space.expression import Expr, Value


@dataclass(frozen=True, slots=True, eq=False)
class SubnetSchema:
    """What every subnet of a space shares: the space's id, its names, and what the derived ones stand for."""

    space_id: str
    names: tuple[str, ...]
    derived: Mapping[str, Expr]  # written in choices alone


class Subnet:
    """Made by a space, which checks it; equal to another of the same space with the same values.

    `subnet[name]` reads active choices and derived dimensions; a derived one that reads an inactive choice is inactive.
    """

    __slots__ = ("_hash", "_id", "_layout", "_values")
    _hash: int
    _id: str
    _layout: SubnetSchema
    _values: dict[str, Value]

    def __init__(self, layout: SubnetSchema, values: dict[str, Value]) -> None:
        object.__setattr__(self, "_layout", layout)
        object.__setattr__(self, "_values", values)

    @property
    def values(self) -> Mapping[str, Value]:
        """The active choices, in the order of the space."""
        return MappingProxyType(self._values)

    @property
    def space_id(self) -> str:
        return self._layout.space_id

    @property
    def id(self) -> str:
        """16 hex digits that depend on the space and the values alone, on every machine."""
        if not hasattr(self, "_id"):
            object.__setattr__(self, "_id", digest(self.to_json()))
        return self._id

    def get(self, name: str, default: Value | None = None) -> Value | None:
        return self.__getitem__(name) if name in self else default

    def to_json(self) -> dict[str, object]:
        return {"space": self.space_id, "values": dict(self._values)}

    def __getitem__(self, name: str) -> Value:
        if name in self._values:
            return self._values[name]
        if name in self:
            return self._layout.derived[name].value(self._values)
        if name in self._layout.names or name in self._layout.derived:
            raise SpaceError(f"'{name}' is inactive in the subnet '{self}'; ask with get() or 'in'")
        raise SpaceError(f"unknown name '{name}'{nearest(str(name), (*self._layout.names, *self._layout.derived))}")

    def __contains__(self, name: object) -> bool:
        meaning = self._layout.derived.get(str(name))
        return name in self._values or (meaning is not None and meaning.names <= self._values.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Subnet):
            return NotImplemented
        return self is other or (self.space_id == other.space_id and self._values == other._values)

    def __hash__(self) -> int:
        if not hasattr(self, "_hash"):
            object.__setattr__(self, "_hash", hash((self.space_id, *self._values.items())))
        return self._hash

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._values.items())

    def __repr__(self) -> str:
        return f"Subnet({self})"

    def __reduce__(self) -> tuple[type[Subnet], tuple[SubnetSchema, dict[str, Value]]]:
        return Subnet, (self._layout, self._values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a subnet is immutable: '{name}' cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a subnet is immutable: '{name}' cannot be deleted")


def digest(data: object) -> str:
    """The first 16 hex digits of the SHA-256 of canonical JSON (sorted keys, no spaces, floats by repr)."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
