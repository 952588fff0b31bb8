"""A subnet: one immutable pick from a space."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn

from weft.errors import SpaceError, nearest
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
