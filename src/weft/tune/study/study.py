"""A study: which trial is next, which ends early, and their results, in a database. It runs nothing itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from weft.errors import TuneError
from weft.space import Space, Value
from weft.tune.study.definition import Definition, prepare
from weft.tune.study.optuna import complete_params, in_memory_study, optuna_module, silence_optuna
from weft.tune.study.pruner import TrialPruner
from weft.tune.study.sampler import propose, proposed_trial, remaining_grid_points
from weft.tune.study.storage import (
    REPORT,
    RUNGS,
    Direction,
    Storage,
    TrialRecord,
    incomplete,
    must_have_ended,
    new_row,
    record_of,
    restored_from,
)
from weft.utils import rng as keys
from weft.utils.files import to_json
from weft.utils.pareto import non_dominated

_log = logging.getLogger("weft")


class Study:
    """Trial i is proposed, and pruned, from the results of trial i - max_concurrent and those before it alone.

    So proposals and prunings are the same with one worker or with many, whatever the order in which trials end, and
    after the process was killed and the study opened again. One process writes a study at a time; use it in a ``with``
    block, or close it.
    """

    def __init__(self, name: str, definition: Definition, trials: int, storage: Storage) -> None:
        """Use :meth:`open`."""
        self.name, self.definition, self.goal = name, definition, trials
        self._storage = storage
        objectives = len(definition.directions)
        self._records = [record_of(definition.space, row, objectives) for row in storage.trials()]
        self._has_pruner = definition.pruner.name != "none"
        self._pruners: dict[int, TrialPruner] = {}
        self._left: tuple[int, int] | None = None  # points of a grid that are left after so many trials

    @classmethod
    def open(
        cls,
        name: str,
        definition: Definition,
        *,
        trials: int,
        storage: str,
        objectives: Sequence[str] = (),
        resume: bool = False,
    ) -> Study:
        """A new study, or with ``resume`` that of this name, whose definition must be equal (``trials`` may differ).

        ``objectives`` are the names that Optuna's dashboard shows. TuneError if the storage cannot be reached, or the
        study exists and is not to be resumed.
        """
        rows = Storage(storage, name)
        try:
            prepare(rows, name, definition, objectives, resume)
            return cls(name, definition, trials, rows)
        except BaseException:
            rows.close()
            raise

    # -- what is next

    def askable(self) -> int | None:
        """The number of the next trial; None while others must end first, or when all are proposed."""
        number = self._proposed()
        if number >= self._last():
            return None
        return number if all(record.ended for record in self._must_have_ended(number)) else None

    def ask(self) -> TrialRecord:
        """The next trial, which is running from now on; first those enqueued by hand, in order."""
        number = self.askable()
        if number is None:
            raise TuneError(
                f"the study '{self.name}' has no trial to propose now: {self._proposed()} of {self._last()} are, "
                f"and only {self.definition.max_concurrent} may be open at once"
            )
        if number < len(self._records):
            self._storage.start(number)
            self._records[number] = replace(self._records[number], state="running")
        else:
            record = self._propose(number)
            self._storage.add(number, new_row(self.definition.space, record))
            self._records.append(record)
        return self._records[number]

    def enqueue(self, params: Mapping[str, Value]) -> int:
        """Try these parameters next, after those enqueued before; returns the number of their trial.

        Missing ones are drawn from the study's seed. It is tried even if it goes beyond ``trials``.
        """
        number = len(self._records)
        rng = keys.generator(self.definition.seed, "enqueue", number)
        record = TrialRecord(number, complete_params(self.definition.space, params, rng), "waiting")
        self._storage.add(number, new_row(self.definition.space, record))
        self._records.append(record)
        return number

    def open_trials(self) -> list[TrialRecord]:
        """Proposed but not ended; after a crash these are to be run again."""
        return [record for record in self._records if record.state == "running"]

    def finished(self) -> bool:
        """Whether every trial has been proposed and has ended."""
        return self._proposed() >= self._last() and all(record.ended for record in self._records)

    # -- results

    def report(self, number: int, step: int, values: float | Sequence[float]) -> bool:
        """Keep a running trial's values after so many steps, one per objective; True if it is to be pruned.

        A step that was reported before keeps its values and its answer, so that a trial may repeat itself after a
        crash. A value may be NaN, which is worse than any other.
        """
        record = self._running(number)
        numbers = _numbers(values)
        if step not in record.reports:
            if len(numbers) > 1:
                written = [repr(value) for value in numbers]  # since JSON has neither NaN nor infinity
                self._storage.set_attrs(number, {f"{REPORT}{step}": written})
            self._storage.report(number, step, numbers[0])
            if number in self._pruners and step < self._pruners[number].last:
                del self._pruners[number]  # it came out of order: replay all from the start
            elif number in self._pruners:
                self._pruners[number].report(step, numbers)
            self._records[number] = replace(record, reports=dict(sorted({**record.reports, step: numbers}.items())))
        return self._has_pruner and self._pruner(number).decisions[step]

    def set_info(self, number: int, info: Mapping[str, Any]) -> None:
        """Keep something worth knowing of a running trial, such as how it fits."""
        record, plain = self._running(number), to_json(dict(info))
        self._storage.set_info(number, plain)
        self._records[number] = replace(record, info={**record.info, **plain})

    def tell(
        self,
        number: int,
        state: Literal["complete", "pruned", "failed"],
        values: float | Sequence[float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """A running trial's end; one that is complete has a finite number per objective."""
        record = self._running(number)
        final: tuple[float, ...] | None = None
        if state == "complete" and values is not None:
            final = _numbers(values)
        elif state == "pruned" and record.reports:
            last = record.reports[max(record.reports)]
            final = last if not any(map(math.isnan, last)) else None
        if info:
            self.set_info(number, info)
        kept = self._pruner(number).state if record.reports and self._has_pruner else ()
        if any(kept):
            self._storage.set_attrs(number, {RUNGS: list(kept)})
        self._storage.finish(number, state, final)
        self._records[number] = replace(self._records[number], state=state, values=final, pruner_state=kept)
        self._pruners.pop(number, None)

    def trials(self) -> list[TrialRecord]:
        """All of them, in order of number, with those that wait."""
        return list(self._records)

    def best(self) -> list[TrialRecord]:
        """The best complete trial, of equals the earliest; with several objectives those that no other beats in all."""
        complete = [(record, record.values) for record in self._records if record.state == "complete" and record.values]
        if not complete:
            return []
        signs = [1.0 if direction == "minimize" else -1.0 for direction in self.definition.directions]
        points = np.array([values for _, values in complete], dtype=np.float64) * np.array(signs)
        if len(signs) == 1:
            return [complete[int(np.argmin(points[:, 0]))][0]]
        return [complete[at][0] for at in np.flatnonzero(non_dominated(points))]

    def importances(self, objective: int = 0) -> dict[str, float]:
        """The share of each choice in what makes a trial good at an objective, largest first."""
        return importances(self.definition.space, self._records, self.definition.directions, objective)

    def discard(self) -> None:
        """Remove the study from its storage, if that can be reached; it can only be closed then."""
        self._storage.discard()

    def close(self) -> None:
        """Close the connections to the storage."""
        self._storage.close()

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _must_have_ended(self, number: int) -> list[TrialRecord]:
        return self._records[: must_have_ended(number, self.definition.max_concurrent)]

    def _proposed(self) -> int:
        waiting = sum(record.state == "waiting" for record in self._records)  # always the last ones
        return len(self._records) - waiting

    def _last(self) -> int:
        """The number of trials that there will be."""
        known = len(self._records)
        if self.definition.sampler.name == "grid" and known < self.goal:
            if self._left is None or self._left[0] != known:
                self._left = known, remaining_grid_points(self.definition, self._records)
            return min(self.goal, known + self._left[1])
        return max(self.goal, known)

    def _running(self, number: int) -> TrialRecord:
        if not 0 <= number < len(self._records):
            raise TuneError(f"the study '{self.name}' has no trial {number}; it has {len(self._records)}")
        record = self._records[number]
        if record.state != "running":
            raise TuneError(f"trial {number} of the study '{self.name}' is not running: it is {record.state}")
        return record

    def _pruner(self, number: int) -> TrialPruner:
        if number not in self._pruners:
            self._pruners[number] = pruner = TrialPruner(self.definition, self._records, number)
            pruner.replay(self._records[number].reports)
        return self._pruners[number]

    def _propose(self, number: int) -> TrialRecord:
        for earlier in self._lost_state(number):
            record, again = self._records[earlier], propose(self.definition, self._records, earlier)
            if again.params != record.params:
                _log.warning("trial %d would not be proposed again: has Optuna changed?", earlier)
            self._records[earlier] = replace(record, attrs={**again.attrs, **record.attrs})
        return propose(self.definition, self._records, number)

    def _lost_state(self, number: int) -> list[int]:
        """The trials to propose again, in order, before this one: after a restart the state that a sampler keeps in
        memory alone is lost, and each of its states follows from the one before."""
        found, pending = set[int](), [number]
        while pending:
            seen = self._must_have_ended(pending.pop())
            lost = [one.number for one in restored_from(seen) if incomplete(one) and one.number not in found]
            found.update(lost)
            pending += lost
        return sorted(found)


def _numbers(values: float | Sequence[float]) -> tuple[float, ...]:
    return (float(values),) if isinstance(values, int | float) else tuple(map(float, values))


# Importances: how much of the difference between good and poor trials each choice explains.


def importances(
    space: Space, records: Sequence[TrialRecord], directions: Sequence[Direction], objective: int = 0
) -> dict[str, float]:
    """By PED-ANOVA over the complete trials, largest first, adding up to 1; of the choices that all these trials have.

    Empty while fewer than two trials differ in the objective. Optuna's default, fANOVA, would need scikit-learn.
    """
    if not 0 <= objective < len(directions):
        raise TuneError(f"there is no objective {objective}: the study has {len(directions)}, counted from 0")
    complete = [record for record in records if record.state == "complete" and record.values is not None]
    if len({record.values[objective] for record in complete if record.values is not None}) < 2:
        return {}
    importance = optuna_module().importance
    with silence_optuna():
        study = in_memory_study((proposed_trial(space, one, len(directions)) for one in complete), directions)
        # The evaluator takes lower for better where it is given a target.
        sign = 1.0 if directions[objective] == "minimize" else -1.0
        found = importance.get_param_importances(
            study,
            evaluator=importance.PedAnovaImportanceEvaluator(),
            target=lambda trial: sign * trial.values[objective],
        )
    return {str(name): float(share) for name, share in sorted(found.items(), key=lambda item: (-item[1], item[0]))}
