from __future__ import annotations

import json
import math
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from weft.errors import SpaceError, TuneError
from weft.space import Space
from weft.tune.study.definition import define
from weft.tune.study.storage import TrialRecord
from weft.tune.study.study import Study

SAMPLERS: dict[str, Any] = {
    "tpe": {"name": "tpe", "n_startup_trials": 2},
    "cmaes": {"name": "cmaes", "n_startup_trials": 1, "popsize": 2},
    "gp": {"name": "gp", "n_startup_trials": 1},
    "nsga2": {"name": "nsga2", "population_size": 2},
    "random": "random",
    "grid": {"name": "grid", "points": 2},
}
ASHA = {"name": "asha", "min_resource": 1, "reduction_factor": 2}
WINDOW = 2
STEPS = 2


def small(high: float = 1e-1, most: float = 0.2) -> Space:
    space = Space()
    lr = space.real("lr", 1e-3, high, log=True)
    kind = space.categorical("kind", ["sgd", "adam"])
    space.real("momentum", 0.0, 0.9, when=kind == "sgd")
    depth = space.integer("depth", 1, 4)
    space.require(depth * lr <= most)
    return space


@pytest.fixture(scope="module")
def empty() -> Iterator[Path]:
    """A database with its tables, to be copied: they take longest to make. In memory where that is a folder."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        path = Path(folder) / "empty.db"
        opened(f"sqlite:///{path}", name="other").close()
        yield path


@pytest.fixture
def url(empty: Path) -> str:
    return fresh(empty)


def fresh(empty: Path) -> str:
    folder = tempfile.mkdtemp(dir=empty.parent)
    return f"sqlite:///{shutil.copy(empty, Path(folder) / 'study.db')}"


def opened(
    url: str, resume: bool = False, name: str = "digits", space: Space | None = None, trials: int = 9, **changed: Any
) -> Study:
    given: dict[str, Any] = {"directions": ("minimize",), "seed": 7, "max_concurrent": WINDOW + 1}
    definition = define(space or small(), **given | {"sampler": "random", "pruner": ASHA} | changed)
    return Study.open(name, definition, trials=trials, storage=url, resume=resume)


def result(number: int, params: Any, step: int, objectives: int, bump: dict[int, float]) -> tuple[float, ...]:
    """What a trial reports: a function of its parameters, and of nothing that differs between runs."""
    loss = (math.log10(params["lr"]) + 2) ** 2 + params.get("momentum", 0.2) + 1 / step + bump.get(number, 0.0)
    return (loss, params["depth"] * step)[:objectives]


def drive(
    url: str,
    rng: random.Random,
    workers: int,
    restart: float = 0.0,
    bump: dict[int, float] | None = None,
    **changed: Any,
) -> list[TrialRecord]:
    """Run a study to its end, trials going on in an order of the generator; a restart is a crash of the driver."""
    study = opened(url, **changed)
    objectives = len(study.definition.directions)
    try:
        open_ones: dict[int, list[Any]] = {}
        while not study.finished():
            if rng.random() < restart:
                study.close()
                study = opened(url, resume=True, **changed)
                # Its trials begin again, some from the start and some from a checkpoint.
                was = {number: step for number, (_, step) in open_ones.items()}
                open_ones = {o.number: [o.params, rng.randint(0, was[o.number])] for o in study.open_trials()}
                assert open_ones.keys() == was.keys()
            while len(open_ones) < workers and study.askable() is not None and rng.random() < 0.8:
                asked = study.ask()
                open_ones[asked.number] = [asked.params, 0]
            if not open_ones:
                continue
            number = rng.choice(sorted(open_ones))
            params, step = open_ones[number]
            step += 1
            values = result(number, params, step, objectives, bump or {})
            if number == 3 and step == 2:
                study.tell(number, "failed", info={"error": "ValueError: no"})
            elif study.report(number, step, values):
                study.tell(number, "pruned")
            elif step == STEPS:
                study.tell(number, "complete", values)
            else:
                open_ones[number][1] = step
                continue
            del open_ones[number]
        return study.trials()
    finally:
        study.close()


def check_that_order_does_not_matter(empty: Path, examples: int, restarts: float, **changed: Any) -> None:
    expected = drive(fresh(empty), random.Random(0), 1, **changed)
    assert {one.state for one in expected} > {"complete"}

    # Nothing is shrunk: another seed is no simpler an order.
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.integers(1, 10**9), st.integers(2, WINDOW + 1), st.just(restarts))
    def same(order: int, workers: int, restart: float) -> None:
        assert drive(fresh(empty), random.Random(order), workers, restart, **changed) == expected

    same()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name == "gp")) for name in SAMPLERS])
def test_a_study_is_the_same_in_any_order_with_any_number_of_workers_and_after_any_restarts(
    name: str, empty: Path
) -> None:
    several = {"directions": ("minimize", "maximize")} if name in ("nsga2", "grid") else {}
    trials = 6 if name == "gp" else 9
    check_that_order_does_not_matter(empty, 2, 0.25, sampler=SAMPLERS[name], trials=trials, **several)


@pytest.mark.long
@pytest.mark.parametrize("directions", [("maximize",), ("minimize", "maximize")])
@pytest.mark.parametrize("pruner", ["asha", "hyperband", {"name": "median", "n_startup_trials": 2}])
@pytest.mark.parametrize("name", SAMPLERS)
def test_longer_studies_are_the_same_too(name: str, pruner: Any, directions: Any, empty: Path) -> None:
    if name == "cmaes" and len(directions) > 1:
        pytest.skip("it takes one objective")
    changed = {"sampler": SAMPLERS[name], "pruner": pruner, "directions": directions}
    trials = 9 if name == "gp" else 16
    check_that_order_does_not_matter(empty, 2 if name == "gp" else 3, 0.1, trials=trials, **changed)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(0, 3), st.integers(1, 7))
def test_a_trial_can_be_asked_for_exactly_when_all_before_its_window_have_ended(
    empty: Path, data: st.DataObject, window: int, trials: int
) -> None:
    with opened(fresh(empty), max_concurrent=window + 1, trials=trials) as study:
        proposed, ended = 0, set[int]()
        while not study.finished():
            free = proposed < trials and set(range(proposed - window)) <= ended
            assert study.askable() == (proposed if free else None)
            still = sorted(set(range(proposed)) - ended)
            assert [one.number for one in study.open_trials()] == still
            assert free or still  # there is always something to do
            if free and (not still or data.draw(st.booleans())):
                assert study.ask().number == proposed
                proposed += 1
            else:
                if not free:
                    with pytest.raises(TuneError, match="no trial to propose now"):
                        study.ask()
                number = data.draw(st.sampled_from(still))
                study.tell(number, data.draw(st.sampled_from(["complete", "pruned", "failed"])), 1.0)
                ended.add(number)
        assert (proposed, len(ended)) == (trials, trials)
        assert study.askable() is None


def test_the_state_of_a_sampler_that_is_a_pickle_is_never_written_and_made_again_after_a_restart(empty: Path) -> None:
    changed = {"sampler": SAMPLERS["cmaes"], "pruner": None, "trials": 14}
    url = fresh(empty)
    expected = drive(url, random.Random(0), 1, **changed)
    assert expected[-1].attrs["cma:generation"] > 1
    assert any("cma:optimizer:0" in one.attrs for one in expected)
    rows = sqlite3.connect(url.removeprefix("sqlite:///")).execute("SELECT key FROM trial_system_attributes")
    written = {key for (key,) in rows}
    assert "cma:generation" in written
    assert not [key for key in written if "optimizer" in key]


def test_a_report_that_is_repeated_keeps_its_value_and_its_answer(url: str) -> None:
    with opened(url, max_concurrent=1) as study:
        for number in range(2):
            study.ask()
            study.report(number, 1, 1.0)
            study.report(number, 2, 1.0)
            study.tell(number, "complete", 1.0)
        study.ask()
        assert [study.report(2, 1, 0.5), study.report(2, 2, 9.0)] == [False, True]
        assert [study.report(2, 1, 9.0), study.report(2, 2, 0.1)] == [False, True]
    with opened(url, max_concurrent=1, resume=True) as study:
        assert [study.report(2, 1, 9.0), study.report(2, 2, 0.1)] == [False, True]
        assert dict(study.trials()[2].reports) == {1: (0.5,), 2: (9.0,)}


def test_steps_that_are_reported_out_of_order_end_as_if_they_had_not_been(empty: Path) -> None:
    ended = []
    for steps in ([1, 2, 4], [4, 1, 2]):
        with opened(fresh(empty)) as study:
            study.ask()
            for step in steps:
                study.report(0, step, float(step))
            study.tell(0, "complete", 1.0)
            ended.append((list(study.trials()[0].reports.items()), study.trials()[0].pruner_state))
    assert ended[0] == ended[1]
    assert ended[0][1] == ({"completed_rung_0": 1.0, "completed_rung_1": 2.0, "completed_rung_2": 4.0},)


def test_a_trial_ends_once_and_only_if_it_runs(url: str) -> None:
    with opened(url) as study:
        study.ask()
        study.tell(0, "complete", 0.5)
        for call, *given in ((study.tell, "failed"), (study.report, 1, 1.0), (study.set_info, {"a": 1})):
            with pytest.raises(TuneError, match="trial 0 of the study 'digits' is not running: it is complete"):
                call(0, *given)  # type: ignore[operator]
        with pytest.raises(TuneError, match="has no trial 5"):
            study.tell(5, "failed")


def test_what_is_enqueued_is_tried_next_with_its_own_values_and_the_rest_of_the_seed(url: str, empty: Path) -> None:
    with opened(url, trials=3) as study:
        assert study.enqueue({"lr": 0.01, "kind": "sgd"}) == 0
        assert study.enqueue({"kind": "adam"}) == 1
        with pytest.raises(SpaceError, match="did you mean 'depth'"):
            study.enqueue({"dept": 1})
        assert not study.finished()
    with opened(url, trials=3, resume=True) as study:
        assert [one.state for one in study.trials()] == ["waiting", "waiting"]
        first, second, third = study.ask(), study.ask(), study.ask()
        assert (first.params["lr"], first.params["kind"]) == (0.01, "sgd")
        assert set(first.params) == {"lr", "kind", "momentum", "depth"}
        assert second.params["kind"] == "adam"
        assert study.enqueue({"depth": 4, "lr": 0.02}) == 3  # beyond the trials that were asked for
        assert study.askable() is None  # it too waits for the trials before its window
        study.tell(0, "complete", 1.0)
        assert study.ask().params["depth"] == 4
    with opened(fresh(empty), trials=3) as study:
        study.enqueue({"lr": 0.01, "kind": "sgd"})
        study.enqueue({"kind": "adam"})
        assert [study.ask().params for _ in range(3)] == [first.params, second.params, third.params]


def test_a_grid_ends_when_it_has_been_tried_even_if_more_trials_were_asked_for(url: str) -> None:
    with opened(url, sampler=SAMPLERS["grid"], trials=100, pruner=None) as study:
        study.enqueue({"lr": 1e-3, "kind": "adam", "depth": 1})  # a point of the grid, and not tried twice
        while not study.finished():
            study.tell(study.ask().number, "complete", 1.0)
        tried = [tuple(sorted(one.params.items())) for one in study.trials()]
        # two rates, of which 0.1 takes a depth of 1 or 2; sgd with two momenta, adam with none
        assert len(tried) == len(set(tried)) == (4 + 2) * (2 + 1)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), min_size=1, max_size=6))
def test_the_best_trials_are_those_that_no_other_beats(empty: Path, told: list[tuple[int, int]]) -> None:
    with opened(fresh(empty), directions=("minimize", "maximize"), trials=len(told) + 1, max_concurrent=10) as study:
        for number, values in enumerate(told):
            study.ask()
            study.tell(number, "complete", values)
        study.ask()
        study.report(len(told), 1, (-9.0, 9.0))
        study.tell(len(told), "pruned")
        beaten = {i for i, (a, b) in enumerate(told) for c, d in told if c <= a and d >= b and (c, d) != (a, b)}
        assert [one.number for one in study.best()] == [i for i in range(len(told)) if i not in beaten]
    with opened(fresh(empty), directions=("maximize",), trials=len(told), max_concurrent=9) as study:
        assert study.best() == []
        for number, (value, _) in enumerate(told):
            study.ask()
            study.tell(number, "complete", value)
        largest = max(value for value, _ in told)  # of equals the earliest
        assert [one.number for one in study.best()] == [[value for value, _ in told].index(largest)]


def test_the_choice_that_decides_is_the_important_one(url: str) -> None:
    with opened(url, directions=("minimize", "maximize"), trials=25, max_concurrent=1) as study:
        while not study.finished():
            asked = study.ask()
            study.tell(asked.number, "complete", (0.0, -abs(math.log10(asked.params["lr"]) + 2)))  # type: ignore[arg-type]
        found = study.importances(objective=1)
        assert next(iter(found)) == "lr"
        assert sum(found.values()) == pytest.approx(1.0)
        assert study.importances() == {}  # of an objective that never changes
        with pytest.raises(TuneError, match="no objective 2"):
            study.importances(2)


def with_another_choice() -> Space:
    space = small()
    space.integer("extra", 1, 2)
    return space


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 8}, "its seed changed from 7 to 8"),
        ({"max_concurrent": 6}, "its max_concurrent changed from 3 to 6"),
        ({"directions": ("maximize",)}, "its directions changed from minimize to maximize"),
        ({"sampler": "tpe"}, "its sampler changed from random to tpe"),
        ({"pruner": {**ASHA, "reduction_factor": 3}}, "its pruner .* reduction_factor=2 to asha .*factor=3"),
        ({"space": small(high=0.5)}, r"'lr' of its space changed from floats .* high=0.1 .* to floats .* high=0.5"),
        ({"space": with_another_choice()}, "its space did not have 'extra'"),
        ({"space": small(most=0.3)}, "the constraints of its space changed"),
        ({"name": "other name"}, "no study 'other name' to resume"),
        ({"sampler": "cmaes", "directions": ("minimize", "minimize")}, "takes one objective, not 2"),
    ],
)
def test_a_study_that_is_defined_otherwise_is_not_resumed(url: str, changed: dict[str, Any], said: str) -> None:
    with opened(url) as study:
        study.ask()
        study.ask()
        study.tell(1, "failed")
    with pytest.raises(TuneError, match=r"'digits' exists in sqlite:.*1 of 2 trials ended.*--resume"):
        opened(url)
    with pytest.raises(TuneError, match=said):
        opened(url, **{"resume": True, **changed})
    with opened(url, resume=True, trials=99) as study:  # more trials are no other study
        assert study.goal == 99


def test_a_definition_of_format_1_which_has_a_window_is_read(url: str) -> None:
    opened(url).close()
    database = sqlite3.connect(url.removeprefix("sqlite:///"))
    (text,) = database.execute("SELECT value_json FROM study_system_attributes WHERE study_id = 2").fetchone()
    old = json.loads(text)
    assert old.pop("max_concurrent") == WINDOW + 1
    database.execute(
        "UPDATE study_system_attributes SET value_json = ? WHERE study_id = 2", [json.dumps({**old, "window": WINDOW})]
    )
    database.commit()
    opened(url, resume=True).close()
    with pytest.raises(TuneError, match="max_concurrent changed from 3 to 4"):
        opened(url, resume=True, max_concurrent=WINDOW + 2)
