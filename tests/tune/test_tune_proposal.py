from __future__ import annotations

import logging
import random
import warnings
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import TuneError
from weft.space import Space
from weft.tune.study.optuna import parse_spec
from weft.tune.study.sampler import propose, remaining_grid_points
from weft.tune.study.storage import TrialRecord, visible

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


def mixed() -> Space:
    space = Space()
    lr = space.real("lr", 1e-4, 1e-1, log=True)
    width = space.integer("width", [16, 32, 64])
    depth = space.integer("depth", 1, 4)
    kind = space.categorical("kind", ["sgd", "adam"])
    space.real("momentum", 0.0, 0.9, when=kind == "sgd")
    space.categorical("bias", [True, False])
    space.require(width * depth <= 128, "must fit")
    space.require(lr <= 0.05)
    return space


SPACE = mixed()


def ask(records: list[TrialRecord], sampler: Any, directions: Any = ("minimize",), seed: int = 0) -> TrialRecord:
    number = len(records)
    got = propose(
        SPACE,
        records,
        number,
        max_concurrent=WINDOW + 1,
        directions=directions,
        sampler=parse_spec("sampler", sampler),
        seed=seed,
    )
    return TrialRecord(number, got.params, "running", attrs=got.attrs)


def history(
    count: int, sampler: Any, rng: random.Random, directions: Any = ("minimize",), seed: int = 0, sign: int = 0
) -> list[TrialRecord]:
    """So many trials that ended, one after the other, with results of this generator; with a sign all complete."""
    records: list[TrialRecord] = []
    for _ in range(count):
        record = ask(records, sampler, directions, seed)
        values = tuple((sign or 1) * rng.random() for _ in directions)
        reports = {1: tuple(value + 1 for value in values), 2: values}
        state = "complete" if sign else rng.choice(["complete", "complete", "complete", "pruned", "failed"])
        records.append(
            replace(record, state=state, values=None if state == "failed" else values, reports=reports)  # type: ignore[arg-type]
        )
    return records


@pytest.mark.parametrize(
    ("name", "objectives"),
    [
        pytest.param(name, count, marks=[pytest.mark.long] * (name == "gp" and count == 2))
        for name in SAMPLERS
        for count in (1, 2)
    ],
)
def test_every_proposal_is_a_valid_pick_of_the_space_s_own_values(name: str, objectives: int) -> None:
    if name == "cmaes" and objectives == 2:
        pytest.skip("it takes one objective")
    directions = ("minimize", "maximize")[:objectives]
    for record in history(LENGTH.get(name, 12), SAMPLERS[name], random.Random(1), directions):
        assert dict(SPACE.subnet(record.params).values) == dict(record.params)
        for choice, value in record.params.items():
            assert type(SPACE.choices[choice].canonical(value)) is type(value)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name == "gp")) for name in SAMPLERS])
def test_a_proposal_ignores_how_the_trials_of_its_window_stand(name: str) -> None:
    past = history(LENGTH.get(name, 10), SAMPLERS[name], random.Random(2))
    expected = ask(past, SAMPLERS[name])
    rng = random.Random(3)
    for record in past[-WINDOW:]:
        state = rng.choice(["running", "complete", "pruned", "failed"])
        past[record.number] = replace(record, state=state, values=(rng.random(),), reports={5: (rng.random(),)})  # type: ignore[arg-type]
    again = ask(past, SAMPLERS[name])
    assert (again.params, again.attrs) == (expected.params, expected.attrs)


@pytest.mark.parametrize("name", ["tpe", "cmaes", pytest.param("gp", marks=pytest.mark.long), "nsga2"])
def test_a_proposal_follows_from_the_results_before_its_window(name: str) -> None:
    past, turned = (history(LENGTH.get(name, 12), SAMPLERS[name], random.Random(5), sign=sign) for sign in (1, -1))
    unseen = WINDOW + 1
    assert [one.params for one in past[:unseen]] == [one.params for one in turned[:unseen]]
    assert [one.params for one in past] != [one.params for one in turned]


@pytest.mark.parametrize("name", SAMPLERS)
def test_another_seed_proposes_something_else(name: str) -> None:
    first, second = (history(4, SAMPLERS[name], random.Random(0), seed=seed) for seed in (0, 1))
    assert [one.params for one in first] != [one.params for one in second]


def test_a_trial_may_not_be_proposed_before_those_outside_its_window_have_ended() -> None:
    past = history(5, "random", random.Random(0))
    past[1] = replace(past[1], state="running")
    with pytest.raises(TuneError, match="before 2 has ended"):
        visible(past, 5, WINDOW + 1)
    assert [one.state for one in visible(past, 4, WINDOW + 1)[1:]] == ["running"] * 3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 3))
def test_the_grid_tries_every_valid_pick_once_and_then_has_none_left(seed: int, points: int) -> None:
    space = Space()
    kind = space.categorical("kind", ["sgd", "adam"])
    space.real("momentum", 0.0, 1.0, when=kind == "sgd")
    width, depth = space.integer("width", 1, 3), space.integer("depth", 1, 3)
    space.require(width * depth < 9)
    sampler = parse_spec("sampler", {"name": "grid", "points": points})
    expected = [
        {"kind": kind_, **rest, "width": w, "depth": d}
        for kind_ in ("sgd", "adam")
        for rest in ([{"momentum": at / (points - 1)} for at in range(points)] if kind_ == "sgd" else [{}])
        for w in (1, 2, 3)
        for d in (1, 2, 3)
        if w * d < 9
    ]
    records: list[TrialRecord] = []
    while remaining_grid_points(space, records, sampler, seed):
        got = propose(
            space, records, len(records), max_concurrent=3, directions=("minimize",), sampler=sampler, seed=seed
        )
        records.append(TrialRecord(len(records), got.params, "failed"))
    by = lambda params: sorted(params.items())  # noqa: E731
    assert sorted((dict(one.params) for one in records), key=by) == sorted(expected, key=by)  # type: ignore[arg-type]
    with pytest.raises(TuneError, match="every point of the grid"):
        propose(space, records, len(records), max_concurrent=3, directions=("minimize",), sampler=sampler, seed=seed)


def test_a_constraint_that_is_almost_never_met_is_met() -> None:
    space = Space()
    space.require(space.integer("a", 1, 100) + space.integer("b", 1, 100) == 200)
    got = propose(
        space, [], 0, max_concurrent=1, directions=("minimize",), sampler=parse_spec("sampler", "random"), seed=0
    )
    assert got.params == {"a": 100, "b": 100}


def test_optuna_neither_logs_nor_warns(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.DEBUG):
        warnings.simplefilter("error")
        history(6, {"name": "cmaes", "n_startup_trials": 1, "with_margin": True}, random.Random(0))
        history(6, {"name": "tpe", "n_startup_trials": 1, "group": True}, random.Random(0))
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")


@pytest.mark.parametrize(
    ("kind", "given_method", "said"),
    [
        ("sampler", "tpee", "unknown sampler 'tpee'; did you mean 'tpe'"),
        ("sampler", None, "a sampler is a name"),
        ("sampler", {"popsize": 3}, "a sampler is a name"),
        ("sampler", {"name": "cmaes", "popsizes": 3}, "no option 'popsizes'; did you mean 'popsize'"),
        ("sampler", {"name": "random", "points": 3}, "has no option 'points'; it has none"),
        ("sampler", {"name": "nsga2", "population_size": 1}, "refuses .*greater than or equal to 2"),
        (
            "sampler",
            {"name": "tpe", "n_startup_trials": "x"},
            "'n_startup_trials' of the sampler 'tpe' is a whole number",
        ),
        ("sampler", {"name": "tpe", "n_ei_candidates": 2.5}, "a whole number from 1 on, not 2.5"),
        ("sampler", {"name": "tpe", "multivariate": "yes"}, "is true or false, not 'yes'"),
        ("sampler", {"name": "tpe", "group": True, "multivariate": False}, "refuses"),
        ("sampler", {"name": "nsga2", "mutation_prob": 2}, "refuses .*mutation_prob"),
        ("sampler", {"name": "cmaes", "popsize": True}, "a whole number from 2 on, not True"),
        ("pruner", {"name": "hyperband", "min_resource": "auto"}, "a whole number, not 'auto'"),
        ("pruner", {"name": "asha", "min_resource": "some"}, "or 'auto', not 'some'"),
        ("sampler", {"name": "grid", "points": 1}, "'points' of the sampler 'grid' is a whole number from 2 on"),
        ("pruner", "ahsa", "unknown pruner 'ahsa'; did you mean 'asha'"),
        ("pruner", {"name": "asha", "reduction_factor": 1}, "refuses"),
    ],
)
def test_a_method_that_cannot_be_is_refused_with_its_reason(kind: Any, given_method: Any, said: str) -> None:
    with pytest.raises(TuneError, match=said):
        parse_spec(kind, given_method)
