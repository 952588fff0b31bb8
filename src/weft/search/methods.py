"""A search method in ask-and-tell form, and the methods by name."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from weft.errors import SearchError, SpaceError, nearest
from weft.search.front import Scored
from weft.search.objectives import Constraint, Objective, losses, violations
from weft.space import Space, Subnet
from weft.utils import rng
from weft.utils.pareto import crowding, ranks

TRIES = 100
ENUMERABLE = 1 << 16


@runtime_checkable
class Method(Protocol):
    """Proposes subnets and learns from their scores; its seed and the scores that it got decide all that it asks.

    It may get fewer scores than it asked for (the budget ended), and subnets without objectives, which broke a
    constraint on a cheap metric and were not scored further.
    """

    def ask(self) -> list[Subnet]:
        """The next batch; empty when there is nothing new to ask."""
        ...

    def tell(self, scored: Sequence[Scored]) -> None:
        """What came of the last batch, in its order."""
        ...


class UniqueSampler:
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

    if name == "random":
        return Random(space, seed)
    if name == "evolution":
        return Evolution(space, objectives, constraints, seed)
    if name == "nsga2":
        return NSGA2(space, objectives, constraints, seed)
    raise SearchError(f"unknown search method '{name}'{nearest(name, METHODS)}")


# NSGA-II: a population that is kept near the front and evenly spread over it.


class NSGA2:
    """Deb et al. (2002) over a space's own crossover and mutation, with constrained domination.

    Parents win binary tournaments by rank, then by crowding; parents and children together are cut back to
    `population` the same way. Feasible subnets come first, then those of least violation. `crossover` and `mutation`
    are the chances that a child goes through them. Optuna's sampler is not used: it has neither conditional choices
    nor constraints as part of the space, so that its children fall outside, and the core must run without Optuna.
    """

    def __init__(
        self,
        space: Space,
        objectives: Sequence[Objective],
        constraints: Sequence[Constraint] = (),
        seed: int = 0,
        population: int = 32,
        crossover: float = 0.9,
        mutation: float = 0.5,
    ) -> None:
        if population < 2 or not 0 <= crossover <= 1 or not 0 <= mutation <= 1:
            raise SearchError(
                f"NSGA-II needs population >= 2 and chances from 0 to 1, not {population}, {crossover} and {mutation}"
            )
        self.space, self.objectives, self.constraints = space, tuple(objectives), tuple(constraints)
        self.population, self.crossover, self.mutation = population, crossover, mutation
        self._rng = rng.generator(seed, "search", "nsga2")
        self._draw = UniqueSampler(space, self._rng)
        self._alive: list[Scored] = []
        self._rank = np.zeros(0, dtype=np.int64)
        self._crowding = np.zeros(0)

    def ask(self) -> list[Subnet]:
        """The next generation: random at first, children afterwards; distinct from every subnet asked before."""
        return self._draw.batch(self.population, self._child if self._alive else None)

    def tell(self, scored: Sequence[Scored]) -> None:
        pool = list({one.subnet: one for one in [*self._alive, *scored]}.values())
        scores = [one.scores for one in pool]
        points = losses(scores, self.objectives)
        rank = ranks(points, violations(scores, self.objectives, self.constraints))
        distances = crowding(np.nan_to_num(points, nan=np.inf), rank)
        kept = np.lexsort((-distances, rank))[: self.population]  # stable: the older one stays on a tie
        self._alive = [pool[i] for i in kept]
        self._rank, self._crowding = rank[kept], distances[kept]

    def _child(self) -> Subnet:
        child = self._parent()
        if self._rng.random() < self.crossover:
            child = self.space.crossover(child, self._parent(), self._rng)
        return self.space.mutate(child, self._rng) if self._rng.random() < self.mutation else child

    def _parent(self) -> Subnet:
        a, b = (int(share * len(self._alive)) for share in self._rng.random(2))
        if (self._rank[b], -self._crowding[b]) < (self._rank[a], -self._crowding[a]):
            a = b
        return self._alive[a].subnet


# Regularized evolution: the best of a random few has a mutated child, and the oldest of the population leaves.


class Evolution:
    """Aging evolution (Real et al., 2019) with a tournament of `sample` out of `population`.

    With one objective the best of the tournament is the parent. With several, one of its members of non-domination
    rank 0 is, drawn at random: the front then spreads by chance alone, so prefer NSGA-II for fronts. Constraints count
    as in NSGA-II (feasible first, then least violation). Once the population is full, an infeasible child joins it
    only while no member is feasible: the search first gets nearer to the constraint and then stays within it.
    """

    def __init__(
        self,
        space: Space,
        objectives: Sequence[Objective],
        constraints: Sequence[Constraint] = (),
        seed: int = 0,
        population: int = 32,
        sample: int = 8,
    ) -> None:
        if not 1 <= sample <= population:
            raise SearchError(f"a tournament needs 1 <= sample <= population, not {sample} of {population}")
        self.space, self.objectives, self.constraints = space, tuple(objectives), tuple(constraints)
        self.population, self.sample = population, sample
        self._rng = rng.generator(seed, "search", "evolution")
        self._draw = UniqueSampler(space, self._rng)
        self._alive: deque[tuple[Scored, float]] = deque()  # oldest first, with the violation

    def ask(self) -> list[Subnet]:
        """The rest of the first population at random, then one child at a time, with one choice changed."""
        missing = self.population - len(self._alive)
        if missing > 0:
            return self._draw.batch(missing)
        return self._draw.batch(1, lambda: self.space.mutate(self._parent(), self._rng, 0.0))

    def tell(self, scored: Sequence[Scored]) -> None:
        found = violations([one.scores for one in scored], self.objectives, self.constraints)
        for one, violation in zip(scored, found, strict=True):
            full = len(self._alive) >= self.population
            if full and violation > 0 and any(other == 0 for _, other in self._alive):
                continue
            if full:
                self._alive.popleft()
            self._alive.append((one, float(violation)))

    def _parent(self) -> Subnet:
        few = [self._alive[place] for place in shuffled(self._rng, len(self._alive))[: self.sample]]
        points = losses([one.scores for one, _ in few], self.objectives)
        rank = ranks(points, np.array([violation for _, violation in few]))
        return few[int(np.argmin(rank))][0].subnet  # the first of the best, in an order drawn at random


# Random search: distinct subnets as the space samples them, whatever their scores.


class Random:
    """Samples without replacement; a space of up to 65,536 subnets is drawn to its last one."""

    def __init__(self, space: Space, seed: int = 0, batch: int = 32) -> None:
        self.batch = batch
        self._draw = UniqueSampler(space, rng.generator(seed, "search", "random"))

    def ask(self) -> list[Subnet]:
        return self._draw.batch(self.batch)

    def tell(self, scored: Sequence[Scored]) -> None:
        pass
