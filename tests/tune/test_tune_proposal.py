"""Proposals as functions of the seed and of what a trial may see; the choices of a space as Optuna's distributions."""

from __future__ import annotations

import logging
import random
import warnings
from dataclasses import replace
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from weft.errors import SpaceError, TuneError
from weft.space import Categorical, Floats, Integers, Space
from weft.tune.study.definition import Definition, check_space
from weft.tune.study.optuna import complete_params, distribution, distributions, parse_spec, suggest
from weft.tune.study.sampler import propose, remaining_grid_points
from weft.tune.study.storage import TrialRecord
from weft.utils import rng

optuna.logging.set_verbosity(optuna.logging.ERROR)

SAMPLERS: dict[str, Any] = {
    "tpe": {"name": "tpe", "n_startup_trials": 3},
    "cmaes": {"name": "cmaes", "n_startup_trials": 2, "popsize": 3},
    "gp": {"name": "gp", "n_startup_trials": 1},
    "nsga2": {"name": "nsga2", "population_size": 3},
    "random": "random",
    "grid": {"name": "grid", "points": 3},
}
WINDOW = 3
LENGTH = {"gp": 6}  # its proposals take a third of a second each


def mixed(bias_when: float | None = None) -> Space:
    """Choices of every kind; those of ``bias`` only with more momentum than that."""
    space = Space()
    lr = space.real("lr", 1e-4, 1e-1, log=True)
    width = space.integer("width", [16, 32, 64])
    depth = space.integer("depth", 1, 4)
    kind = space.categorical("kind", ["sgd", "adam"])
    momentum = space.real("momentum", 0.0, 0.9, when=kind == "sgd")
    space.categorical("bias", [True, False], when=None if bias_when is None else momentum > bias_when)
    space.derive("size", width * depth)
    space.require(width * depth <= 128, "must fit")
    space.require(lr <= 0.05)
    return space


SPACE, CONDITIONAL = mixed(), mixed(0.5)


def definition(space: Space, sampler: Any, seed: int = 0, directions: Any = ("minimize",)) -> Definition:
    return Definition(space, directions, seed, WINDOW + 1, parse_spec("sampler", sampler), parse_spec("pruner", None))


def ask(records: list[TrialRecord], sampler: Any, directions: Any = ("minimize",), seed: int = 0) -> TrialRecord:
    return propose(definition(SPACE, sampler, seed, directions), records, len(records))


def history(
    count: int, sampler: Any, draw: random.Random, directions: Any = ("minimize",), seed: int = 0, sign: int = 0
) -> list[TrialRecord]:
    """So many trials that ended, one after the other, with results of this generator; with a sign all complete."""
    records: list[TrialRecord] = []
    for _ in range(count):
        record = ask(records, sampler, directions, seed)
        told = tuple((sign or 1) * draw.random() for _ in directions)
        reports = {1: tuple(value + 1 for value in told), 2: told}
        state: Any = "complete" if sign else draw.choice(["complete", "complete", "complete", "pruned", "failed"])
        records.append(replace(record, state=state, values=None if state == "failed" else told, reports=reports))
    return records


@pytest.mark.parametrize(
    ("name", "objectives"),
    [
        pytest.param(name, count, marks=[pytest.mark.long] * (name == "gp" and count == 2))
        for name in SAMPLERS
        for count in (1, 2)
        if (name, count) != ("cmaes", 2)  # which takes one objective
    ],
)
def test_every_proposal_is_a_valid_pick_of_the_space_s_own_values(name: str, objectives: int) -> None:
    directions = ("minimize", "maximize")[:objectives]
    for record in history(LENGTH.get(name, 12), SAMPLERS[name], random.Random(1), directions):
        assert dict(SPACE.subnet(record.params).values) == dict(record.params)
        for choice, value in record.params.items():
            assert type(SPACE.choices[choice].canonical(value)) is type(value)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name == "gp")) for name in SAMPLERS])
def test_a_proposal_ignores_how_the_trials_of_its_window_stand(name: str) -> None:
    past = history(LENGTH.get(name, 10), SAMPLERS[name], random.Random(2))
    expected = ask(past, SAMPLERS[name])
    draw = random.Random(3)
    for record in past[-WINDOW:]:
        state = draw.choice(["running", "complete", "pruned", "failed"])
        past[record.number] = replace(record, state=state, values=(draw.random(),), reports={5: (draw.random(),)})  # type: ignore[arg-type]
    again = ask(past, SAMPLERS[name])
    assert (again.params, again.attrs) == (expected.params, expected.attrs)
    past[-WINDOW - 1] = replace(past[-WINDOW - 1], state="running")
    with pytest.raises(TuneError, match=f"before {len(past) - WINDOW} has ended"):
        ask(past, SAMPLERS[name])


@pytest.mark.parametrize("name", ["tpe", "cmaes", pytest.param("gp", marks=pytest.mark.long), "nsga2"])
def test_a_proposal_follows_from_the_results_before_its_window(name: str) -> None:
    past, turned = (history(LENGTH.get(name, 12), SAMPLERS[name], random.Random(5), sign=sign) for sign in (1, -1))
    unseen = WINDOW + 1
    assert [one.params for one in past[:unseen]] == [one.params for one in turned[:unseen]]
    assert [one.params for one in past] != [one.params for one in turned]
    other = history(4, SAMPLERS[name], random.Random(5), seed=1)
    assert [one.params for one in other] != [one.params for one in past[:4]]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 3))
def test_the_grid_tries_every_valid_pick_once_and_then_has_none_left(seed: int, points: int) -> None:
    space = Space()
    kind = space.categorical("kind", ["sgd", "adam"])
    space.real("momentum", 0.0, 1.0, when=kind == "sgd")
    width, depth = space.integer("width", 1, 3), space.integer("depth", 1, 3)
    space.require(width * depth < 9)
    grid = definition(space, {"name": "grid", "points": points}, seed)
    expected = [
        {"kind": kind_, **rest, "width": w, "depth": d}
        for kind_ in ("sgd", "adam")
        for rest in ([{"momentum": at / (points - 1)} for at in range(points)] if kind_ == "sgd" else [{}])
        for w in (1, 2, 3)
        for d in (1, 2, 3)
        if w * d < 9
    ]
    records: list[TrialRecord] = []
    while remaining_grid_points(grid, records):
        records.append(replace(propose(grid, records, len(records)), state="failed"))
    by = lambda params: sorted(params.items())  # noqa: E731
    assert sorted((dict(one.params) for one in records), key=by) == sorted(expected, key=by)  # type: ignore[arg-type]
    with pytest.raises(TuneError, match="every point of the grid"):
        propose(grid, records, len(records))


def test_optuna_neither_logs_nor_warns(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.DEBUG):
        warnings.simplefilter("error")
        history(6, {"name": "cmaes", "n_startup_trials": 1, "with_margin": True}, random.Random(0))
        history(6, {"name": "tpe", "n_startup_trials": 1, "group": True}, random.Random(0))
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")


@pytest.mark.parametrize(
    ("kind", "given_spec", "said"),
    [
        ("sampler", "tpee", "unknown sampler 'tpee'; did you mean 'tpe'"),
        ("sampler", {"popsize": 3}, "a sampler is a name"),
        ("sampler", {"name": "cmaes", "popsizes": 3}, "no option 'popsizes'; did you mean 'popsize'"),
        ("sampler", {"name": "random", "points": 3}, "has no option 'points'; it has none"),
        ("sampler", {"name": "tpe", "seed": 3}, "has no option 'seed'"),
        ("sampler", {"name": "nsga2", "population_size": 1}, "refuses .*greater than or equal to 2"),
        ("sampler", {"name": "tpe", "n_startup_trials": "x"}, "a whole number"),
        ("sampler", {"name": "tpe", "n_ei_candidates": 2.5}, "a whole number from 1 on, not 2.5"),
        ("sampler", {"name": "tpe", "multivariate": "yes"}, "is true or false, not 'yes'"),
        ("sampler", {"name": "grid", "points": 1}, "a whole number from 2 on"),
        ("pruner", {"name": "asha", "min_resource": "some"}, "or 'auto', not 'some'"),
        ("pruner", {"name": "asha", "reduction_factor": 1}, "refuses"),
    ],
)
def test_a_sampler_or_pruner_that_cannot_be_is_refused_with_its_reason(kind: Any, given_spec: Any, said: str) -> None:
    with pytest.raises(TuneError, match=said):
        parse_spec(kind, given_spec)


# -- distributions


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


@given(st.integers(0, 2**32 - 1))
def test_what_is_suggested_is_the_space_s_own_and_has_the_distributions_of_a_stored_trial(seed: int) -> None:
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)).ask()
    params = suggest(CONDITIONAL, trial)
    assert trial.distributions == distributions(CONDITIONAL, params)
    for name, value in params.items():
        option = CONDITIONAL.choices[name].canonical(value)
        assert (option, type(option)) == (value, type(value))
    if CONDITIONAL.rules.broken(params) is None:
        assert dict(CONDITIONAL.subnet(params).values) == params


@given(st.integers(0, 2**32 - 1), st.sets(st.sampled_from(["kind", "width", "depth"])), st.integers(0, 9))
def test_a_partial_pick_keeps_its_values_and_is_completed_alike_each_time(seed: int, names: set[str], key: int) -> None:
    whole = dict(CONDITIONAL.sample(rng.generator(seed)).values)
    given_values = {name: whole[name] for name in sorted(names)}
    params, again = (complete_params(CONDITIONAL, given_values, rng.generator(key)) for _ in range(2))
    assert params == again
    assert given_values.items() <= params.items()
    assert dict(CONDITIONAL.subnet(params).values) == params


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
        complete_params(CONDITIONAL, params, rng.generator(0))  # type: ignore[arg-type]


def test_a_space_in_which_nothing_varies_is_refused_and_one_of_a_single_pick_is_met() -> None:
    with pytest.raises(TuneError, match="no choices"):
        check_space(Space())
    for total in (200, 201):
        space = Space()
        space.require(space.integer("a", 1, 100) + space.integer("b", 1, 100) == total)
        if total == 200:
            assert propose(definition(space, "random"), [], 0).params == {"a": 100, "b": 100}
        else:
            with pytest.raises(SpaceError, match="no subnet satisfies"):
                check_space(space)
