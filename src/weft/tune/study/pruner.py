"""Whether a trial ends early: a function of its own reports and of those of the trials that it may see."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from weft.tune.study.definition import Definition
from weft.tune.study.optuna import build, in_memory_study, optuna_module, optuna_state, silence_optuna
from weft.tune.study.storage import Direction, TrialRecord, visible


class TrialPruner:
    """Of one trial. It is pruned where the pruner would prune it on every objective, each taken by itself.

    All that the trial may see has ended before it was proposed, so it is read once. A pruner that is built anew and
    gets the same reports in order of their steps makes the same decisions. A report that is not a number never survives
    where the pruner compares; among the reports of others it is the worst.
    """

    def __init__(self, definition: Definition, records: Sequence[TrialRecord], number: int) -> None:
        self.decisions: dict[int, bool] = {}
        """By step, each reported once."""
        self._trials: list[Any] = []
        self._studies: list[Any] = []
        past = visible(records, number, definition.max_concurrent)
        with silence_optuna():
            for objective, direction in enumerate(definition.directions):
                seen = (_trial(record, objective, direction) for record in past)
                study = in_memory_study(seen, [direction], build(definition.pruner))
                self._studies.append(study)
                self._trials.append(study.ask())

    def report(self, step: int, values: Sequence[float]) -> bool:
        """Whether the trial is to end at this step, which is later than all before."""
        with silence_optuna():
            for trial, value in zip(self._trials, values, strict=True):
                trial.report(value, step)
            # Not by all() of a generator: each pruner keeps state of its own.
            decisions = [bool(trial.should_prune()) for trial in self._trials]
        self.decisions[step] = all(decisions)
        return self.decisions[step]

    def replay(self, reports: Mapping[int, Sequence[float]]) -> None:
        """All these reports in order of their steps."""
        for step in sorted(reports):
            self.report(step, reports[step])

    @property
    def last(self) -> int:
        """The latest step, -1 before any."""
        return max(self.decisions, default=-1)

    @property
    def state(self) -> tuple[Mapping[str, Any], ...]:
        """What the pruner keeps with the trial, for each objective."""
        with silence_optuna():
            return tuple(dict(study.get_trials(deepcopy=False)[-1].system_attrs) for study in self._studies)


WORST = 1e300
"""Stands for what is not finite, so that percentiles over it stay numbers."""


def clip_to_finite(value: float, direction: Direction) -> float:
    """The value, with infinities made finite and NaN the worst there is."""
    if math.isnan(value):
        return WORST if direction == "minimize" else -WORST
    return min(max(value, -WORST), WORST)


def _trial(record: TrialRecord, objective: int, direction: Direction) -> Any:
    """A record as one objective sees it: its value, its reports and what the pruner keeps with it."""
    done = record.state == "complete" and record.values is not None
    return optuna_module().trial.create_trial(
        state=optuna_state(record.state),
        value=record.values[objective] if done and record.values is not None else None,
        system_attrs=dict(record.pruner_state[objective]) if record.pruner_state else {},
        intermediate_values={
            step: clip_to_finite(values[objective], direction) for step, values in sorted(record.reports.items())
        },
    )
