"""Pruning: whether a trial ends early, a function of its own reports and of those of the trials that it may see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.tune.study.optuna import OptunaSpec, build, silence_optuna
from weft.tune.study.records import Direction, TrialRecord, visible
from weft.tune.study.sampler import for_pruning


class TrialPruner:
    """Of one trial. It is pruned where the pruner would prune it on every objective, each taken by itself.

    All that the trial may see has ended before it was proposed, so a judge looks once, and one that is built anew and
    told the same reports in order of their steps comes to the same decisions. A report that is not a number never
    survives where the pruner compares; among the reports of others it is the worst.
    """

    def __init__(
        self,
        records: Sequence[TrialRecord],
        number: int,
        *,
        window: int,
        directions: Sequence[Direction],
        pruner: OptunaSpec,
    ) -> None:
        self.decisions: dict[int, bool] = {}
        """By step; a step is told once."""
        self._trials: list[Any] = []
        self._studies: list[Any] = []
        if pruner.name != "none":
            past = visible(records, number, window)
            with silence_optuna():
                for objective, direction in enumerate(directions):
                    study = for_pruning(past, objective, direction, build(pruner))
                    self._studies.append(study)
                    self._trials.append(study.ask())

    def report(self, step: int, values: Sequence[float]) -> bool:
        """Whether the trial is to end at this step, which is later than all before."""
        with silence_optuna():
            for trial, value in zip(self._trials, values, strict=bool(self._trials)):
                trial.report(value, step)
            # Not by all() of a generator: each pruner takes down what it saw.
            decisions = [bool(trial.should_prune()) for trial in self._trials]
        self.decisions[step] = bool(decisions) and all(decisions)
        return self.decisions[step]

    @property
    def last(self) -> int:
        """The latest step, -1 before any."""
        return max(self.decisions, default=-1)

    @property
    def rungs(self) -> tuple[Mapping[str, Any], ...]:
        """What the pruner keeps with the trial, for each objective."""
        with silence_optuna():
            return tuple(dict(study.get_trials(deepcopy=False)[-1].system_attrs) for study in self._studies)


def judged(judge: TrialPruner, reports: Mapping[int, Sequence[float]]) -> TrialPruner:
    """The judge, having been told all these reports in order."""
    for step in sorted(reports):
        judge.report(step, reports[step])
    return judge
