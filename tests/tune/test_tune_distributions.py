from __future__ import annotations

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from weft.errors import SpaceError, TuneError
from weft.space import Categorical, Floats, Integers, Space
from weft.tune.study.definition import check_space
from weft.tune.study.optuna import complete_params, distribution, distributions, suggest
from weft.utils import rng

optuna.logging.set_verbosity(optuna.logging.ERROR)


def small() -> Space:
    space = Space()
    kind = space.categorical("kind", ["sgd", "adam"])
    momentum = space.real("momentum", 0.0, 0.9, when=kind == "sgd")
    width = space.integer("width", [16, 32, 64])
    depth = space.integer("depth", 1, 4)
    space.derive("size", width * depth)
    space.categorical("bias", [True, False], when=momentum > 0.5)
    space.require(width * depth <= 128)
    return space


def asked(space: Space, seed: int) -> tuple[dict[str, object], dict[str, object]]:
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)).ask()
    return suggest(space, trial), dict(trial.distributions)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Floats(0.0, 1.0), FloatDistribution(0.0, 1.0)),
        (Floats(1e-4, 1e-1, log=True), FloatDistribution(1e-4, 1e-1, log=True)),
        (Integers((3, 5, 7)), IntDistribution(3, 7, step=2)),
        (Integers((7, 5, 3)), IntDistribution(3, 7, step=2)),
        (Integers((9,)), IntDistribution(9, 9)),
        (Integers((16, 32, 64)), CategoricalDistribution((16, 32, 64))),
        (Integers((1, 2, 3), ordered=False), CategoricalDistribution((1, 2, 3))),
        (Categorical(("a", True, 2.5)), CategoricalDistribution(("a", True, 2.5))),
    ],
)
def test_each_choice_has_the_distribution_that_keeps_its_order(choice: object, expected: object) -> None:
    assert distribution(choice) == expected  # type: ignore[arg-type]


def test_inactive_and_derived_names_are_not_asked_for() -> None:
    seen = {tuple(asked(small(), seed)[0]) for seed in range(40)}
    assert seen == {
        ("kind", "width", "depth"),
        ("kind", "momentum", "width", "depth"),
        ("kind", "momentum", "width", "depth", "bias"),
    }


@given(st.integers(0, 2**32 - 1))
def test_what_is_suggested_is_the_space_s_own_and_has_the_distributions_of_a_stored_trial(seed: int) -> None:
    space = small()
    params, used = asked(space, seed)
    assert used == distributions(space, params)
    for name, value in params.items():
        option = space.choices[name].canonical(value)
        assert (option, type(option)) == (value, type(value))
    if space.rules.broken(params) is None:
        assert dict(space.subnet(params).values) == params


@given(st.integers(0, 2**32 - 1), st.sets(st.sampled_from(["kind", "width", "depth"])), st.integers(0, 9))
def test_a_partial_pick_keeps_its_values_and_is_completed_alike_each_time(seed: int, names: set[str], key: int) -> None:
    space = small()
    whole = dict(space.sample(rng.generator(seed)).values)
    given_values = {name: whole[name] for name in sorted(names)}
    params = complete_params(space, given_values, rng.generator(key))
    assert params == complete_params(space, given_values, rng.generator(key))
    assert given_values.items() <= params.items()
    assert dict(space.subnet(params).values) == params


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"widht": 16}, "did you mean 'width'"),
        ({"size": 64}, "derived"),
        ({"width": 17}, "'width' cannot be 17"),
        ({"momentum": 2}, r"\[0.0, 0.9\]"),
        ({"kind": "adam", "momentum": 0.5}, "'momentum' is inactive"),
        ({"width": 64, "depth": 4}, "constraint"),
        ({"kind": "adam", "width": 64, "depth": 4}, "constraint"),
    ],
)
def test_a_pick_that_cannot_be_is_refused_with_its_reason(params: dict[str, object], said: str) -> None:
    with pytest.raises((TuneError, SpaceError), match=said):
        complete_params(small(), params, rng.generator(0))  # type: ignore[arg-type]


def test_a_space_in_which_nothing_varies_is_refused() -> None:
    with pytest.raises(TuneError, match="no choices"):
        check_space(Space())
    empty = Space()
    empty.require(empty.integer("width", 1, 4) > 4)
    with pytest.raises(SpaceError, match="no subnet satisfies"):
        check_space(empty)
