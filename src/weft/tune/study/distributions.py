"""Distributions: the choices of a space as Optuna knows them, asked in the order of the space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.errors import TuneError
from weft.space import Choice, Floats, Integers, Space, Value
from weft.tune.study.optuna import optuna_module
from weft.utils import rng as keys

ATTEMPTS = 1000
"""Draws of the rest of a partial pick before it is taken to be impossible."""


def check_space(space: Space) -> None:
    """Raises TuneError for a space in which nothing varies, SpaceError for one whose constraints cannot be met."""
    if not space.choices:
        raise TuneError("the space has no choices, so there is nothing to tune; add one, as space.real('lr', 1e-4, 1)")
    space.sample(keys.generator("check the space"))


def step_of(choice: Integers) -> int | None:
    """The distance of integers that are ordered and evenly spaced.

    >>> step_of(Integers((16, 32, 48))), step_of(Integers((16, 32, 64)))
    (16, None)
    """
    steps = {b - a for a, b in zip(choice.values, choice.values[1:], strict=False)}
    return None if not choice.ordered or len(steps) > 1 else next(iter(steps), 1)


def distribution(choice: Choice) -> Any:
    """Real choices and evenly spaced integers keep their order; other choices are categories."""
    kinds = optuna_module().distributions
    if isinstance(choice, Floats):
        return kinds.FloatDistribution(choice.low, choice.high, log=choice.log)
    if isinstance(choice, Integers) and (step := step_of(choice)) is not None:
        return kinds.IntDistribution(choice.values[0], choice.values[-1], step=step)
    return kinds.CategoricalDistribution(choice.options)


def distributions(space: Space, params: Mapping[str, Value]) -> dict[str, Any]:
    """Of those choices that the trial has."""
    return {name: distribution(space.choices[name]) for name in params}


def readable(space: Space, params: Mapping[str, Value]) -> dict[str, Value]:
    """What a trial reads: its choices, and after them the derived dimensions that are active with these."""
    subnet = space.rules.subnet(dict(params))
    return {**params, **{name: subnet[name] for name in space.derived if name in subnet}}


def suggest(space: Space, trial: Any) -> dict[str, Value]:
    """Ask an Optuna trial for every choice that turns out active, in order; constraints are not checked."""

    def pick(name: str, choice: Choice) -> Value:
        if isinstance(choice, Floats):
            number = float(trial.suggest_float(name, choice.low, choice.high, log=choice.log))
            return min(max(number, choice.low), choice.high)  # a logarithm and back may leave the interval by a bit
        if isinstance(choice, Integers) and (step := step_of(choice)) is not None:
            return choice.canonical(trial.suggest_int(name, choice.values[0], choice.values[-1], step=step))
        return choice.canonical(trial.suggest_categorical(name, choice.options))

    return space.rules.settle(pick)


def completed(space: Space, params: Mapping[str, Value], rng: np.random.Generator) -> dict[str, Value]:
    """A valid pick with these values, the choices that are missing drawn from the generator.

    A value that is no option, unknown, derived or of a choice that turns out inactive is a TuneError or SpaceError.
    """
    given: dict[str, Value] = {}
    for name, value in params.items():
        if name not in space.choices:
            space.handle(name)  # an unknown name is an error here, with the nearest one
            raise TuneError(f"'{name}' is derived from '{space.derived[name]}'; leave it out")
        choice = space.choices[name]
        if not choice.contains(value):
            options = f"[{choice.low}, {choice.high}]" if isinstance(choice, Floats) else list(choice.options)[:12]
            raise TuneError(f"'{name}' cannot be {value!r}: it is of {options}")
        given[name] = choice.canonical(value)

    def pick(name: str, choice: Choice) -> Value:
        return given[name] if name in given else choice.sample(rng)

    inactive: set[str] = set()
    for _ in range(ATTEMPTS):
        values = space.rules.settle(pick)
        inactive = given.keys() - values.keys()
        if not inactive and space.rules.broken(values) is None:
            return values
        if given.keys() >= space.choices.keys() or set(values) <= given.keys():
            break  # nothing was drawn: another attempt would be the same
    if inactive:
        name = min(inactive)
        raise TuneError(f"'{name}' is inactive with these values: '{space.conditions[name]}' is false; leave it out")
    broken = space.rules.broken(values)
    raise TuneError(f"no trial has {dict(given)}: the constraint {broken} does not hold, whatever the rest")
