"""The resume contract of a study: what must be equal when it is resumed, and what may change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import objectives
import pytest

import weft
from weft.errors import TuneError
from weft.tune import Recipe
from weft.tune.config import StudyConfig, check_resume, resume_contract
from weft.tune.jobs import Device
from weft.tune.recipe import OLD_FIELDS
from weft.tune.training.run_job import StudySpec

RECIPE = Recipe(
    model=objectives.perceptron,
    data=objectives.few,
    steps=2,
    batch_size=8,
    optimizer_options={"lr": 0.1, "betas": (0.9, 0.99)},
)


OLD = {now: before for before, now in OLD_FIELDS.items()}


def space(**more: Any) -> weft.Space:
    made = weft.Space()
    width = made.integer("width", [8, 16])
    made.real("lr", 1e-3, 1e-1)
    for name, options in more.items():
        made.categorical(name, options, when=width == 8 if name == "batch_size" else None)
    return made


def contract(recipe: Recipe = RECIPE, made: weft.Space | None = None, device: str = "cpu", threads: int = 1) -> Any:
    found = resume_contract(
        StudySpec(recipe, ("loss",), 0), StudyConfig(), [Device(device, None)], threads, made or space()
    )
    return json.loads(json.dumps(found))  # as a manifest gives it back


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 3}, "recipe.steps: it was 2, and is now 3"),
        ({"batch_size": 4}, "recipe.batch_size: it was 8, and is now 4"),
        ({"optimizer": "sgd"}, "recipe.optimizer: it was 'adamw', and is now 'sgd'"),
        (
            {"optimizer_options": {"lr": 0.1, "betas": (0.9, 0.9)}},
            r"recipe.optimizer_options: it was {'betas': \[0.9, 0.99\]}, and is",
        ),
        ({"precision": "bf16"}, "recipe.precision: it was 'fp32'"),
        ({"report_every": 1}, "recipe.report_every: it was None, and is now 1"),
        ({"seed": 1}, "recipe.seed"),
        ({"microbatch_batchnorm": True}, "recipe.microbatch_batchnorm"),
        ({"data": weft.data.digits}, "recipe.data: it was 'objectives:few', and is now 'weft:digits'"),
        ({"data": objectives.few()}, "recipe.data: .*is now 'few of 16 [+] 16 samples'"),
        ({"loss": weft.engine.losses.mean_squared_error}, "recipe.loss: it was 'weft:cross_entropy'"),
        ({"metrics": {"accuracy": weft.accuracy}}, "recipe.metrics"),
        (
            {"model": partial(objectives.perceptron, depth=2)},
            r"recipe.model: .*is now 'objectives:perceptron\(depth=2\)",
        ),
    ],
)
def test_another_recipe_is_refused_with_what_differs(change: Mapping[str, Any], said: str) -> None:
    other = replace(RECIPE, **change)
    before = {**contract(), "objective": contract(other)["objective"]}
    with pytest.raises(TuneError, match=f"'s' cannot be resumed with another {said}") as caught:
        check_resume("s", before, contract(other))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"checkpoint_every": 1}, {"cuda_graphs": False}, {"optimizer_options": {"lr": 9, "betas": (0.9, 0.99)}}]
)
def test_what_changes_no_result_may_change(change: Mapping[str, Any]) -> None:
    check_resume("s", contract(), contract(replace(RECIPE, **change)))


def test_a_field_that_the_space_chooses_in_every_trial_may_change_and_one_that_it_chooses_in_some_may_not() -> None:
    chosen = space(steps=[2, 4], batch_size=[4, 8])
    check_resume("s", contract(made=chosen), contract(replace(RECIPE, steps=9), chosen))
    with pytest.raises(TuneError, match=r"recipe\.batch_size"):
        check_resume("s", contract(made=chosen), contract(replace(RECIPE, batch_size=9), chosen))


def test_threads_count_on_a_cpu_alone() -> None:
    with pytest.raises(TuneError, match="another threads: it was 1, and is now 2; use another name"):
        check_resume("s", contract(), contract(threads=2))
    check_resume("s", contract(device="cuda:0"), contract(device="cuda:0", threads=2))


def test_what_an_older_weft_did_not_write_down_counts_as_equal() -> None:
    old = {name: value for name, value in contract().items() if name not in ("recipe", "threads")}
    check_resume("s", old, contract(replace(RECIPE, steps=3), threads=2))
    check_resume("s", {**contract(), "recipe": {"steps": 2}}, contract(replace(RECIPE, batch_size=4)))
    check_resume("s", None, contract())
    check_resume("s", {**contract(), "device_memory": None, "memory": 2**30}, {**contract(), "device_memory": 2**30})
    old = {OLD.get(name, name): value for name, value in contract()["recipe"].items()}
    check_resume("s", {**contract(), "recipe": old}, contract())
    with pytest.raises(TuneError, match=r"recipe\.report_every"):
        check_resume("s", {**contract(), "recipe": {**old, "report": 3}}, contract())


def test_a_study_is_not_resumed_with_another_recipe_and_is_with_more_trials_and_workers(tmp_path: Path) -> None:
    def study(recipe: Recipe, **asked: Any) -> weft.tune.StudyResult:
        wanted: dict[str, Any] = {"trials": 1, "sampler": "random", "name": "s", "folder": tmp_path, **asked}
        return weft.tune(recipe, space(), **wanted)

    first = study(RECIPE)
    with pytest.raises(TuneError, match=r"another recipe\.steps: it was 2, and is now 3"):
        study(replace(RECIPE, steps=3), trials=2, resume=True)
    found = study(RECIPE, trials=2, jobs_per_device=1, max_retries=0, timeout=99.0, resume=True)
    assert found.trials[0] == first.trials[0]
    assert [one.state for one in found.trials] == ["complete", "complete"]
