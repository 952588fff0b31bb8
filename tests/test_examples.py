"""The examples: each is run as a user would run it, and says what its docstring promises."""

from __future__ import annotations

import json
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import weft

from weft.runs import list_runs

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(folder: Path, *arguments: str) -> str:
    one_core = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=one_core, capture_output=True, text=True)
    # How long stages will wait is foreseen from measured times: that it is warned of is no matter of the example.
    rows = re.sub(r"WARNING +every subnet uses .*?with another\s+result\s*\n", "", done.stderr, flags=re.DOTALL)
    assert (done.returncode, rows) == (0, "")
    return done.stdout


@pytest.fixture
def lines(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> list[str]:
    """What an example prints, without a warning, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{request.param}.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert (printed.err, [record for record in caplog.records if record.levelno >= logging.WARNING]) == ("", [])
    return list(printed.out.splitlines())


def test_every_example_is_run_here() -> None:
    found = {path.stem for path in EXAMPLES.iterdir() if not path.name.startswith(("_", "."))}
    elsewhere = {"tune", "tuned_net"}  # test_tune_cli
    assert found == {"own_supernet", "text", "resume", "consistency", "own_config", "gpt"} | elsewhere


@pytest.mark.parametrize("lines", ["own_supernet"], indirect=True)
def test_a_supernet_of_ones_own_is_trained_searched_and_extracted(lines: list[str], tmp_path: Path) -> None:
    assert lines[0].startswith("81 subnets, trained in runs/run-")
    front = [re.fullmatch(r"accuracy (0\.\d{4}|1\.0000)  flops +([\d,]+)  (.*)", line) for line in lines[1:-1]]
    assert len(front) >= 1
    points = [(float(found[1]), int(found[2].replace(",", ""))) for found in front if found]
    assert len(points) == len(front)
    assert points == sorted(points, reverse=True)
    last = re.fullmatch(r"extracted: Sequential with 6 layers, test accuracy (\d\.\d\d)", lines[-1])
    assert last is not None
    assert float(last[1]) > 0.9
    assert [run.state for run in list_runs(tmp_path / "runs")] == ["finished"]


@pytest.mark.parametrize("lines", ["text"], indirect=True)
def test_a_model_of_text_is_better_than_guessing_and_than_its_smallest_subnet(lines: list[str]) -> None:
    bits = {line.split()[0]: float(line.split()[1]) for line in lines[:3]}
    assert bits["best"] < bits["smallest"] < bits["guessing"]
    assert lines[1].endswith("skip skip skip")
    assert lines[3].startswith("it writes: 'The ")


def test_a_run_that_was_stopped_and_resumed_has_the_fingerprint_of_an_undisturbed_one(tmp_path: Path) -> None:
    lines = run(tmp_path, str(EXAMPLES / "resume.py")).splitlines()  # a process of its own, since it gets a signal
    whole, stopped, resumed, verdict = (line.split(maxsplit=1) for line in lines)
    assert re.fullmatch("[0-9a-f]{64}", whole[1])
    assert resumed[1] == whole[1]
    assert stopped[1] == "after 20 of 40 steps, with a checkpoint"
    assert verdict[1].endswith("yes")


@pytest.mark.parametrize("lines", ["consistency"], indirect=True)
def test_consistencies_differ_and_delayed_by_nothing_is_exact(lines: list[str]) -> None:
    rows = {line[:15].strip(): line[15:].split() for line in lines}
    assert list(rows) == ["exact", "delayed(0)", "delayed(3)", "lagged(4)", "bounded(4, 3)"]
    assert rows["exact"] == rows["delayed(0)"]
    assert len({words[-1] for words in rows.values()}) == 4
    assert all(float(words[1]) < 2.0 for words in rows.values())


def test_a_config_with_ones_own_code_goes_through_every_verb_from_anywhere(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "own_config", tmp_path / "code", ignore=shutil.ignore_patterns("__pycache__"))

    def verb(*arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = weft(*arguments, "--json", cwd=tmp_path).json
        return found

    assert verb("train", "code/config.toml", "--train.steps=100")["run"] == "runs/spirals"
    front = verb("search", "runs/spirals")["front"]
    assert front["objectives"] == [{"name": "accuracy", "maximize": True}, {"name": "parameters", "maximize": False}]
    assert all(set(member["scores"]) >= {"accuracy", "confidence", "loss"} for member in front["members"])
    files = verb("export", "code/config.toml")
    assert sorted(files) == ["json", "safetensors", "torch"]
    assert all((tmp_path / path).is_file() for path in files.values())


@pytest.mark.long
def test_a_language_model_learns_any_text_on_two_stages_as_on_one(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("To be, or not to be, that is the question.\n" * 60)
    (tmp_path / "elsewhere").mkdir()
    small = ["--supernet.options", "{layers=2, heads=2, width=16, dropout=0.1}", "--train.batch_size", "8"]
    small += ["--data.options", "{context=16, stride=1, validation_stride=16, split=[0.9, 0.1]}"]
    small += ["--train.steps=20", "--optimizer.warmup_steps=2", "--run.validation=20", "--execution.threads=1"]

    def weft(folder: Path, verb: str, target: str, *arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run(folder, "-m", "weft.cli", verb, target, *arguments, "--json"))
        return found

    config = str(EXAMPLES / "gpt.toml")
    cut = weft(tmp_path, "train", config, "--data.path", "input.txt", "--stages", "2", *small)
    whole = weft(tmp_path, "train", config, "--data.path", "input.txt", "--run", "whole", *small)
    assert cut["run"] == "runs/gpt"
    assert cut["fingerprint"] == whole["fingerprint"]
    events = [json.loads(line) for line in (tmp_path / "runs/whole/events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert losses[-1] < losses[0]
    assert any(event["event"] == "validation" for event in events)
    # The run knows where its text lies, and the size of its vocabulary with it.
    files = weft(
        tmp_path / "elsewhere", "export", "../runs/whole", "--export.subnet", "{}", "--export.formats", "torch"
    )
    assert Path(files["torch"]).is_file()
