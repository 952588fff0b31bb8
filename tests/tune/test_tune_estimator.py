"""Estimates that are made in other processes: the same as those that are made here, whatever becomes of the process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import objectives
import pytest
import torch

import weft
from weft.tune import Recipe
from weft.tune.devices import processors
from weft.tune.fit.estimator import DeviceClass, EstimatorPool, Infeasible, find_requirements
from weft.tune.fit.fit import Requirements
from weft.tune.training.run_job import StudySpec

PLACE = DeviceClass(2 * 2**20, 1, "cpu", False)
ASKED = {0: {"width": 16}, 1: {"width": 192}, 2: {"width": 16, "lr": 0.1}, 3: {"width": 4096}}


def terms(**changed: Any) -> StudySpec:
    made: dict[str, Any] = {"model": objectives.perceptron, "data": weft.data.digits, "steps": 2, **changed}
    return StudySpec(Recipe(**made), ("loss",), 0)


def answers(foresight: EstimatorPool, many: int) -> dict[int, Requirements | Infeasible]:
    told: dict[int, Requirements | Infeasible] = {}
    until = time.monotonic() + 60
    while len(told) < many and time.monotonic() < until:
        told |= dict(foresight.completed())
        time.sleep(0.01)
    return told


@pytest.fixture(scope="module")
def here() -> dict[int, Requirements | Infeasible]:
    return {number: find_requirements(terms(), params, PLACE) for number, params in ASKED.items()}


def test_other_processes_give_the_needs_and_refusals_that_this_one_would(
    here: dict[int, Requirements | Infeasible],
) -> None:
    assert isinstance(here[3], Infeasible)
    assert "fits nowhere" in here[3].reason
    foresight = EstimatorPool(terms(), PLACE, processes=2)
    try:
        for number, params in ASKED.items():
            foresight.ask(number, params)
        assert foresight.open == ASKED
        assert len(foresight._estimators) == 2
        assert answers(foresight, 4) == here
        assert foresight.open == {}
    finally:
        foresight.close()


def test_however_many_are_asked_at_once_all_are_answered(here: dict[int, Requirements | Infeasible]) -> None:
    foresight = EstimatorPool(terms(), PLACE, processes=1)
    try:
        for number in range(200):  # more than a pipe can hold
            foresight.ask(number, {**ASKED[0], "lr": 1.0 / (1 + number), "note": "x" * 4096})
        found = answers(foresight, 200)
        assert len(found) == 200
        assert {need.memory for need in found.values() if isinstance(need, Requirements)} == {here[0].memory}  # type: ignore[union-attr]
    finally:
        foresight.close()


def test_what_a_process_that_is_killed_was_asked_is_answered_all_the_same(
    here: dict[int, Requirements | Infeasible],
) -> None:
    foresight = EstimatorPool(terms(), PLACE, processes=1)
    try:
        for number, params in ASKED.items():
            foresight.ask(number, params)
        foresight._estimators[0].process.kill()
        assert answers(foresight, 4) == here
        foresight.ask(4, {"width": 16})
        assert answers(foresight, 1) == {4: here[0]}
    finally:
        foresight.close()


def test_a_model_that_leaves_python_is_refused_and_its_process_goes_on(
    here: dict[int, Requirements | Infeasible],
) -> None:
    foresight = EstimatorPool(terms(model=objectives.quits), PLACE, processes=1)
    try:
        foresight.ask(0, {"width": 0})
        foresight.ask(1, ASKED[0])
        told = answers(foresight, 2)
        assert told == {0: Infeasible("SystemExit(3)"), 1: here[0]}
    finally:
        foresight.close()


def test_what_another_process_cannot_import_is_estimated_here(here: dict[int, Requirements | Infeasible]) -> None:
    def local(params: Mapping[str, Any]) -> torch.nn.Module:
        return objectives.perceptron(params)

    foresight = EstimatorPool(terms(model=local), PLACE, processes=2)
    foresight.ask(0, ASKED[0])
    assert foresight.open == {0: ASKED[0]}
    assert foresight.completed() == [(0, here[0])]


def test_those_like_one_that_is_known_need_not_wait_for_the_others() -> None:
    foresight = EstimatorPool(terms(), PLACE, processes=1)
    try:
        for number in range(40):
            foresight.ask(number, {"width": 8 + number % 20, "lr": 1.0 / (1 + number)})
        order: list[int] = []
        until = time.monotonic() + 60
        while len(order) < 40 and time.monotonic() < until:
            order += [number for number, _ in foresight.completed()]
            time.sleep(0.01)
        assert sorted(order) == list(range(40))
        assert order.index(20) < order.index(19)
    finally:
        foresight.close()


def test_where_memory_is_not_counted_no_process_starts() -> None:
    foresight = EstimatorPool(terms(), DeviceClass(None, 1, "cpu", False), processes=2)
    foresight.ask(0, ASKED[0])
    assert foresight._estimators == []
    assert [number for number, _ in foresight.completed()] == [0]


@pytest.mark.parametrize("kind", ["cpu", "h200"])
def test_a_model_whose_shapes_depend_on_data_has_a_device_to_itself(kind: str) -> None:
    place = DeviceClass(2**33, 1, kind, True)
    here = find_requirements(terms(model=objectives.experts), {}, place)
    assert isinstance(here, Requirements)
    assert (here.memory, here.fit, here.fusion_key) == (None, None, None)
    assert here.note.startswith("not estimated: the step cannot be traced without data: DynamicOutputShapeException")
    foresight = EstimatorPool(terms(model=objectives.experts), place, processes=1)
    try:
        foresight.ask(0, {})
        assert answers(foresight, 1) == {0: here}
    finally:
        foresight.close()


def test_a_model_that_cannot_be_built_is_its_trials_failure() -> None:
    def broken(params: Mapping[str, Any]) -> torch.nn.Module:
        raise RuntimeError("no such layer")

    refused = find_requirements(terms(model=broken), {}, PLACE)
    assert isinstance(refused, Infeasible)
    assert "no such layer" in refused.reason


def test_trials_that_were_not_estimated_train_and_say_so(tmp_path: Path) -> None:
    space = weft.Space()
    space.real("lr", 0.01, 0.1)
    recipe = terms(model=objectives.experts).objective
    study = weft.tune(recipe, space, trials=2, minimize="loss", devices=["cpu=500MiB"], name="s", root=tmp_path)
    for record in study.trials:
        assert record.state == "complete"
        assert record.info["estimate"].startswith("not estimated: the step cannot be traced without data")
    asked: dict[str, Any] = {"trials": 1, "minimize": "loss", "devices": ["cpu=32KiB"], "name": "t", "root": tmp_path}
    (record,) = weft.tune(recipe, space, **asked).trials
    assert (record.state, record.info["attempts"], record.info["alone"]) == ("failed", 1, True)
    assert "out of memory" in record.info["error"]
    assert "estimate" in record.info


def test_processors_are_on_no_more_cores_than_there_are() -> None:
    threads, cores = processors()
    assert threads == len(os.sched_getaffinity(0))
    assert 1 <= cores <= threads
