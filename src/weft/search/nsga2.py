"""NSGA-II: a population that is kept at the front and spread along it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft import keys
from weft.errors import SearchError
from weft.search.method import Draw
from weft.search.objective import Constraint, Objective, losses, violations
from weft.search.pareto import crowding, ranks
from weft.search.scored import Scored
from weft.space import Space, Subnet


class NSGA2:
    """Deb et al. (2002) over a space's own crossover and mutation, with constrained domination.

    Parents win binary tournaments by rank, then by crowding; parents and children together are cut back to
    `population` the same way. Feasible subnets come first, then those of least violation. `crossover` and `mutation`
    are the chances that a child goes through them. Optuna's sampler is not used: it knows neither conditional choices
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
        self._rng = keys.generator(seed, "search", "nsga2")
        self._draw = Draw(space, self._rng)
        self._alive: list[Scored] = []
        self._rank = np.zeros(0, dtype=np.int64)
        self._room = np.zeros(0)

    def ask(self) -> list[Subnet]:
        """The next generation: random at first, children afterwards; distinct from every subnet asked before."""
        return self._draw.batch(self.population, self._child if self._alive else None)

    def tell(self, scored: Sequence[Scored]) -> None:
        pool = list({one.subnet: one for one in [*self._alive, *scored]}.values())
        scores = [one.scores for one in pool]
        points = losses(scores, self.objectives)
        rank = ranks(points, violations(scores, self.objectives, self.constraints))
        room = crowding(np.nan_to_num(points, nan=np.inf), rank)
        kept = np.lexsort((-room, rank))[: self.population]  # stable: the older one stays on a tie
        self._alive = [pool[i] for i in kept]
        self._rank, self._room = rank[kept], room[kept]

    def _child(self) -> Subnet:
        child = self._parent()
        if self._rng.random() < self.crossover:
            child = self.space.crossover(child, self._parent(), self._rng)
        return self.space.mutate(child, self._rng) if self._rng.random() < self.mutation else child

    def _parent(self) -> Subnet:
        a, b = (int(share * len(self._alive)) for share in self._rng.random(2))
        if (self._rank[b], -self._room[b]) < (self._rank[a], -self._room[a]):
            a = b
        return self._alive[a].subnet
