"""A candidate of several stages, proven, and made better where it is not near enough to what is proven."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from weft.hardware.machine import Machine
from weft.plan.candidate import Candidate, launches_of, priced, send_seconds
from weft.plan.division import Division
from weft.plan.graph import PARAMETER
from weft.plan.line import line
from weft.plan.proof import Proof
from weft.plan.solve import OverLimit, solve
from weft.plan.solve.problem import EXACT
from weft.plan.stretches import Stretches
from weft.plan.tables import Tables, narrowed

_SECONDS = 0.5  # for one stretch
_SOON = 1.0  # seconds in which what is within the gap is proven exactly, or is not
_PASSES = 3  # over all stages, each solved with the others as they are
_WAYS = 64  # the most configurations that one operator is fixed to in turn


class Refinement:
    """A candidate of several stages on its way to a better one of its shape, with a bound on all of that shape."""

    def __init__(self, candidate: Candidate, machine: Machine, limit: float, gap: float) -> None:
        self._best, self._bound, self._gap = candidate, candidate.cost.bound, gap
        whole = _Case(candidate, machine, limit, gap, candidate.tables, Stretches.Kept())
        self._cases = whole.parts(candidate, tied=True) or [whole]
        self._over = False
        """Whether nothing is left to try."""

    @property
    def candidate(self) -> Candidate:
        """The best so far."""
        return replace(self._best, cost=replace(self._best.cost, bound=min(self._bound, self._best.cost.step)))

    def go_on(self, seconds: float, beat: float = math.inf) -> Candidate:
        """Ends when the step is proven best, or after a second when it is within the gap, or when none of the shape
        takes less than ``beat`` by more than the gap, or else after so many seconds."""
        started = time.monotonic()
        while self._cases and not self._over:
            case = min(self._cases, key=lambda each: each.bound)
            self._bound = max(self._bound, min(case.bound, self._best.cost.step))
            step = self._best.cost.step
            enough = seconds if step > self._bound * (1 + self._gap) else min(_SOON, seconds)
            if step <= self._bound * (1 + EXACT) or self._bound * (1 + self._gap) >= beat:
                break
            if time.monotonic() - started > enough:
                break
            if case.settled:
                self._divide(case)
                continue
            for cut in case.weighed():
                if self._best.cost.step > case.bound * (1 + self._gap):
                    self._best = case.better(self._best, cut)
        return self.candidate

    def _divide(self, case: _Case) -> None:
        parts = case.parts(self._best)
        self._over = not parts
        if parts:
            self._cases.remove(case)
            self._cases += parts


class _Case:
    """What is proven of all candidates with these tables, in which some operators may be fixed to one configuration.

    Stages are bounded apart, so that each may wish for another layout of what several of them read. Where that leaves a
    gap, such an operator is held to each kind of its configurations in turn.
    """

    def __init__(
        self, of: Candidate, machine: Machine, limit: float, gap: float, found: Tables, kept: Stretches.Kept
    ) -> None:
        self._given = (machine, limit, gap)
        self._kept = kept
        self.found, self.settled = found, False
        free = solve(found.problem(), gap=gap / 4, seconds=_SECONDS)
        self._free = free.pick
        row = line(of.shape.graph)
        self.stretches = Stretches(of.shape.graph, row, found, limit, gap / 4, _SECONDS, kept)
        self.proof = Proof(
            self.stretches,
            launches_of(of.shape, machine),
            stages=of.shape.stages,
            microbatches=of.shape.training.microbatches,
            send=send_seconds(machine, of.shape),
            total=max(free.bound, of.total),
        )
        self.bound = self.proof.best()
        self._tried: set[tuple[int, ...]] = set()

    def weighed(self) -> list[Division]:
        """The cuts that seemed best, whose stages are now weighed; the case is settled where that told nothing new."""
        cuts = self.proof.cuts
        self.settled = not self.proof.raised()
        if not self.settled:
            self.bound = max(self.bound, self.proof.best())
        return cuts

    def parts(self, of: Candidate, tied: bool = False) -> list[_Case]:
        """A case for each kind of configurations of the operator, or tied parameter, whose readers in other stages have
        most to lose by it."""
        bounds = {end for cut in self.proof.cuts for end in self.proof.places(cut.marks)[1:]}
        operators = of.shape.graph.operators
        ranks = self.stretches.row.ranks
        read: dict[int, list[int]] = {}  # by stages that are not the source's own
        for source, reader in self.found.moves:
            if tied and operators[source].kind != PARAMETER:
                continue
            if any(ranks[source] < end <= ranks[reader] for end in bounds):
                read.setdefault(source, []).append(reader)
        kinds = {source: self._kinds(source, readers) for source, readers in read.items()}
        lost = {source: self._lost(of, source, read[source]) for source in read if 1 < len(kinds[source]) <= _WAYS}
        if not any(max(both) for both in lost.values()):
            return []
        place = max(lost, key=lambda each: lost[each])
        cases = []
        for kind in kinds[place]:
            case = _Case(of, *self._given, narrowed(self.found, place, kind), self._kept)
            case.bound = max(case.bound, self.bound)
            cases.append(case)
        return cases

    def _kinds(self, source: int, readers: Sequence[int]) -> list[list[int]]:
        """The configurations of an operator, together those that are equal to these readers."""
        rows = np.hstack([self.found.moves[source, reader] for reader in readers])
        _, which = np.unique(rows, axis=0, return_inverse=True)
        return [np.flatnonzero(which == kind).tolist() for kind in range(which.max() + 1)]

    def _lost(self, of: Candidate, source: int, readers: Sequence[int]) -> tuple[float, float]:
        """What the candidate pays for it in other stages beyond the least, and what could be paid at most."""
        moves = self.found.moves
        paid = [float(of.tables.moves[source, reader][of.pick[source], of.pick[reader]]) for reader in readers]
        least, most = (sum(float(pick(moves[source, reader])) for reader in readers) for pick in (np.min, np.max))
        return max(sum(paid) - least, 0.0), most - least

    def better(self, best: Candidate, cut: Division) -> Candidate:
        """The candidate, or one whose stages are each solved within the limit where this cut divides, if it is
        faster."""
        if cut.marks in self._tried:
            return best
        self._tried.add(cut.marks)
        machine, limit, _ = self._given
        shape, places = best.shape, self.proof.places(cut.marks)
        pick = list(self._free)
        passes: list[list[int]] = []
        try:
            while pick not in passes and len(passes) < _PASSES:
                passes.append(list(pick))
                for stage, (first, last) in enumerate(pairwise(places)):
                    flights = min(shape.training.microbatches, shape.stages - stage)
                    inside, found = self.stretches.solved(first, last, flights, pick)
                    for place, k in zip(inside, found.pick, strict=True):
                        pick[place] = k
                own = zip(best.tables.splits, self.found.splits, pick, strict=True)
                whole = tuple(every.index(left[k]) for every, left, k in own)
                made = priced(shape, machine, best.tables, whole, limit, best.total)
                if made.cost.step < best.cost.step:
                    best = replace(made, total=best.total, pressed=True)
        except OverLimit:
            pass
        return best
