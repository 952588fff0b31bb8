"""The parameters of a trial: a function of the seed, its number and the results that it may see."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from weft.errors import TuneError
from weft.space import Floats, Space, Value
from weft.tune.study.optuna import (
    OptunaSpec,
    build,
    distributions,
    in_memory_study,
    optuna_module,
    optuna_state,
    silence_optuna,
    suggest,
)
from weft.tune.study.storage import Direction, TrialRecord, visible
from weft.utils import rng

ATTEMPTS = 10
"""Draws of a sampler, which knows no constraints, before one of the space, which does."""


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
    max_concurrent: int,
    directions: Sequence[Direction],
    sampler: OptunaSpec,
    seed: int,
) -> Suggested:
    """What trial ``number`` is to try; of ``records`` it sees those before it, as :func:`visible` says."""
    past = visible(records, number, max_concurrent)
    if sampler.name == "grid":
        return _next_of_grid(space, past, sampler, seed)
    with silence_optuna():
        study = in_memory_study((proposed_trial(space, record, len(directions)) for record in past), directions)
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


def remaining_grid_points(space: Space, records: Sequence[TrialRecord], sampler: OptunaSpec, seed: int) -> int:
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


def proposed_trial(space: Space, record: TrialRecord, objectives: int) -> Any:
    """A record as Optuna's trial, with its parameters and what the sampler keeps with it."""
    state, values, intermediate = record.state, record.values, {}
    if objectives == 1:
        intermediate = {step: values[0] for step, values in record.reports.items()}
    elif state == "pruned":
        # Samplers of several objectives know no pruned trials. This one was behind in every objective, so that its last
        # values tell where not to look.
        known = values is not None and all(map(math.isfinite, values))
        state, values = ("complete", values) if known else ("failed", None)
    return optuna_module().trial.create_trial(
        state=optuna_state(state),
        values=None if values is None or state not in ("complete", "pruned") else list(values),
        params=dict(record.params),
        distributions=distributions(space, record.params),
        system_attrs=dict(record.attrs),
        intermediate_values=intermediate,
    )
