"""Estimates that are made in other processes: the same as those that are made here, whatever becomes of the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import objectives
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trials import until

import weft
from weft.tune import Recipe
from weft.tune.fit.estimator import (
    DeviceClass,
    EstimatorPool,
    Infeasible,
    MemoryCorrection,
    Requirements,
    find_requirements,
)
from weft.tune.training.run_job import StudySpec

DEVICES = DeviceClass(2 * 2**20, 1, "cpu", False)
ASKED = {0: {"width": 16}, 1: {"width": 192}, 2: {"width": 16, "lr": 0.1}, 3: {"width": 4096}}


def spec(**changed: Any) -> StudySpec:
    made: dict[str, Any] = {"model": objectives.perceptron, "data": weft.data.digits, "steps": 2, **changed}
    return StudySpec(Recipe(**made), ("loss",), 0)


@contextmanager
def pool(spec: StudySpec, processes: int) -> Iterator[EstimatorPool]:
    with closing(EstimatorPool(spec, DEVICES, processes=processes)) as made:
        yield made


def answers(estimators: EstimatorPool, asked: Mapping[int, Any]) -> dict[int, Requirements | Infeasible]:
    """Of these trials by number, in the order in which they came."""
    for number, params in asked.items():
        estimators.ask(number, params)
    return wait(estimators, len(asked))


def wait(estimators: EstimatorPool, many: int) -> dict[int, Requirements | Infeasible]:
    found: dict[int, Requirements | Infeasible] = {}

    def all_found() -> bool:
        found.update(estimators.completed())
        return len(found) == many

    until(all_found)
    return found


@pytest.fixture(scope="module")
def here() -> dict[int, Requirements | Infeasible]:
    """What this process finds."""
    return {number: find_requirements(spec(), params, DEVICES) for number, params in ASKED.items()}


def test_other_processes_find_the_requirements_and_refusals_that_this_one_would(
    here: dict[int, Requirements | Infeasible],
) -> None:
    assert isinstance(here[3], Infeasible)
    assert "fits nowhere" in here[3].reason
    before = set(active_children())
    with pool(spec(), 2) as estimators:
        for number, params in ASKED.items():
            estimators.ask(number, params)
        assert estimators.open == ASKED
        assert len(set(active_children()) - before) == 2
        assert wait(estimators, 4) == here
        assert estimators.open == {}


def test_what_a_process_that_is_killed_was_asked_is_answered_all_the_same(
    here: dict[int, Requirements | Infeasible],
) -> None:
    before = set(active_children())
    with pool(spec(), 1) as estimators:
        for number, params in ASKED.items():
            estimators.ask(number, params)
        (process,) = set(active_children()) - before
        process.kill()
        assert wait(estimators, 4) == here
        assert answers(estimators, {4: {"width": 16}}) == {4: here[0]}


def test_a_model_that_leaves_python_is_refused_and_its_process_goes_on(
    here: dict[int, Requirements | Infeasible],
) -> None:
    with pool(spec(model=objectives.quits), 1) as estimators:
        found = answers(estimators, {0: {"width": 0}, 1: ASKED[0]})
        assert found == {0: Infeasible("SystemExit(3)"), 1: here[0]}


def test_what_another_process_cannot_import_is_estimated_here(here: dict[int, Requirements | Infeasible]) -> None:
    def local(params: Mapping[str, Any]) -> torch.nn.Module:
        return objectives.perceptron(params)

    def broken(params: Mapping[str, Any]) -> torch.nn.Module:
        raise RuntimeError("no such layer")

    with pool(spec(model=local), 2) as estimators:
        estimators.ask(0, ASKED[0])
        assert estimators.open == {0: ASKED[0]}
        assert estimators.completed() == [(0, here[0])]
    refused = find_requirements(spec(model=broken), {}, DEVICES)
    assert isinstance(refused, Infeasible)
    assert "no such layer" in refused.reason


def test_however_many_are_asked_all_are_answered_and_those_of_a_known_architecture_need_not_wait() -> None:
    many = {
        n: {"width": 8 + n % 5, "lr": 1.0 / (1 + n), "note": "x" * 8192} for n in range(60)
    }  # more than a pipe holds
    with pool(spec(), 1) as estimators:
        order = list(answers(estimators, many))
    assert sorted(order) == list(many)
    assert order.index(5) < order.index(4)


def test_where_memory_is_not_counted_no_process_starts() -> None:
    before = active_children()
    estimators = EstimatorPool(spec(), DeviceClass(None, 1, "cpu", False), processes=2)
    assert list(answers(estimators, {0: ASKED[0]})) == [0]
    assert active_children() == before


@pytest.mark.parametrize("kind", ["cpu", "h200"])
def test_a_model_whose_shapes_depend_on_data_has_a_device_to_itself(kind: str) -> None:
    found = find_requirements(spec(model=objectives.experts), {}, DeviceClass(2**33, 1, kind, True))
    assert isinstance(found, Requirements)
    assert (found.memory, found.fit, found.fusion_key) == (None, None, None)
    assert found.note.startswith("not estimated: the step cannot be traced without data: DynamicOutputShapeException")


def test_trials_that_were_not_estimated_train_and_say_so(tmp_path: Path) -> None:
    space = weft.Space()
    space.real("lr", 0.01, 0.1)
    recipe = spec(model=objectives.experts).objective
    study = weft.tune(recipe, space, trials=2, minimize="loss", devices=["cpu=500MiB"], name="s", folder=tmp_path)
    for record in study.trials:
        assert record.state == "complete"
        assert record.info["estimate"].startswith("not estimated: the step cannot be traced without data")
    asked: dict[str, Any] = {"trials": 1, "minimize": "loss", "devices": ["cpu=32KiB"], "name": "t", "folder": tmp_path}
    (record,) = weft.tune(recipe, space, **asked).trials
    assert (record.state, record.info["attempts"], record.info["alone"]) == ("failed", 1, True)
    assert "out of memory" in record.info["error"]
    assert "estimate" in record.info


# -- corrections of estimates: never below what was seen, and never below the estimate


def test_one_that_exceeded_is_tried_again_with_more_each_time_and_one_that_took_less_lowers_nothing() -> None:
    correction = MemoryCorrection()
    correction.on_finished(1000, 500, "s", "less")
    assert [correction.apply(1000, shape, "less") for shape in ("s", "new")] == [1000, 1000]
    assert correction.on_oom(100, 100, None, "t", "f") == 125
    assert correction.apply(100, "t", "other") == 125
    assert correction.on_oom(100, 125, 400, "t", "f") == 400
    assert min(correction.apply(100, shape, "f") for shape in ("t", "new")) >= 400


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=20))
def test_no_shape_or_family_is_given_less_than_it_was_seen_to_take(seen: list[tuple[int, int]]) -> None:
    correction = MemoryCorrection()
    for estimate, peak in seen:
        correction.on_finished(estimate, peak, "s", "f")
    estimate, peak = seen[-1]
    assert correction.apply(estimate, "s", "other") >= max(peak for _, peak in seen)
    assert correction.apply(estimate, "new", "f") >= peak
