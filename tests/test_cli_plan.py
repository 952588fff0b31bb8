"""`weft plan` and `weft calibrate` as a user types them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.cli import main
from weft.cli.output import console
from weft.hardware.machine import Machine
from weft.hardware.presets import preset

MODEL = """
import torch
from torch import nn

def build():
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return net, torch.zeros(32, 64), lambda y, batch: y.square().mean()

def wrong():
    return 3
"""


Weft = Callable[..., tuple[int, str, str]]


@pytest.fixture
def weft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Weft]:
    """The program, in this process, as if it was started in the folder of the test, with a model of the user's own."""
    (tmp_path / "own.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "width", 200)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", *words])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    yield run
    sys.modules.pop("own", None)


def test_a_model_of_the_users_own_is_planned_saved_and_loaded_and_written_as_a_page(tmp_path: Path, weft: Weft) -> None:
    ways = ("--devices", "4", "--machine", "a100")
    code, out, err = weft("plan", "own:build", *ways, "--save", "plan.json", "--time-limit", "9")
    assert code == 0, err
    for word in ("Sequential on 4 x A100", "data parallel", "fully sharded", "expert", "can be run", "plan.json"):
        assert word in out
    code, out, err = weft("plan", "own.py:build", *ways, "--from-plan", "plan.json", "--json")
    assert code == 0, err
    found, saved = json.loads(out), json.loads((tmp_path / "plan.json").read_text())
    assert (found["splits"], found["reasons"]) == (saved["splits"], [])
    words = ("plan", "own:build", *ways, "--from-plan", "plan.json", "--html")
    code, out, err = weft(*words, "plan.html")
    assert (code, "written to plan.html" in out) == (0, True), err
    assert (tmp_path / "plan.html").read_text().lower().startswith("<!doctype html>")
    code, out, err = weft(*words, "none/plan.html")
    assert (code, out) == (2, "")
    assert "cannot write 'none/plan.html'" in err


def test_a_model_of_transformers_is_planned_from_its_configuration(tmp_path: Path, weft: Weft) -> None:
    small = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 96, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(small))
    settings = ("--devices", "2", "--batch", "4", "--length", "16", "--constrain", "lm_head=n", "--json")
    code, out, err = weft("plan", "config.json", *settings)
    assert code == 0, err
    found = json.loads(out)
    assert found["model"] == "GPT2LMHeadModel"
    assert set(found["splits"]["linear"]) <= {"-", "n"}


def test_mistakes_are_told_in_one_line(tmp_path: Path, weft: Weft) -> None:
    (tmp_path / "machine.json").write_text('{"name": "mine", "device": {"peak": {"float32": 1e12}}}')
    cases = {
        ("plan", "own:build", "--devices", "0"): "at least 1 device, not 0",
        ("plan", "own:wrong", "--devices", "2"): "must return (model, batch)",
        ("plan", "gpt3", "--devices", "2"): "'gpt3' is no model that transformers has",
        ("plan", "own:build", "--devices", "2", "--machine", "machine.json"): "machine.json",
        ("plan", "own:build", "--devices", "2", "--memory", "1KiB"): "no plan fits on 2 devices",
        ("plan", "own:build", "--devices", "2", "--constrain", "0"): "--constrain takes a module",
        ("plan", "own:build", "--devices", "2", "--time-limit", "-1"): "greater than or equal to 0",
        ("plan", "own:build", "--devices", "2", "--memry", "1KiB"): "unknown option '--memry'",
        ("plan", "own:build", "--devices", "2", "--keep", "0=n"): "'--keep' is now '--constrain'",
        ("plan", "own:build", "--devices", "2", "--data.path=x"): "'--data.path=x' is a setting of a config.toml",
    }
    for words, message in cases.items():
        code, out, err = weft(*words)
        assert (code, len(err.strip().splitlines())) == (2, 1), (words, out, err)
        assert message in err


def test_this_machine_is_measured_and_planned_for(tmp_path: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, bool]] = []

    def measured(device: str, devices: int, quick: bool) -> Machine:  # what it measures is tested beside it
        asked.append((device, devices, quick))
        return preset("cpu")

    monkeypatch.setattr("weft.plan.calibrate.calibrate", measured)
    code, out, err = weft("calibrate", "here.json", "--device", "cpu", "--devices", "2", "--quick")
    assert (code, asked, "GFLOP/s" in out) == (0, [("cpu", 2, True)], True), err
    code, out, err = weft("plan", "own:build", "--devices", "2", "--machine", "here.json", "--json")
    assert code == 0, err
    assert json.loads(out)["cost"]["step"] > 0


def test_a_supernet_is_cut_into_stages_as_the_settings_of_its_config_say(
    tmp_path: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.plan.chain.CAPTURED", 1)  # of the layers that this subnet lacks, no time is known
    (tmp_path / "run.toml").write_text('supernet = "digits-mlp"\ndata = "digits"\n[train]\nsteps = 10\n')
    words = ("plan", "run.toml", "--machine", "cpu")
    code, out, err = weft(*words, "--devices", "2", "--train.batch_size", "16")
    assert code == 0, err
    assert "weft.train(stages=2, cut=[" in out
    one, many = (
        json.loads(weft(*words, "--devices", "3", "--json", "--train.batch_size", count)[1]) for count in ("16", "512")
    )
    assert [len(one[name]) for name in ("cut", "seconds", "memory")] == [2, 3, 3]
    assert sum(many["seconds"]) > sum(one["seconds"])
    for settings, message in (
        (("--devices", "99"), "stages, not 99"),
        (("--devices", "2", "--data.source=text", "--data.path", "none.txt"), "none.txt"),
    ):
        code, _, err = weft(*words, *settings)
        assert code == 2
        assert message in err
