"""The runner of a study: the trials are the same whatever the timing, and nothing that a trial does ends the study."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import objectives
import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import weft
from weft.errors import SpaceError, TuneError
from weft.runs import Events
from weft.tune import Device, Recipe, StudyResult
from weft.tune.config import OLD_FIELDS
from weft.tune.executors import Ended, Event, Fit, Job, Lost, Reported, StudySpec
from weft.tune.fit.estimator import Requirements, architecture_key, fusion_groups
from weft.tune.jobs import PendingJob, StudyProgress
from weft.tune.training.run_job import run_job


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """As in a worker: what is imported is not looked through after every trial."""
    gc.freeze()
    yield
    gc.unfreeze()


class Shuffled:
    """An executor that runs jobs in this process, to the end at once, and reports them in a random order of jobs."""

    def __init__(self, spec: StudySpec, devices: int, seed: int, lose: float = 0.0) -> None:
        self.devices: Sequence[Device] = tuple(Device("cpu", None) for _ in range(devices))
        self.started: list[Job] = []
        self._spec, self._rng, self._lose = spec, np.random.default_rng(seed), lose
        self._open: dict[str, list[Event]] = {}
        self._owed: str | None = None

    def start(self, job: Job) -> None:
        self.started.append(job)
        events: list[Event] = []

        def ask(report: Reported) -> bool:
            events.append(report)
            return False

        run_job(job, self._spec, "cpu", 0, ask, events.append)
        if self._rng.random() < self._lose:
            events[-1:] = [Lost(job.id, "by chance")]
        self._open[job.id] = events

    def answer(self, job: str, trial: int, prune: bool) -> None:
        if prune:
            self._open[job] = [Ended(job, trial, "pruned")]

    def stop(self, job: str) -> None:
        self._open.pop(job, None)

    def poll(self, timeout: float) -> list[Event]:
        if not self._open:
            return []
        job = sorted(self._open)[self._rng.integers(len(self._open))]
        event = self._open[job].pop(0)
        if not self._open[job]:
            del self._open[job]
        return [event]

    def close(self) -> None:
        self._open.clear()


def run(
    folder: Path, what: str, trials: int = 9, devices: int = 3, seed: int = 0, lose: float = 0.0, **options: Any
) -> tuple[list[Any], list[Job]]:
    """How each trial ended, and the jobs that were started."""
    space = weft.Space()
    space.real("x", 0.0, 1.0)
    space.categorical("what", [what])
    executor = Shuffled(StudySpec(objectives.act, ("v",), 0), devices, seed, lose)
    given: dict[str, Any] = {"seed": 3, "max_concurrent": 4, "pruner": "median", "minimize": "v", **options}
    found = weft.tune(objectives.act, space, trials=trials, executor=executor, name="s", folder=folder, **given)
    trials_ = [(one.number, dict(one.params), one.state, one.values, dict(one.reports)) for one in found.trials]
    return trials_, executor.started


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    found, _ = run(tmp_path_factory.mktemp("one"), "parabola", devices=1)
    assert [one[0] for one in found] == list(range(9))
    assert {one[2] for one in found} == {"complete", "pruned"}
    assert all(values == ((params["x"] - 0.3) ** 2,) for _, params, state, values, _ in found if state == "complete")
    return found


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), devices=st.integers(1, 6), lose=st.sampled_from([0.0, 0.2]))
def test_trials_are_the_same_whatever_the_number_of_devices_the_order_of_events_and_losses(
    undisturbed: list[Any], seed: int, devices: int, lose: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run(Path(folder), "parabola", devices=devices, seed=seed, lose=lose, max_retries=50)[0] == undisturbed


def test_a_trial_whose_processes_keep_dying_is_failed_after_its_retries_on_any_of_the_devices(tmp_path: Path) -> None:
    found, started = run(tmp_path, "parabola", trials=2, devices=2, lose=1.0, max_retries=2)
    assert [one[2] for one in found] == ["failed", "failed"]
    assert len({job.id for job in started}) == len(started) == 6
    assert {job.devices for job in started} == {(0,), (1,)}


def test_an_out_of_memory_trial_is_tried_again_with_the_whole_device_and_then_failed(tmp_path: Path) -> None:
    for tries, state in ((1, "complete"), (2, "failed")):
        folder = tmp_path / str(tries)
        (folder / "s").mkdir(parents=True)
        (folder / "s" / ".tries").write_text(str(tries))
        found, started = run(folder, "greedy", trials=1, trial_memory=100)
        assert [job.memory for job in started] == [100, None]
        assert [one[2] for one in found] == [state]


def test_trials_are_fused_by_shape_within_a_block_and_never_beyond_what_a_device_holds() -> None:
    alike = {number: Requirements(10, fusion_key="a") for number in range(5)}
    assert fusion_groups(alike, 100) == [(0, 1, 2, 3, 4)]
    assert fusion_groups(alike, 50) == [(0, 1), (2, 3), (4,)]
    assert fusion_groups(alike, None) == [(0, 1, 2, 3, 4)]
    assert fusion_groups({**alike, 2: Requirements(10, fusion_key="b")}, 100) == [(0, 1, 3, 4), (2,)]
    assert fusion_groups({0: Requirements(10), 1: Requirements(10)}, 100) == [(0,), (1,)]


def test_what_a_split_trial_took_says_nothing_of_others() -> None:
    split = Fit("split", 4, 1, 2, 10, None, "")
    for many, fit, family in ((1, None, "alone"), (2, None, "fused"), (1, split, "split")):
        assert PendingJob({key: {} for key in range(many)}, Requirements(10, fit)).likeness()[1] == family


class SlowEstimate:
    """An EstimatorPool whose estimates are there at once, but for that of trial 2, which is the last."""

    def __init__(self, spec: StudySpec, devices: Any) -> None:
        self.open: dict[int, Mapping[str, Any]] = {}
        self._answered = 0

    def ask(self, number: int, params: Mapping[str, Any], after: Any = None) -> None:
        self.open[number] = params

    def completed(self) -> list[tuple[int, Requirements]]:
        known = [number for number in self.open if number != 2 or self._answered == 3]
        self._answered += len(known)
        return [(number, needs(number, self.open.pop(number))) for number in known]

    def close(self) -> None:
        pass


def rate(trial: weft.tune.Trial) -> float:
    return float(trial["lr"])


def needs(number: int, params: Mapping[str, Any]) -> Requirements:
    return Requirements(10 + number, fusion_key=f"of {params['width']}", architecture_key=architecture_key(params))


def test_trials_wait_for_those_of_their_shape_and_not_for_others_that_are_not_estimated_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.tune.runner.EstimatorPool", SlowEstimate)
    trials = [{"width": 8 if number % 2 else 16} for number in range(4)]
    executor = Shuffled(StudySpec(rate, ("v",), 0), 1, 0)
    options: dict[str, Any] = {"enqueue": trials, "fuse": 4, "trial_memory": 1000, "name": "s", "folder": tmp_path}
    weft.tune(rate, widths(8, 16), trials=4, minimize="v", executor=executor, **options)
    assert [job.trials for job in executor.started] == [(1, 3), (0, 2)]
    # The memory is that of the one that takes most.
    assert [job.memory for job in executor.started] == [needs(n, trials[n]).memory_of(2) for n in (3, 2)]


def widths(*options: int) -> weft.Space:
    space = weft.Space()
    space.categorical("width", list(options))
    space.real("lr", 0.0, 1.0)
    return space


WAVES = 2800 * 2**10
"""On one such device, `objectives.waves` fits only with activations on the host."""


class Patient(Shuffled):
    """One small device. Reports nothing until all trials were proposed, and notes how many jobs ran, and whether all
    trials were proposed, when each job started."""

    def __init__(self, spec: StudySpec, memory: int, trials: int) -> None:
        super().__init__(spec, 1, 0)
        self.devices = (Device("cpu", memory),)
        self.found: list[tuple[bool, int]] = []
        self._proposed, self._trials = 0, trials

    def see(self, progress: StudyProgress) -> None:
        self._proposed = len(progress.trials)

    def start(self, job: Job) -> None:
        self.found.append((self._proposed == self._trials, len(self._open)))
        super().start(job)

    def poll(self, timeout: float) -> list[Event]:
        return [] if self._proposed < self._trials else super().poll(timeout)


class Narrow(Patient):
    """Two such devices, on which a split takes more than was thought, and anything else where `all` is set."""

    all = False

    def __init__(self, spec: StudySpec, memory: int, trials: int) -> None:
        super().__init__(spec, memory, trials)
        self.devices *= 2

    def start(self, job: Job) -> None:
        fit = job.fit
        assert fit is not None
        if not (self.all or fit.strategy == "split"):
            super().start(job)
            return
        self.started.append(job)
        self._open[job.id] = [Ended(job.id, job.trials[0], "out-of-memory", error="too much", peak=2 * fit.memory)]


@cache
def local(model: Any) -> Any:
    """The same model, which no other process can import: it is estimated here, in order, and once."""
    return lambda params: model(params)


def run_recipe(
    folder: Path, model: Any, memory: int, trials: list[dict[str, Any]], kind: Any = Patient, **options: Any
) -> tuple[Any, Patient]:
    """The trials of a recipe with that model, as they ended, and what ran them."""
    space = widths(*sorted({one["width"] for one in trials}))
    recipe = Recipe(model=local(model), data=objectives.few, steps=2, batch_size=1)
    executor = kind(StudySpec(recipe, ("loss",), 0), memory, len(trials))
    folder.mkdir(exist_ok=True)
    given: dict[str, Any] = {"enqueue": trials, "name": "s", "folder": folder, "callback": executor.see, **options}
    return weft.tune(recipe, space, trials=len(trials), executor=executor, **given).trials, executor


def test_half_of_the_slots_stay_free_until_all_first_trials_are_estimated_and_then_the_largest_goes_first(
    tmp_path: Path,
) -> None:
    """Slots for two: the first trial starts at once, the second waits, the third is large and overtakes it."""
    trials = [{"width": width, "lr": 0.1} for width in (8, 8, 128)]
    found, executor = run_recipe(tmp_path, objectives.perceptron, 2**22, trials, jobs_per_device=2)
    assert [one.state for one in found] == ["complete"] * 3
    assert [job.trials for job in executor.started] == [(0,), (2,), (1,)]
    assert executor.found == [(False, 0), (True, 1), (True, 1)]


def test_trials_that_fit_only_with_activations_on_the_host_are_never_fused(tmp_path: Path) -> None:
    """Fused trials keep all that their forwards make: these would take thirty times what was estimated."""
    trials = [{"width": 1, "lr": lr} for lr in (0.1, 0.2)]
    found, executor = run_recipe(tmp_path, objectives.waves, WAVES, trials, fuse=2)
    assert [job.trials for job in executor.started] == [(0,), (1,)]  # each once: none was out of memory
    for one in found:
        assert (one.state, one.info["fit"]["strategy"]) == ("complete", "offload")
        assert one.info["fit"]["memory"] < WAVES / 32


@pytest.mark.parametrize("all", [False, True])
def test_a_split_trial_that_takes_more_than_a_device_has_is_offloaded_and_if_that_does_too_refused_with_the_figures(
    all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Narrow, "all", all)
    (one,), executor = run_recipe(tmp_path, objectives.waves, WAVES, [{"width": 1, "lr": 0.1}], Narrow)
    assert [job.fit.strategy for job in executor.started if job.fit] == ["split", "offload"]
    assert len({job.id for job in executor.started}) == 2
    if all:
        assert one.state == "failed"
        assert "fits nowhere, with 2 devices of" in one.info["error"]
        assert "with activations on the host, it took more than" in one.info["error"]
    else:
        assert (one.state, one.info["fit"]["strategy"], one.info["attempts"]) == ("complete", "offload", 2)
        assert one.info["fit"]["explanation"].startswith("split over 2 devices, it took more than")


def hidden(params: Mapping[str, Any]) -> nn.Module:
    width = int(params["width"])
    inner = [nn.Linear(width, params["hidden"]), nn.ReLU(), nn.Linear(params["hidden"], 10)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), *inner)


def test_derived_dimensions_are_read_in_trials_and_are_no_parameters_of_the_study(tmp_path: Path) -> None:
    space = weft.Space()
    width = space.integer("width", [2, 3])
    deep = space.integer("deep", 0, 1)
    inner = space.integer("inner", [5, 7], when=deep == 1)
    space.derive("hidden", 4 * width)
    space.derive("sometimes", 10 * inner)

    def read(trial: weft.tune.Trial) -> float:
        assert ("sometimes" in trial.params) == (trial["deep"] == 1)
        return float(trial["hidden"]) + float(trial.params.get("sometimes", 0))

    enqueue = [{"width": w, "deep": d} for w in (2, 3) for d in (0, 1)]
    found = quick(read, space, tmp_path, enqueue=enqueue)
    for record in found.trials:
        assert set(record.params) - {"inner"} == {"width", "deep"}
        assert record.values == (4 * record.params["width"] + 10 * record.params.get("inner", 0),), record.info


def test_a_derived_dimension_that_cannot_be_fails_its_trial_alone(tmp_path: Path) -> None:
    space = weft.Space()
    space.derive("part", 1 // space.integer("x", 0, 1))
    found = quick(objectives.act, space, tmp_path, trials=2, sampler="grid", max_concurrent=1)
    assert {one.params["x"]: one.state for one in found.trials} == {0: "failed", 1: "complete"}
    assert any("cannot evaluate '1 // x' with x=0" in one.info.get("error", "") for one in found.trials)


def quick(objective: Any, space: weft.Space, folder: Path, **options: Any) -> StudyResult:
    """A study whose trials run in this process."""
    given: dict[str, Any] = {"minimize": "loss", "trials": 4, "name": "s", "folder": folder, **options}
    executor = Shuffled(StudySpec(objective, ("loss",), 0), 1, 0)
    return weft.tune(objective, space, executor=executor, **given)


def _space() -> weft.Space:
    space = weft.Space()
    space.real("x", 0.0, 1.0)
    return space


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"minimize": ()}, "needs an objective"),
        ({"maximize": "v"}, "named twice"),
        ({"trials": 0}, "trials=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"fuse": 9}, "fuse=9 trials cannot be open at once with max_concurrent=8"),
        ({"trial_memory": "lots"}, "is not a size"),
        ({"executor": "rya"}, "did you mean 'ray'"),
        ({"space": weft.Space()}, "no choices"),
        ({"storage": "postgresql://nobody@localhost:1/none"}, "cannot be reached"),
        ({"sampler": "tpo"}, "did you mean 'tpe'"),
        ({"objective": 3}, "a Recipe or a function"),
        ({"max_concurrent": 0}, "max_concurrent=0"),
        ({"device_memory": "1GiB"}, "device_memory is not for a function: give trial_memory"),
        ({"trial": 3}, "did you mean 'trials'"),
        ({"config": {"run": "s"}}, "config is a StudyConfig"),
        *[({old: 1}, f"'{old}'.*{now.split()[0]}") for old, now in OLD_FIELDS.items()],
        ({"devices": 3}, "devices are names such as 'cpu' or 'cuda:0', not 3"),
        ({"devices": "mps"}, "trials do not run on 'mps'"),
        ({"devices": [Device("meta", None)]}, "trials do not run on 'meta'"),
        ({"enqueue": [{"y": 0.5}]}, "unknown name 'y'"),
        ({"threads": 0}, "threads=0"),
        ({"objective": lambda trial: 0.0}, "trials run in processes of their own"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_and_leaves_nothing(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    elsewhere = tmp_path / "study.db"
    asked: dict[str, Any] = {"objective": objectives.act, "space": _space(), "trials": 2, "minimize": "v"}
    asked |= {"name": "s", "folder": tmp_path / "runs", "storage": f"sqlite:///{elsewhere}", **change}
    with pytest.raises((TuneError, SpaceError), match=words) as caught:
        weft.tune(asked.pop("objective"), asked.pop("space"), **asked)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs" / "s").exists()
    if elsewhere.exists():
        assert optuna.get_all_study_names(asked["storage"]) == []


def test_a_recipe_may_leave_to_the_space_what_is_no_value_of_its_own(tmp_path: Path) -> None:
    space = weft.Space()
    space.derive("hidden", 2 * space.integer("width", [4, 8]))
    space.categorical("optimizer", ["sgd", "adam"])
    given: dict[str, Any] = {"optimizer": "chosen", "optimizer_options": {"lr": 0.1}, "steps": 2, "batch_size": 8}
    recipe = Recipe(model=hidden, data=objectives.few, **given)
    found = quick(recipe, space, tmp_path, trials=2, minimize=())
    assert [one.state for one in found.trials] == ["complete"] * 2
    assert {name for one in found.trials for name in one.params} == {"width", "optimizer"}
    with pytest.raises(TuneError, match="chosen"):
        quick(recipe, _space(), tmp_path, name="other")


def test_a_study_of_a_function_ends_with_its_best_trial_and_refuses_its_name_to_another(tmp_path: Path) -> None:
    def again(objective: Any = objectives.parabola, **change: Any) -> StudyResult:
        asked: dict[str, Any] = {"trials": 3, "minimize": "v", "name": "s", "folder": tmp_path, "max_concurrent": 2}
        return weft.tune(objective, _space(), **asked | change)

    found = again(jobs_per_device=1)
    best = min(found.trials, key=lambda one: (one.values or (9.0,))[0])
    assert found.best == best
    assert found.to_json()["best"][0]["params"] == dict(best.params)
    assert [event["event"] for event in Events(tmp_path / "s" / "events.jsonl").read()].count("ended") == 3
    assert weft.Run.open(tmp_path / "s").state() == "finished"
    with pytest.raises(TuneError, match="exists"):
        again()
    with pytest.raises(TuneError, match="another objective"):
        again(objective=objectives.act, resume=True)
    assert again(resume=True).trials == found.trials
