"""A proposal: the parameters of a trial, a function of the seed, its number and the results that it may see."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from weft.errors import TuneError
from weft.space import Floats, Space, Value
from weft.tune.study.distributions import distributions, suggest
from weft.tune.study.optuna import OptunaSpec, build, optuna_module, silence_optuna
from weft.tune.study.records import Direction, TrialRecord, visible
from weft.utils import rng

ATTEMPTS = 10
"""Draws of a sampler that knows no constraints before our own, which does, takes its place."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A trial to be run."""

    number: int
    params: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Suggested:
    """The parameters of a trial, and what the sampler wants to find with it later."""

    params: dict[str, Value]
    attrs: dict[str, Any]


def propose(
    space: Space,
    records: Sequence[TrialRecord],
    number: int,
    *,
    window: int,
    directions: Sequence[Direction],
    sampler: OptunaSpec,
    seed: int,
) -> Suggested:
    """What trial ``number`` is to try; of ``records`` it sees those before it, as :func:`visible` says."""
    past = visible(records, number, window)
    if sampler.name == "grid":
        return _next_of_grid(space, past, sampler, seed)
    with silence_optuna():
        study = for_proposal(space, past, directions)
        for attempt in range(ATTEMPTS):
            study.sampler = build(sampler, rng.key(seed, "propose", number, attempt))
            trial = study.ask()
            params = suggest(space, trial)
            if space.rules.broken(params) is None:
                attrs = study.get_trials(deepcopy=False)[-1].system_attrs
                # What TPE and GP share with other processes while a trial is being asked for is in its params by now.
                return Suggested(params, {name: attrs[name] for name in attrs if ":relative_params" not in name})
            # Left running, it keeps samplers that look away from running trials from drawing the same again.
    return Suggested(dict(space.sample(rng.generator(seed, "propose", number)).values), {})


def left_in_grid(space: Space, records: Sequence[TrialRecord], sampler: OptunaSpec, seed: int) -> int:
    """Points of the grid that no trial has tried yet."""
    tried = {_point(record.params) for record in records}
    return sum(_point(params) not in tried for params in _grid_of(space, sampler, seed))


def _next_of_grid(space: Space, past: Sequence[TrialRecord], sampler: OptunaSpec, seed: int) -> Suggested:
    tried = {_point(record.params) for record in past}
    for params in _grid_of(space, sampler, seed):
        if _point(params) not in tried:
            return Suggested(dict(params), {})
    raise TuneError("every point of the grid has been proposed; ask for fewer trials, or give the grid more 'points'")


def _grid_of(space: Space, sampler: OptunaSpec, seed: int) -> tuple[dict[str, Value], ...]:
    return _grid(json.dumps(space.to_json()), int(sampler.options.get("points", 5)), seed)


@lru_cache(maxsize=4)
def _grid(written: str, points: int, seed: int) -> tuple[dict[str, Value], ...]:
    """Every valid pick once, in an order of the seed, a real choice being so many numbers from end to end.

    Optuna's grid is a plain product: it would try a pick once for each value of the choices that are inactive in it.
    """
    data = json.loads(written)
    for entry in data["names"]:
        if entry["kind"] == "floats":
            real = Floats(entry.pop("low"), entry.pop("high"), entry.pop("log"))
            entry.update(kind="categorical", options=list(real.grid(points)))
    picks = [dict(subnet.values) for subnet in Space.from_json(data).enumerate()]
    return tuple(picks[at] for at in rng.generator(seed, "grid").permutation(len(picks)))


def _point(params: Any) -> tuple[tuple[str, Value], ...]:
    return tuple(sorted(params.items()))


# A view: records as an Optuna study in memory, which samplers and pruners read; it is thrown away afterwards.

NAME = "study"
"""Of every view: Hyperband deals its brackets by name and number, and the user's name must not change a result."""
WORST = 1e300
"""Stands for what is not finite, so that percentiles over it stay numbers."""


def for_proposal(space: Space, records: Sequence[TrialRecord], directions: Sequence[Direction]) -> Any:
    """Every record with its parameters and what the sampler keeps with it."""
    with silence_optuna():
        study = optuna_module().create_study(study_name=NAME, directions=list(directions))
        for record in records:
            study.add_trial(_proposed(space, record, len(directions)))
    return study


def for_pruning(records: Sequence[TrialRecord], objective: int, direction: Direction, pruner: Any) -> Any:
    """Every record as one objective sees it: its value, its reports and what the pruner keeps with it."""
    with silence_optuna():
        study = optuna_module().create_study(study_name=NAME, direction=direction, pruner=pruner)
        for record in records:
            study.add_trial(_reported(record, objective, direction))
    return study


def clip_to_finite(value: float, direction: Direction) -> float:
    """The value, with infinities made finite and NaN the worst there is."""
    if math.isnan(value):
        return WORST if direction == "minimize" else -WORST
    return min(max(value, -WORST), WORST)


def _proposed(space: Space, record: TrialRecord, objectives: int) -> Any:
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


def _reported(record: TrialRecord, objective: int, direction: Direction) -> Any:
    trials = optuna_module().trial
    done = record.state == "complete" and record.values is not None
    return trials.create_trial(
        state=_state(trials.TrialState, record.state),
        value=record.values[objective] if done and record.values is not None else None,
        system_attrs=dict(record.rungs[objective]) if record.rungs else {},
        intermediate_values={
            step: clip_to_finite(values[objective], direction) for step, values in sorted(record.reports.items())
        },
    )


def _state(states: Any, state: str) -> Any:
    return states[{"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL", "running": "RUNNING"}[state]]
