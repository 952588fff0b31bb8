"""A search method in ask-and-tell form, and the methods by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from weft.errors import SearchError, SpaceError, nearest
from weft.search.objective import Constraint, Objective
from weft.search.scored import Scored
from weft.space import Space, Subnet

TRIES = 100
ENUMERABLE = 1 << 16


@runtime_checkable
class Method(Protocol):
    """Proposes subnets and learns from their scores; its seed and what it was told decide all that it asks.

    It may be told less than it asked for (the budget ended), and subnets without their objectives, which missed a
    constraint on a cheap metric and were not scored further.
    """

    def ask(self) -> list[Subnet]:
        """The next batch; empty when it knows nothing new to ask."""
        ...

    def tell(self, scored: Sequence[Scored]) -> None:
        """What came of the last batch, in its order."""
        ...


class Draw:
    """Subnets that were not drawn before, so that a budget is not spent on repetitions."""

    def __init__(self, space: Space, rng: np.random.Generator) -> None:
        self.space, self.rng = space, rng
        self._seen: set[Subnet] = set()
        self._size = count(space)
        self._rest: list[Subnet] | None = None

    def new(self, make: Callable[[], Subnet] | None = None) -> Subnet | None:
        """An unseen subnet from `make`; when it yields none in TRIES tries, a random one; None when all were seen.

        In a space of more than ENUMERABLE subnets, "all were seen" means that TRIES samples in a row were.
        """
        if len(self._seen) >= self._size:
            return None
        for source in [make, None] if make else [None]:
            for _ in range(TRIES):
                subnet = source() if source else self.space.sample(self.rng)
                if subnet not in self._seen:
                    self._seen.add(subnet)
                    return subnet
        return self._left_over()

    def batch(self, size: int, make: Callable[[], Subnet] | None = None) -> list[Subnet]:
        """Up to `size` unseen subnets."""
        drawn = (self.new(make) for _ in range(size))
        return [subnet for subnet in drawn if subnet is not None]

    def _left_over(self) -> Subnet | None:
        if self._size > ENUMERABLE:
            return None
        if self._rest is None:
            unseen = [subnet for subnet in self.space.enumerate() if subnet not in self._seen]
            self._rest = [unseen[i] for i in shuffled(self.rng, len(unseen))]
        while self._rest:
            subnet = self._rest.pop()
            if subnet not in self._seen:
                self._seen.add(subnet)
                return subnet
        return None


def count(space: Space) -> float:
    """How many subnets the space has; inf for those with real choices or too entangled to count."""
    try:
        return space.size()
    except SpaceError:
        return math.inf


def shuffled(rng: np.random.Generator, size: int) -> list[int]:
    """The numbers below `size` in random order, from plain draws alone: NumPy may change its own shuffles."""
    return [int(i) for i in np.argsort(rng.random(size), kind="stable")]


METHODS = ("random", "evolution", "nsga2")


def make_method(
    name: str, space: Space, objectives: Sequence[Objective], constraints: Sequence[Constraint] = (), seed: int = 0
) -> Method:
    """The method of this name with its default settings; construct it yourself for others."""
    from weft.search.evolution import Evolution
    from weft.search.nsga2 import NSGA2
    from weft.search.random import Random

    if name == "random":
        return Random(space, seed)
    if name == "evolution":
        return Evolution(space, objectives, constraints, seed)
    if name == "nsga2":
        return NSGA2(space, objectives, constraints, seed)
    raise SearchError(f"unknown search method '{name}'{nearest(name, METHODS)}")
