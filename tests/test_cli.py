"""The command line: what each verb does and prints, and how it answers a mistake: with one line and exit code 2."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import weft

from weft.cli import main
from weft.cli.app import app
from weft.runs import Run

CONFIG = """
supernet = "cli_net:build"
data = "cli_net:load"
[train]
steps = 40
batch_size = 8
augment = "cli_net:slowly"
[run]
checkpoint_every = 10
[execution]
threads = 1
[search]
budget = 6
"""

CODE = """
import os, time
from functools import partial
import torch
from torch import nn
from weft import Chain, Choice, Data, Shared, Space, Tensors

def build(width=6):
    space = Space()
    paths = {"one": partial(nn.Linear, width, width), "two": partial(nn.Linear, width, width), "skip": nn.Identity}
    blocks = [Choice(space, f"b{i}", paths) for i in range(2)]
    return Chain(Shared(partial(nn.Linear, 4, width), "stem"), *blocks, Shared(partial(nn.Linear, width, 3), "head"))

def load(samples=64):
    def part(seed):
        x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
        return Tensors(x=x, y=x[:, :3].argmax(-1))
    return Data("numbers", part(0), part(1), part(2))

def load_train_only():
    return {"x": torch.ones(16, 4), "y": torch.zeros(16, dtype=torch.long)}

def slowly(batch, draws):
    time.sleep(float(os.environ.get("CLI_PAUSE", "0")))
    return batch

calls = 0

def counted(outputs, batch):
    global calls
    calls += 1
    if str(calls) == os.environ.get("CLI_STOP"):
        raise KeyboardInterrupt
    return outputs.sum(), len(outputs)

def no_subnets():
    space = Space()
    block = Choice(space, "b", {"p": partial(nn.Linear, 4, 3), "q": partial(nn.Linear, 4, 3)})
    space.require((space.handle("b") == "p") & (space.handle("b") == "q"))
    return Chain(block)

def no_luck():
    raise LookupError("no luck")

def no_chain():
    return 3

class NoForward(nn.Module):
    def forward(self, x):
        raise RuntimeError("broken\\non two lines")

def no_forward():
    return Chain(Choice(Space(), "b", {"p": NoForward(), "q": NoForward()}))

def no_number(outputs, batch):
    return outputs.sum() * float("nan")

def no_loss(outputs, batch):
    return outputs.no_such_thing
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "weft.cli", *map(str, arguments)]


def write_project(folder: Path) -> Path:
    (folder / "c.toml").write_text(CONFIG)
    (folder / "cli_net.py").write_text(CODE)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder whose config was trained, searched and exported, and what its verbs gave; only to be read."""
    folder = write_project(tmp_path_factory.mktemp("trained"))
    results = {verb: weft(verb, "c.toml", "--json", cwd=folder).json for verb in ("train", "search", "export")}
    return folder, results


@pytest.fixture
def copied(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    shutil.copytree(trained[0], tmp_path / "copy")
    return tmp_path / "copy"


def test_a_config_is_trained_searched_and_exported(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, results = trained
    assert results["train"]["run"] == "runs/c"
    assert results["train"]["steps"] == 40
    assert re.fullmatch("[0-9a-f]{64}", results["train"]["fingerprint"])
    run = Run.open(folder / "runs" / "c")
    assert run.state() == "finished"
    assert run.manifest["config"]["folder"] == str(folder)
    saved = json.loads((folder / results["search"]["results"] / "front.json").read_text())
    members = [
        {key: own[key] for key in own if key != "layers"} for own in saved["members"]
    ]  # which the file has alone
    assert {**saved, "members": members} == saved | results["search"]["front"]
    about = json.loads((folder / results["export"]["json"]).read_text())
    assert about["command"] == "weft export c.toml"
    outputs = torch.export.load(folder / results["export"]["torch"]).module()(torch.ones(5, 4))
    assert outputs.shape == (5, 3)


VERBS: dict[str, tuple[set[str], list[str]]] = {
    "train c.toml --dry-run": ({"run", "steps", "subnets", "memory_weights"}, ["memory activations", "runs/c"]),
    "train c.toml --run=j --train.steps=3": ({"run", "steps", "fingerprint"}, ["next: weft search runs/j, or weft"]),
    "search c.toml --search.name=two": ({"run", "results", "front"}, ["next: weft export runs/c --search.name two"]),
    "export c.toml --export.formats=safetensors": ({"safetensors", "json"}, ["exported", "model.safetensors"]),
}
"""What a verb gives as JSON, and what it prints for a person."""


@pytest.mark.parametrize("words", VERBS)
def test_a_verb_prints_one_json_document_or_tables_without_escape_codes(copied: Path, words: str) -> None:
    keys, shown = VERBS[words]
    assert weft(*words.split(), "--json", cwd=copied).json.keys() >= keys
    if "--run=j" in words:
        shutil.rmtree(copied / "runs" / "j")
    done = weft(*words.split(), cwd=copied)
    assert (done.code, done.err) == (0, "")
    assert all(word in done.out for word in shown)
    assert "\x1b" not in done.out


def test_runs_are_listed_with_their_state_and_how_far_they_are(copied: Path) -> None:
    (run,) = weft("runs", "--json", cwd=copied).json
    assert (run["name"], run["state"], run["done"], run["total"]) == ("c", "finished", 40, 40)
    assert re.search(r"\bc\b.*finished.*40/40", weft("runs", cwd=copied).out)
    assert "no runs in nowhere yet" in weft("runs", "nowhere", cwd=copied).out


def test_what_files_are_called_cannot_speak_to_the_terminal(copied: Path) -> None:
    manifest = copied / "runs" / "c" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"name": "c\x1b[2J\x9b3m\u202e"}))
    for shown in (weft("runs", cwd=copied).out, weft("search", "no\x1b[2Jrun\u202e", cwd=copied).err):
        assert "\\x1b[2J" in shown
        assert "\\u202e" in shown
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)


def test_the_directory_of_a_run_stands_for_its_config_wherever_one_is(
    trained: tuple[Path, dict[str, Any]], copied: Path, tmp_path: Path
) -> None:
    elsewhere, run = tmp_path / "elsewhere", copied / "runs" / "c"
    elsewhere.mkdir()
    shutil.rmtree(run / "results")
    # The run was moved; the code that it names still lies where the config was.
    found = weft("search", run, "--json", cwd=elsewhere).json
    assert found["front"] == trained[1]["search"]["front"]
    exported = weft("export", os.path.relpath(run, elsewhere), "--json", cwd=elsewhere).json
    assert Path(exported["json"]).is_file()
    assert (run / "results" / "search" / "front.json").is_file()
    assert weft("search", ".", "--json", "--search.name=here", cwd=run).json["results"] == str(run / "results" / "here")
    assert list(elsewhere.iterdir()) == []


def test_settings_on_the_command_line_count(copied: Path) -> None:
    result = weft("train", "c.toml", "--run=7", "--train.steps=3", "--supernet.options.width=5", "--json", cwd=copied)
    assert result.json["run"] == "runs/7"
    run = Run.open(copied / "runs" / "7")
    assert run.manifest["train_config"]["steps"] == 3
    subnet = json.dumps({"b0": "skip", "b1": "two"})
    export = ("export", "--export.formats=safetensors", "--json")
    done = weft(export[0], "runs/7", f"--export.subnet={subnet}", *export[1:], cwd=copied)
    about = json.loads((copied / "runs" / "7" / Path(done.json["json"])).read_text())
    assert about["subnet"]["values"] == json.loads(subnet)
    front = weft("search", "c.toml", "--search.minimize=parameters", "--json", cwd=copied).json["front"]
    assert front["objectives"] == [{"name": "parameters", "maximize": False}]
    one = front["members"][0]["id"]
    assert one in weft(export[0], "c.toml", f"--export.subnet={one[:10]}", *export[1:], cwd=copied).json["json"]


def test_a_blank_may_stand_for_the_sign_of_a_setting(copied: Path) -> None:
    def dry_run(*words: str) -> Any:
        return weft("train", "c.toml", *words, "--dry-run", "--json", cwd=copied).json

    assert dry_run("--train.steps", "7", "--run", "other", "--train.batch-size", "4") == dry_run(
        "--train.steps=7", "--run=other", "--train.batch_size=4"
    )
    assert dry_run("--train.steps", "7")["steps"] == 7
    assert dry_run("--train.seed", "-1", "--consistency", "lagged(2)")["steps"] == 40


def test_help_and_version_are_printed() -> None:
    verbs = [str(verb.name or verb.callback.__name__) for verb in app.registered_commands if verb.callback]
    for arguments in ([], ["--help"], ["-h"]):
        done = weft(*arguments)
        assert (done.code, done.err) == (0, "")
        assert all(verb in done.out for verb in verbs)
        assert not re.search(r"\w\.\.\.$", done.out, re.MULTILINE), "what a verb does fits into its line"
    for verb in verbs:
        assert weft(verb, "--help").out.count("--json") == 1
    assert "--train.steps=500" in weft("train", "--help").out
    assert re.fullmatch(r"weft \d+\.\d+\.\d+\n", weft("--version").out)


MISTAKES = {
    "train c.toml --train.microbatch=2": r"unknown key 'train\.microbatch'; did you mean 'train\.microbatches'\?",
    "trian": r"unknown verb 'trian'; did you mean 'train'\?",
    "train c.toml --resum": r"unknown option '--resum' .*; did you mean '--resume'\?",
    "runs --jsn": r"--jsn.*--json",
    "search c.toml --search.budget": r"'--search\.budget' has no value: settings are",
    "train c.toml --data.path --train.steps=5": r"'--data\.path' has no value",
    "train --train.steps=5 c.toml": r"the config comes first, then its settings",
    "train": r"Missing argument 'CONFIG\|RUN' \(see weft train --help\)",
    "train nothing.toml": r"there is no config and no run at 'nothing\.toml'",
    "runs c.toml": r"'c\.toml' is not a directory",
    "trace runs/c": r"has no traces: start it with --execution\.trace=true",
    "train c.toml d.toml": r"unknown option 'd\.toml'",
    "demo --steps=0": r"--steps",
    "train c.toml --run=n --supernet=cli_net:no_luck": r"LookupError: no luck \(.*cli_net\.py, line \d+, in no_luck\)",
    "train c.toml --run=n --supernet=cli_net:no_chain": r"returned int, not a weft\.Chain",
    "train c.toml --run=n --supernet=cli_net:no_subnets --train.stream=iid": r"the space is empty: no subnet satisfies",
    "train c.toml --run=n --supernet=cli_net:no_forward --train.stream=iid": r"layer 'b.p' fails .*: broken on two",
    "train c.toml --run=n --train.loss=cli_net:no_loss": r"no_such_thing.*in no_loss",
    "train c.toml": r"'runs/c' already holds a run; resume it, or choose another name \(--resume, or --run=NAME\)",
    "train c.toml --resume --train.seed=3": r"run 'c' was made with seed = 0, now it is 3",
    "train c.toml --resume --supernet=digits-mlp": r"run 'c' was made with (layers|space) = \w+, now it is \w+",
    "train c.toml --run=n --optimizer.lr=1e30": r"not a number in step \d+, .* appears in layer '\w+",
    "search c.toml --run=cc": r"there is no run in 'runs/cc': train it first .*; did you mean 'c'\?",
    "search .": r"is not a run: it has no manifest\.json",
    "search c.toml --supernet=digits-mlp": r"run 'c' is of the space \w+, not of this",
    "search c.toml --search.method=evolve": r"unknown search method 'evolve'",
    "search c.toml '--search.constraints=flops<=1'": r"none of \d+ subnets drawn has flops <=",
    "export c.toml --search.name=other": r"no front 'other' yet: run `weft search`",
    "export c.toml --export.subnet=zz": r"no subnet 'zz' on the front: it has \w{16}",
    "export c.toml --export.subnet=": r"'' begins several ids|no subnet ''",
    "export c.toml '--export.subnet={'": r"the subnet is not JSON",
    'export c.toml \'--export.subnet={"b9": "one"}\'': r"b9",
    "export c.toml --export.limits.flps=1": r"no metric 'flps' on the front; did you mean",
    "export c.toml --export.limits.flops=1": r"no subnet on the front has flops <= 1",
}
"""Command lines, and what their only line of output says."""


BEGUN = ("no_forward", "no_loss", "1e30")
"""Mistakes that show in the first step: the run has begun then."""


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_ends_with_one_clear_line_and_code_2(trained: tuple[Path, dict[str, Any]], words: str) -> None:
    folder = trained[0]
    try:
        done = weft(*shlex.split(words), cwd=folder)
        begun = {path.name for path in (folder / "runs").iterdir()} - {"c"}
    finally:
        shutil.rmtree(folder / "runs" / "n", ignore_errors=True)
    assert begun == ({"n"} if any(name in words for name in BEGUN) else set())
    assert re.search(MISTAKES[words], done.error), done.err
    assert Run.open(folder / "runs" / "c").state() == "finished"


def test_an_error_of_weft_itself_keeps_its_traceback(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise KeyError("a bug")

    broken.__code__ = broken.__code__.replace(co_filename=main.__code__.co_filename)
    monkeypatch.setattr("weft.cli.train.describe", broken)
    with pytest.raises(KeyError, match="a bug"):
        weft("train", "c.toml", "--dry-run", cwd=project)


def test_a_search_needs_a_config_and_validation_data(project: Path) -> None:
    options = ["--data=cli_net:load_train_only", "--train.steps=2"]
    assert weft("train", "c.toml", *options, cwd=project).code == 0
    assert "search needs validation data" in weft("search", "c.toml", *options, cwd=project).err
    Run.create(project / "runs", "plain", manifest={})
    assert "was not started from a config" in weft("search", "runs/plain", cwd=project).error


def test_runs_whose_loss_is_no_number_are_listed_in_strict_json(project: Path) -> None:
    assert weft("train", "c.toml", "--optimizer.lr=1e30", cwd=project).code == 2
    skipping = ["--run=d", "--train.loss=cli_net:no_number", "--train.on_nonfinite=skip", "--json"]
    assert weft("train", "c.toml", *skipping, cwd=project).json["steps"] == 40
    failed, finished = weft("runs", "--json", cwd=project).json
    assert (failed["name"], failed["state"], failed["total"]) == ("c", "failed", 40)
    assert (finished["name"], finished["state"], finished["loss"]) == ("d", "finished", "nan")


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    limit = time.monotonic() + 60
    while not happened():
        assert process.poll() is None, "the process ended too early"
        assert time.monotonic() < limit, "it took too long"
        time.sleep(0.02)


@pytest.fixture
def running(project: Path) -> Iterator[subprocess.Popen[str]]:
    """A real training that would take long, after its first checkpoint."""
    process = subprocess.Popen(
        command("train", "c.toml", "--run.checkpoint_every=2"),
        cwd=project,
        env={**os.environ, "CLI_PAUSE": "0.4"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: any(project.glob("runs/c/checkpoints/*/manifest.json")), process)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_stops_with_a_checkpoint_and_the_resumed_run_is_the_undisturbed_one(
    project: Path, trained: tuple[Path, dict[str, Any]], running: subprocess.Popen[str]
) -> None:
    assert weft("runs", "--json", cwd=project).json[0]["state"] == "running"
    locked = weft("train", "c.toml", "--resume", cwd=project)
    assert (locked.code, locked.out) == (2, "")
    assert f"is in use by process {running.pid} on " in locked.err

    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "")
    steps = Run.open(project / "runs" / "c").checkpoints.steps()
    assert 2 <= steps[-1] < 40
    again = "weft train c.toml --run.checkpoint_every=2 --resume"
    assert err == f"stopped; a checkpoint after {steps[-1]} steps is written. Resume with: {again}\n"
    assert weft("runs", "--json", cwd=project).json[0]["state"] == "stopped"

    resumed = weft(*again.split()[1:], "--json", cwd=project).json
    assert resumed["fingerprint"] == trained[1]["train"]["fingerprint"]
    assert weft("runs", "--json", cwd=project).json[0]["state"] == "finished"
    losses = [
        [event["loss"] for event in Run.open(folder / "runs" / "c").events.read() if event["event"] == "step"]
        for folder in (project, trained[0])
    ]
    assert losses[0] == losses[1]


def test_a_search_that_is_stopped_keeps_its_scores_and_ends_as_if_it_had_not_been(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["search", "c.toml", "--run.metrics=cli_net:counted", "--search.minimize=counted"]
    shutil.rmtree(copied / "runs" / "c" / "results")
    shutil.copytree(copied / "runs" / "c", copied / "runs" / "d")
    monkeypatch.setenv("CLI_STOP", "4")
    done = weft(*arguments, cwd=copied)
    assert (done.code, done.out) == (130, "")
    again = "weft search c.toml --run.metrics=cli_net:counted --search.minimize=counted"
    assert done.err.strip() == f"stopped; the scores so far are kept. Go on with: {again}"
    scores = copied / "runs" / "c" / "results" / "scores.jsonl"
    kept = scores.read_text()
    assert kept.count("\n") == 3
    monkeypatch.delenv("CLI_STOP")
    resumed = weft(*arguments, "--json", cwd=copied).json
    assert scores.read_text().startswith(kept)
    assert scores.read_text().count("\n") == 6
    assert resumed["front"] == weft(*arguments, "--run=d", "--json", cwd=copied).json["front"]
