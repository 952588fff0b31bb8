"""Regularized evolution: the best of a random few has a mutated child, and the oldest of the population leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from weft import keys
from weft.errors import SearchError
from weft.search.method import Draw, shuffled
from weft.search.objective import Constraint, Objective, losses, violations
from weft.search.pareto import ranks
from weft.search.scored import Scored
from weft.space import Space, Subnet


class Evolution:
    """Aging evolution (Real et al., 2019) with a tournament of `sample` out of `population`.

    With one objective the best of the tournament is the parent. With several, one of its members of non-domination
    rank 0 is, drawn at random: the front then spreads by chance alone, so prefer NSGA-II for fronts. Constraints count
    as in NSGA-II (feasible first, then least violation). Once the population is full, an infeasible child joins it
    only while no member is feasible: the search walks to the constraint and then stays within it.
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
        self._rng = keys.generator(seed, "search", "evolution")
        self._draw = Draw(space, self._rng)
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
