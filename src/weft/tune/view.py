"""A view: records as an Optuna study in memory, which samplers and pruners read; it is thrown away afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weft.space import Space
from weft.tune.distributions import distributions
from weft.tune.method import optuna_module, quiet
from weft.tune.record import Direction, Record

NAME = "study"
"""Of every view: Hyperband deals its brackets by name and number, and the user's name must not change a result."""
FAR = 1e300
"""Stands for what is not finite, so that percentiles over it stay numbers."""


def for_proposal(space: Space, records: Sequence[Record], directions: Sequence[Direction]) -> Any:
    """Every record with its parameters and what the sampler keeps with it."""
    with quiet():
        study = optuna_module().create_study(study_name=NAME, directions=list(directions))
        for record in records:
            study.add_trial(_proposed(space, record, len(directions)))
    return study


def for_pruning(records: Sequence[Record], objective: int, direction: Direction, pruner: Any) -> Any:
    """Every record as one objective sees it: its value, its reports and what the pruner keeps with it."""
    with quiet():
        study = optuna_module().create_study(study_name=NAME, direction=direction, pruner=pruner)
        for record in records:
            study.add_trial(_reported(record, objective, direction))
    return study


def bounded(value: float, direction: Direction) -> float:
    """The value, with infinities made finite and NaN the worst there is."""
    if math.isnan(value):
        return FAR if direction == "minimize" else -FAR
    return min(max(value, -FAR), FAR)


def _proposed(space: Space, record: Record, objectives: int) -> Any:
    trials = optuna_module().trial
    state, values, intermediate = record.state, record.values, {}
    if objectives == 1:
        intermediate = {step: values[0] for step, values in record.reports.items()}
    elif state == "pruned":
        # Samplers of several objectives know no pruned trials. This one was behind in every objective, so that its last
        # values tell where not to look.
        known = values is not None and all(map(math.isfinite, values))
        state, values = ("complete", values) if known else ("failed", None)
    return trials.create_trial(
        state=_state(trials.TrialState, state),
        values=None if values is None or state not in ("complete", "pruned") else list(values),
        params=dict(record.params),
        distributions=distributions(space, record.params),
        system_attrs=dict(record.attrs),
        intermediate_values=intermediate,
    )


def _reported(record: Record, objective: int, direction: Direction) -> Any:
    trials = optuna_module().trial
    done = record.state == "complete" and record.values is not None
    return trials.create_trial(
        state=_state(trials.TrialState, record.state),
        value=record.values[objective] if done and record.values is not None else None,
        system_attrs=dict(record.rungs[objective]) if record.rungs else {},
        intermediate_values={
            step: bounded(values[objective], direction) for step, values in sorted(record.reports.items())
        },
    )


def _state(states: Any, state: str) -> Any:
    return states[{"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL", "running": "RUNNING"}[state]]
