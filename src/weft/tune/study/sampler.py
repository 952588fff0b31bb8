"""The parameters of a trial: a function of the seed, its number and the results that it may see."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from weft.errors import TuneError
from weft.space import Floats, Space, Value
from weft.tune.study.definition import Definition
from weft.tune.study.optuna import (
    build,
    distributions,
    in_memory_study,
    optuna_module,
    optuna_state,
    silence_optuna,
    suggest,
)
from weft.tune.study.storage import TrialRecord, visible
from weft.utils import rng

ATTEMPTS = 10
"""Draws of a sampler, which knows no constraints, before one of the space, which does."""


def propose(definition: Definition, records: Sequence[TrialRecord], number: int) -> TrialRecord:
    """What trial ``number`` is to try, with what the sampler wants to find with it later; of ``records`` it sees those
    before it, as :func:`visible` says."""
    space, seed, directions = definition.space, definition.seed, definition.directions
    past = visible(records, number, definition.max_concurrent)
    if definition.sampler.name == "grid":
        if left := _untried(definition, past):
            return TrialRecord(number, dict(left[0]), "running")
        raise TuneError(
            "every point of the grid has been proposed; ask for fewer trials, or give the grid more 'points'"
        )
    with silence_optuna():
        study = in_memory_study((proposed_trial(space, record, len(directions)) for record in past), directions)
        for attempt in range(ATTEMPTS):
            study.sampler = build(definition.sampler, rng.key(seed, "propose", number, attempt))
            trial = study.ask()
            params = suggest(space, trial)
            if space.rules.broken(params) is None:
                attrs = study.get_trials(deepcopy=False)[-1].system_attrs
                # What TPE and GP share with other processes while a trial is being asked for is in its params by now.
                kept = {name: attrs[name] for name in attrs if ":relative_params" not in name}
                return TrialRecord(number, params, "running", attrs=kept)
            # Left running, it keeps samplers that look away from running trials from drawing the same again.
    return TrialRecord(number, dict(space.sample(rng.generator(seed, "propose", number)).values), "running")


def remaining_grid_points(definition: Definition, records: Sequence[TrialRecord]) -> int:
    """Points of the grid that no trial has tried yet."""
    return len(_untried(definition, records))


def _untried(definition: Definition, records: Sequence[TrialRecord]) -> list[dict[str, Value]]:
    tried = {frozenset(record.params.items()) for record in records}
    grid = _grid(
        json.dumps(definition.space.to_json()), int(definition.sampler.options.get("points", 5)), definition.seed
    )
    return [params for params in grid if frozenset(params.items()) not in tried]


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
