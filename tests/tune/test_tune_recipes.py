"""Studies of recipes: candidates on small devices, alone, split and fused, with the results of one large device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import objectives
import pytest

import weft
from weft.runs import Events
from weft.tune import Recipe, StudyResult
from weft.tune.fit.estimator import EstimatorPool


def study(folder: Path, name: str, widths: list[int], recipe: Mapping[str, Any], **asked: Any) -> StudyResult:
    space = weft.Space()
    space.integer("width", [16, 64, 192, 512])
    space.real("lr", 1e-3, 1e-1, log=True)
    fields: dict[str, Any] = {"model": objectives.perceptron, "batch_size": 64, **recipe}
    made = Recipe(data=weft.data.digits, metrics={"accuracy": weft.accuracy}, objectives=("loss", "accuracy"), **fields)
    enqueued = [{"width": width, "lr": 0.01 + 0.001 * at} for at, width in enumerate(widths)]
    wanted: dict[str, Any] = {"trials": len(widths), "enqueue": enqueued, "sampler": "random", **asked}
    return weft.tune(made, space, minimize="loss", maximize="accuracy", name=name, folder=folder, **wanted)


@pytest.mark.long
def test_candidates_that_fit_one_device_two_or_none_run_side_by_side_with_the_results_of_a_large_one(
    tmp_path: Path,
) -> None:
    widths, recipe = [512, 192, 64], {"steps": 6}
    small = study(tmp_path, "small", widths, recipe, devices=["cpu=1400KiB", "cpu=1400KiB"])
    large = study(tmp_path, "large", widths, recipe, jobs_per_device=1)
    assert [one.state for one in small.trials] == ["failed", "complete", "complete"]
    assert "the candidate fits nowhere, with 2 devices of 1.4 MiB" in small.trials[0].info["error"]
    assert small.trials[0].info["refused"] is True
    assert [one.info["fit"]["strategy"] for one in small.trials[1:]] == ["split", "whole"]
    assert small.trials[1].info["devices"] == ["local/cpu", "local/cpu"]
    assert [one.info["attempts"] for one in small.trials[1:]] == [1, 1]
    for here, there in zip(small.trials[1:], large.trials[1:], strict=True):
        assert here.values == pytest.approx(there.values, rel=1e-4)
        assert here.reports.keys() == there.reports.keys() == {6}
        assert 0 < here.info["peak"] <= 1400 * 1024


def test_trials_of_one_shape_train_as_one_with_the_results_that_they_have_alone(tmp_path: Path) -> None:
    widths, recipe = [16, 64, 16], {"steps": 4, "report_every": 2}
    fused = study(tmp_path, "fused", widths, recipe, fuse=4, max_concurrent=4)
    alone = study(tmp_path, "alone", widths, recipe, max_concurrent=4, jobs_per_device=1)
    assert [one.info["fused"] for one in fused.trials] == [2, 1, 2]
    placed = [e["trials"] for e in Events(tmp_path / "fused" / "events.jsonl").read() if e["event"] == "placed"]
    assert sorted(placed) == [[0, 2], [1]]
    for here, there in zip(fused.trials, alone.trials, strict=True):
        assert here.state == there.state == "complete"
        assert here.values == pytest.approx(there.values, rel=1e-5)


def test_fused_trials_find_in_a_cache_of_their_model_what_they_put_there_themselves(tmp_path: Path) -> None:
    recipe = {"model": objectives.remembers, "steps": 4}
    found = study(tmp_path, "fused", [16, 16], recipe, fuse=2, max_concurrent=2, devices=["cpu=64MiB"])
    assert [(one.state, one.info["fused"]) for one in found.trials] == [("complete", 2)] * 2


def test_an_estimate_that_is_too_low_kills_only_its_own_trial_which_is_tried_again_with_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = EstimatorPool.completed

    def low(foresight: EstimatorPool) -> Any:
        return [(number, replace(need, memory=need.memory // 2)) for number, need in true(foresight)]

    monkeypatch.setattr(EstimatorPool, "completed", low)
    widths, recipe = [64, 16], {"steps": 4}
    found = study(tmp_path, "low", widths, recipe, devices=["cpu=1MiB"], fuse=1)
    assert [one.state for one in found.trials] == ["complete", "complete"]
    events = list(Events(tmp_path / "low" / "events.jsonl").read())
    exceeded = [event for event in events if event["event"] == "exceeded"]
    assert {event["trials"][0] for event in exceeded} == {0, 1}
    for number in (0, 1):
        given = [event["memory"] for event in events if event["event"] == "placed" and event["trials"] == [number]]
        assert len(given) >= 2
        assert given[-1] is None or given[-1] > given[0]
