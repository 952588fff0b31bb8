"""Blocks of a chain: shared layers, choices between candidates, and blocks that a subnet may skip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from weft.errors import SupernetError
from weft.space import Expr, Space, Subnet
from weft.supernet.elastic import Condition
from weft.supernet.layer import Candidate, check_name


class Block(Protocol):
    """One link of the chain; a subnet uses at most one of its layers."""

    name: str
    space: Space | None
    consistency: str | None
    side: tuple[str, ...]
    shared: bool
    elastic: bool

    def candidates(self) -> Mapping[str, Candidate]:
        """The layers by their global names, in order."""

    def pick(self, subnet: Subnet) -> str | None:
        """The name of the layer that the subnet uses, or None where it skips the block."""


class _Base:
    shared = False
    elastic = False
    space: Space | None

    def __init__(self, name: str, space: Space | None, side: Sequence[str], consistency: object) -> None:
        self.name = check_name(name, "block")
        self.space = space
        self.side = tuple(side)
        self.consistency = None if consistency is None else str(consistency)


class Shared(_Base):
    """A layer that every subnet uses: a stem, an embedding, a head.

    The layer is a module, or a function that makes one (then its weights depend on the run's seed and its name alone).
    """

    shared = True

    def __init__(self, layer: Candidate, name: str, *, side: Sequence[str] = (), consistency: object = None) -> None:
        super().__init__(name, None, side, consistency)
        self._layer = layer

    def candidates(self) -> Mapping[str, Candidate]:
        return {self.name: self._layer}

    def pick(self, subnet: Subnet) -> str | None:
        return self.name


class Choice(_Base):
    """A block of which every subnet uses one candidate; declares the choice ``name`` in the space."""

    def __init__(
        self,
        space: Space,
        name: str,
        candidates: Mapping[str, Candidate],
        *,
        when: Expr | None = None,
        side: Sequence[str] = (),
        consistency: object = None,
    ) -> None:
        super().__init__(name, space, side, consistency)
        if not candidates:
            raise SupernetError(f"choice '{name}' has no candidates: give at least one")
        self._names = {check_name(label, f"candidate of '{name}'"): f"{name}.{label}" for label in candidates}
        self._candidates = {self._names[label]: candidate for label, candidate in candidates.items()}
        space.categorical(name, list(candidates), when=when)

    def candidates(self) -> Mapping[str, Candidate]:
        return self._candidates

    def pick(self, subnet: Subnet) -> str | None:
        # Without a value the choice is switched off by its condition (depth): the block is skipped.
        return self._names[str(subnet[self.name])] if self.name in subnet.values else None


class Optional(_Base):
    """A block that a subnet may skip: by a condition on other choices (depth), or by a choice ``name`` of its own."""

    def __init__(
        self,
        space: Space,
        name: str,
        layer: Candidate,
        *,
        when: Expr | None = None,
        side: Sequence[str] = (),
        consistency: object = None,
    ) -> None:
        super().__init__(name, space, side, consistency)
        self._layer = layer
        # A choice with the single option True carries the condition, so that the subnet itself says what is switched
        # on.
        space.categorical(name, [False, True] if when is None else [True], when=when)

    def candidates(self) -> Mapping[str, Candidate]:
        return {self.name: self._layer}

    def pick(self, subnet: Subnet) -> str | None:
        return self.name if subnet.values.get(self.name) is True else None


class Elastic(_Base):
    """A block whose layer takes the subnet as the keyword ``pick`` and uses the part of its weights that it asks for.

    The layer is an ``elastic.Module``, or a function that makes one. With ``when``, subnets for which the condition
    does not hold skip the block: that is how depth varies.
    """

    elastic = True

    def __init__(
        self,
        space: Space,
        name: str,
        layer: Candidate,
        *,
        when: Expr | None = None,
        side: Sequence[str] = (),
        consistency: object = None,
    ) -> None:
        super().__init__(name, space, side, consistency)
        self._layer = layer
        self.condition = None if when is None else Condition(space, when)
        self.shared = when is None

    def candidates(self) -> Mapping[str, Candidate]:
        return {self.name: self._layer}

    def pick(self, subnet: Subnet) -> str | None:
        return self.name if self.condition is None or self.condition.holds(subnet) else None
