"""`weft tune`: a study from a config, on the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.cli import main
from weft.cli.tune import Subnets, make_study, read_study, space_of, tune_arguments
from weft.errors import ConfigError
from weft.tune import StudyConfig, StudyExecution
from weft.utils.rng import torch_seeded
from weft.zoo import digits_mlp

EXAMPLE = Path(__file__).parents[2] / "examples" / "tune.toml"
Weft = Callable[..., Any]


@pytest.fixture
def weft_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Weft:
    """Runs the program in an empty folder; gives its exit code, what it printed, and its errors."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["weft", *words])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_the_example_runs_prints_json_and_goes_on_where_it_ended(weft_command: Weft, tmp_path: Path) -> None:
    config = str(shutil.copy(EXAMPLE, tmp_path / "digits.toml"))
    shutil.copy(EXAMPLE.with_name("tuned_net.py"), tmp_path)
    short = ["--recipe.steps=6", "--recipe.report_every=3", "--study.max_concurrent=2", "--study.jobs_per_device=1"]
    code, out, err = weft_command("tune", config, *short, "--study.trials=2", "--json")
    assert code == 0, err
    first = json.loads(out)
    assert [one["state"] for one in first["trials"]] == ["complete", "complete"]
    assert first["objectives"] == {"accuracy": "maximize"}
    best = max(first["trials"], key=lambda one: one["values"]["accuracy"])
    assert first["best"] == [best]
    code, _, err = weft_command("tune", config, *short, "--study.trials=3")
    assert code == 2
    assert "--resume" in err
    code, out, _ = weft_command("tune", config, *short, "--study.trials=3", "--resume")
    assert code == 0
    assert "what mattered for accuracy" in out
    assert "where the time of the trials went" in out
    assert "optuna-dashboard sqlite:///" in out
    saved = json.loads((tmp_path / "runs" / "digits" / "results" / "study.json").read_text())
    assert saved["trials"][:2] == first["trials"]
    assert len(saved["trials"]) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"objective": None}, "the config has neither"),
        ({"recipe": {"model": "m:f"}}, "the config has both"),
        ({"study": {"trails": 3}}, "unknown key 'study.trails'; did you mean 'study.trials'?"),
        ({"objective": None, "recipe": {"model": "m:f", "warmup": 3}}, "'recipe.warmup_steps'"),
        ({"study": {"workers": 3}}, "'study.jobs_per_device'"),
        ({"runs": "here"}, "'study.folder'"),
        ({"study": {"trials": "many"}}, "'study.trials' must be int, not str"),
        ({"space": {"x": {"low": 1, "high": 4}}}, "add step = 1 for whole numbers, or write 1.0"),
        ({"space": {"x": {"low": 1.0, "high": 4.0, "step": 2}}}, "whole low, high and step"),
        ({"space": {"x": {"low": 4.0, "high": 1.0}}}, "space.x: "),
        ({"supernet": "digits-mlp"}, "a supernet needs a [recipe]"),
    ],
)
def test_a_mistake_in_a_config_is_told_in_one_line(change: dict[str, Any], words: str) -> None:
    values: dict[str, Any] = {"objective": "m:f", "space": {"x": [1, 2]}, **change}
    with pytest.raises(ConfigError) as caught:
        space_of(make_study({key: value for key, value in values.items() if value is not None}))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_would_fail_every_trial_is_told_in_one_line_before_anything_runs(
    weft_command: Weft, tmp_path: Path
) -> None:
    (tmp_path / "s.toml").write_text(
        'supernet = "digits-mlp"\n[study]\nmaximize = "accuracy"\ntrials = 2\n'
        "[space]\nlr = {low = 1e-4, high = 1e-1, log = true}\n[recipe]\nsteps = 10\n"
    )
    code, out, err = weft_command("tune", "s.toml", "--recipe.optimizer=lion")
    assert (code, out) == (2, "")
    assert "lion" in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


def test_a_study_whose_trials_all_failed_is_printed_and_exits_1_with_one_line(
    weft_command: Weft, tmp_path: Path
) -> None:
    config = (
        'objective = "objectives:act"\n[study]\nname = "f"\ntrials = 2\nminimize = "v"\njobs_per_device = 1\n'
        '[space]\nwhat = ["{}"]\nx = {{low = 0.0, high = 1.0}}\n'
    )
    (tmp_path / "f.toml").write_text(config.format("failing"))
    code, out, err = weft_command("tune", "f.toml", "--json")
    assert code == 1
    assert err.splitlines()[-1] == "error: all 2 trials of 'f' failed; the last: ValueError: the objective is wrong"
    assert [one["state"] for one in json.loads(out)["trials"]] == ["failed", "failed"]
    (tmp_path / "f.toml").write_text(config.format('failing", "parabola'))
    code, out, err = weft_command("tune", "f.toml", "--study.name=some", "--study.trials=8")
    assert code == 0, err
    assert " failed" in out


@pytest.mark.long
def test_a_study_on_ray_whose_workers_die_prints_json_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "d.toml").write_text(
        'objective = "objectives:act"\n[study]\nname = "d"\ntrials = 2\nminimize = "v"\nmax_concurrent = 2\n'
        'max_retries = 0\nexecutor = "ray"\n[space]\nwhat = ["doomed"]\nx = {low = 0.0, high = 1.0}\n'
    )
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short:  # sockets have short names
        ray = {"RAY_TMPDIR": short, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        path = os.pathsep.join([str(Path(__file__).parent), *(entry for entry in sys.path if entry)])
        done = subprocess.run(
            [sys.executable, "-m", "weft.cli", "tune", "d.toml", "--json"],
            cwd=tmp_path,
            env={**os.environ, **ray, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 1, done.stderr
    assert [one["state"] for one in json.loads(done.stdout)["trials"]] == ["failed", "failed"]
    assert "A worker died" in done.stderr


def test_choices_are_written_as_lists_and_ranges() -> None:
    written = {
        "lr": {"low": 1e-4, "high": 1, "log": True},
        "depth": {"low": 1, "high": 7, "step": 2},
        "width": [64, 16],
        "kind": ["a", "b"],
        "on": [True, False],
    }
    space = space_of(make_study({"objective": "m:f", "space": written}, ["--space.width=[8,16,32]"]))
    assert {name: choice.to_json() for name, choice in space.choices.items()} == {
        "lr": {"kind": "floats", "low": 1e-4, "high": 1.0, "log": True},
        "depth": {"kind": "integers", "values": [1, 3, 5, 7], "ordered": True},
        "width": {"kind": "integers", "values": [8, 16, 32], "ordered": True},
        "kind": {"kind": "categorical", "options": ["a", "b"]},
        "on": {"kind": "categorical", "options": [True, False]},
    }


def test_a_supernet_puts_its_choices_before_the_others_and_a_trial_is_its_subnet_freshly_initialised(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        'supernet = "digits-mlp"\n[study]\nmaximize = "accuracy"\n'
        "[space]\nlr = {low = 1e-4, high = 1e-1, log = true}\n[recipe]\nsteps = 10\n"
    )
    study = read_study(path)
    recipe, space, config, execution = tune_arguments(study, tmp_path)
    assert study.study.name == "s"
    assert (config, execution) == (StudyConfig(maximize="accuracy"), StudyExecution())
    chain = digits_mlp()
    assert list(space.choices) == [*chain.space.choices, "lr"]
    assert recipe.objectives == ("accuracy",)

    def weights(params: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
        with torch_seeded(seed):
            module = Subnets(digits_mlp)(params)
        assert module.training
        return dict(module.state_dict())

    picks = [{**space.first().values}, {**space.last().values}]
    for params in picks:
        one, again, other = weights(params, 1), weights(params, 1), weights(params, 2)
        assert one.keys() == again.keys()
        assert all(torch.equal(one[name], again[name]) for name in one)
        assert any(not torch.equal(one[name], other[name]) for name in one)
    first, last = ({name: one.shape for name, one in weights(params, 1).items()} for params in picks)
    assert first != last
