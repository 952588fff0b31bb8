"""Candidates of several stages that may all become the fastest: each is made better, and most are proven slower."""

from __future__ import annotations

import math
import time

from weft.plan.candidate import Candidate
from weft.plan.refine import Refinement
from weft.plan.request import Request

_REFINING = 2.0  # seconds that the plan of several stages is proven in, at least


def decided(best: Candidate, rivals: list[Candidate], request: Request, deadline: float) -> tuple[Candidate, int]:
    """The fastest when all that may be were made better, and how many might still be when the time was up.

    First the fastest so far, then a look at each of the others, which most of them are proven slower by, then those
    that are left, the most promising first.
    """
    race = _Race(best, rivals, request)

    def rest() -> float:
        return deadline - time.monotonic()

    race.prove(max(rest() / 3, _REFINING))
    for place in race.order():
        if race.may_win(place) and rest() > 0:
            race.go_on(place, 0.0)
    race.prove(2 / 3 * rest())
    for place in race.order():
        if race.may_win(place) and rest() > 0:
            race.go_on(place, rest())
    race.prove(rest())
    return race.best, sum(map(race.may_win, race.order()))


class _Race:
    """``best`` is the fastest so far, which need not be one of several stages."""

    def __init__(self, best: Candidate, rivals: list[Candidate], request: Request) -> None:
        self.best, self._rivals, self._request = best, list(rivals), request
        self._under_way: dict[int, Refinement] = {}

    def order(self) -> list[int]:
        """The most promising first."""
        return sorted(range(len(self._rivals)), key=lambda place: self._rivals[place].cost.bound)

    def may_win(self, place: int) -> bool:
        """Whether one that is not the fastest may become so, by more than the gap."""
        return self._rivals[place] is not self.best and self._open(place)

    def prove(self, seconds: float) -> None:
        """Goes on with the fastest, at first in any case, then where it is not within the gap."""
        for place, rival in enumerate(self._rivals):
            if rival is self.best and (place not in self._under_way or self._open(place)):
                self.go_on(place, seconds)
                return

    def go_on(self, place: int, seconds: float) -> None:
        leads = self._rivals[place] is self.best
        if place not in self._under_way:
            asked = self._request
            self._under_way[place] = Refinement(self._rivals[place], asked.machine, asked.limit, asked.gap)
        found = self._under_way[place].go_on(seconds, math.inf if leads else self.best.cost.step)
        self._rivals[place] = found
        if leads or found.cost.step < self.best.cost.step:
            self.best = found

    def _open(self, place: int) -> bool:
        return self._rivals[place].cost.bound * (1 + self._request.gap) < self.best.cost.step
