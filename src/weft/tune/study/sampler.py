"""A proposal: the parameters of a trial, a function of the seed, its number and the results that it may see."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from weft import keys
from weft.errors import TuneError
from weft.space import Floats, Space, Value
from weft.tune.distributions import suggest
from weft.tune.method import Method, build, quiet
from weft.tune.record import Direction, Record, visible
from weft.tune.view import for_proposal

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
    records: Sequence[Record],
    number: int,
    *,
    window: int,
    directions: Sequence[Direction],
    sampler: Method,
    seed: int,
) -> Suggested:
    """What trial ``number`` is to try; of ``records`` it sees those before it, as :func:`visible` says."""
    past = visible(records, number, window)
    if sampler.name == "grid":
        return _next_of_grid(space, past, sampler, seed)
    with quiet():
        study = for_proposal(space, past, directions)
        for attempt in range(ATTEMPTS):
            study.sampler = build(sampler, keys.key(seed, "propose", number, attempt))
            trial = study.ask()
            params = suggest(space, trial)
            if space.rules.broken(params) is None:
                attrs = study.get_trials(deepcopy=False)[-1].system_attrs
                # What TPE and GP share with other processes while a trial is being asked for is in its params by now.
                return Suggested(params, {name: attrs[name] for name in attrs if ":relative_params" not in name})
            # Left running, it keeps samplers that look away from running trials from drawing the same again.
    return Suggested(dict(space.sample(keys.generator(seed, "propose", number)).values), {})


def left_in_grid(space: Space, records: Sequence[Record], sampler: Method, seed: int) -> int:
    """Points of the grid that no trial has tried yet."""
    tried = {_point(record.params) for record in records}
    return sum(_point(params) not in tried for params in _grid_of(space, sampler, seed))


def _next_of_grid(space: Space, past: Sequence[Record], sampler: Method, seed: int) -> Suggested:
    tried = {_point(record.params) for record in past}
    for params in _grid_of(space, sampler, seed):
        if _point(params) not in tried:
            return Suggested(dict(params), {})
    raise TuneError("every point of the grid has been proposed; ask for fewer trials, or give the grid more 'points'")


def _grid_of(space: Space, sampler: Method, seed: int) -> tuple[dict[str, Value], ...]:
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
    return tuple(picks[at] for at in keys.generator(seed, "grid").permutation(len(picks)))


def _point(params: Any) -> tuple[tuple[str, Value], ...]:
    return tuple(sorted(params.items()))
