"""Gradient search as a user calls it: ``weft search --method``, ``weft.search_gradient``, and ``weft zoo``."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import inside, on_terminal
from command_line import weft as call
from small_supernets import layered

import weft
from weft import zoo
from weft.errors import SearchError
from weft.runs import Run
from weft.search.cost import parameters
from weft.search.gradient import GradientSearchResult
from weft.search.gradient.methods import GDAS
from weft.utils.imports import import_object
from weft.zoo import catalogue, summary

SAMPLED = ("spos", "fairnas", "sandwich")

CONFIG = """
supernet = "grad_net:build"
data = "digits"
[train]
steps = 24
batch_size = 16
[execution]
threads = 1
[run]
checkpoint_every = 5
metrics = ["accuracy", "grad_net:watched"]
[search]
budget = 3
rate = 0.05
"""

CODE = """
import os, signal
from functools import partial
import torch
from torch import nn
import weft
from weft import elastic

class Stem(elastic.Module):
    def __init__(self, space, width):
        super().__init__()
        self.linear = elastic.Linear(space, 64, width)

    def forward(self, x, pick):
        return self.linear(x.flatten(1), pick)

class Hidden(elastic.Module):
    def __init__(self, space, width, hidden):
        super().__init__()
        self.up = elastic.Linear(space, width, hidden)
        self.down = elastic.Linear(space, hidden, width)

    def forward(self, x, pick):
        return x + self.down(torch.relu(self.up(x, pick)), pick)

def build():
    space = weft.Space()
    width = space.integer("width", [4, 8])
    depth = space.integer("depth", [1, 2])
    ratio = space.categorical("ratio", [1, 2.5])
    parts = [weft.Elastic(space, "stem", partial(Stem, space, width))]
    hidden = partial(Hidden, space, width, ratio * width)
    parts += [weft.Elastic(space, f"b{i}", hidden, when=depth > i) for i in (0, 1)]
    return weft.Chain(*parts, weft.Elastic(space, "head", partial(elastic.Linear, space, width, 10)))

def no_choices():
    return weft.Chain(weft.Shared(nn.Flatten, "flat"), weft.Shared(partial(nn.Linear, 64, 10), "head"))

def train_only():
    digits = weft.data.digits()
    return weft.Data("few", digits.train)

calls = 0

def watched(outputs, batch):
    global calls
    calls += 1
    if str(calls) == os.environ.get("GRAD_STOP"):
        os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does
    return outputs.sum(), len(outputs)
"""


def write_project(folder: Path) -> Path:
    (folder / "c.toml").write_text(CONFIG)
    (folder / "grad_net.py").write_text(CODE)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path)


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder whose config was searched by DrNAS, and the JSON of that; only to be read."""
    folder = write_project(tmp_path_factory.mktemp("searched"))
    return folder, call(
        "search", "c.toml", "--method", "drnas", "--target", "parameters=900", "--json", cwd=folder
    ).json


def test_what_was_found_is_told_as_json_and_lies_in_the_run(searched: tuple[Path, dict[str, Any]]) -> None:
    folder, result = searched
    assert (result["run"], result["method"], result["steps"]) == ("runs/c", "drnas", 24)
    assert re.fullmatch("[0-9a-f]{64}", result["fingerprint"])
    assert result["scores"].keys() == {"accuracy", "watched", "loss", "parameters", "flops"}
    assert 0.98 * 900 <= result["scores"]["parameters"] <= 1.02 * 900
    assert [row["choice"] for row in result["probabilities"]] == ["width", "depth", "ratio"]
    assert [row["options"] for row in result["probabilities"]] == [[4, 8], [1, 2], [1, 2.5]]
    for row in result["probabilities"]:
        assert row["found"] == result["subnet"]["values"][row["choice"]]
        assert sum(row["probabilities"]) == pytest.approx(1, abs=1e-5)
        assert row["bits"] == pytest.approx(-sum(p * math.log2(p) for p in row["probabilities"]), abs=1e-5)
    assert result["architecture"] == " ".join(f"{name}={value}" for name, value in result["subnet"]["values"].items())

    run = Run.open(folder / "runs" / "c")
    assert run.state() == "finished"
    asked = run.manifest["config"]["search"]
    assert (asked["method"], asked["targets"]) == ("drnas", ["parameters=900"])
    assert run.manifest["train_config"]["architecture_search"]["optimizer"]["lr"] == 0.05
    results = folder / result["results"]
    assert result["files"] == ["front.csv", "front.json", "mixture.json"]
    kept = json.loads((results / "mixture.json").read_text())
    assert (kept["method"], kept["subnet"]) == ("drnas", result["subnet"])
    for row in result["probabilities"]:
        assert kept["probabilities"][row["choice"]] == pytest.approx(row["probabilities"], abs=1e-6)
    front = json.loads((results / "front.json").read_text())
    assert [member["subnet"] for member in front["members"]] == [result["subnet"]]


def test_python_finds_what_the_command_line_finds(searched: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, result = searched
    with inside(folder):
        found = weft.search_gradient(
            import_object("grad_net:build", folder),
            weft.data.digits(),
            method="drnas",
            steps=24,
            targets="parameters=900",
            architecture=weft.Optimizer("adam", lr=0.05, betas=(0.5, 0.999), weight_decay=1e-3),
            batch_size=16,
            metrics={"accuracy": weft.accuracy},
            folder=tmp_path,
        )
    assert isinstance(found, GradientSearchResult)
    assert found.trained.fingerprint == result["fingerprint"]
    assert found.subnet.to_json() == result["subnet"]
    model = found.extract()
    assert parameters(model) == result["scores"]["parameters"]
    assert not any(type(part).__module__.startswith("weft") for part in model.modules())
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("method", ["darts2", "spos", "fairnas", "sandwich"])
def test_every_method_runs_and_names_a_subnet_of_the_space(project: Path, method: str) -> None:
    result = call("search", "c.toml", f"--method={method}", "--train.steps=6", "--json", cwd=project).json
    assert result["method"] == method
    assert set(result["subnet"]["values"]) == {"width", "depth", "ratio"}
    assert (result["probabilities"] is None) == (method in SAMPLED)
    assert ("mixture.json" in result["files"]) == (method not in SAMPLED)
    run = Run.open(project / "runs" / "c")
    assert len([event for event in run.events.read() if event["event"] == "step"]) == 6
    streams = {"spos": "iid", "fairnas": "spaced", "sandwich": "sandwich"}
    assert run.manifest["train_config"]["stream"]["stream"] == streams.get(method, "fixed")


def test_for_a_person_there_is_a_table_of_choices_without_escape_codes(project: Path) -> None:
    arguments = ["search", "c.toml", "--train.steps=4", "--search.weight_warmup_steps=2"]
    done = call(*arguments, "--method=gdas", cwd=project)
    assert (done.code, done.err) == (0, "")
    assert re.search(r"width +│ [48] +│ [01]\.\d\d │ 4 \d+%, 8 \d+% +│", done.out)
    assert "searched by gdas" in done.out
    assert re.search(r"architecture │ width=[48] depth=[12] ratio=(1|2\.5) ", done.out)
    assert "saved in runs/c/results/search: front.csv, front.json, mixture.json" in done.out
    assert "\x1b" not in done.out
    assert Run.open(project / "runs" / "c").manifest["train_config"]["architecture_search"]["warmup"] == 2
    by_samples = call(*arguments, "--method=spos", "--run=s", cwd=project)
    assert (by_samples.code, by_samples.err, "bits" in by_samples.out) == (0, "", False)
    assert "searched by spos" in by_samples.out


def test_the_method_and_its_settings_can_stand_in_the_config(project: Path) -> None:
    with (project / "c.toml").open("a") as file:
        file.write('method = "darts"\ntargets = ["parameters=900"]\nweight_warmup_steps = 1\nname = "mine"\n')
    result = call("search", "c.toml", "--train.steps=4", "--json", cwd=project).json
    assert (result["method"], result["results"]) == ("darts", "runs/c/results/mine")
    assert 0.98 * 900 <= result["scores"]["parameters"] <= 1.02 * 900
    described = Run.open(project / "runs" / "c").manifest["train_config"]
    assert described["architecture_search"]["warmup"] == 1
    assert "value=900.0" in described["loss"]


def test_ctrl_c_leaves_a_run_that_resumes_to_the_same_bits(
    searched: tuple[Path, dict[str, Any]], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAD_STOP", "13")
    done = call("search", "c.toml", "--method=drnas", "--target=parameters=900", cwd=project)
    assert (done.code, done.out) == (130, "")
    again = "weft search c.toml --method=drnas --target=parameters=900 --resume"
    assert done.err == f"stopped; a checkpoint after 13 steps is written. Resume with: {again}\n"
    assert Run.open(project / "runs" / "c").state() == "stopped"

    same = "--method=drnas --target=parameters=900"
    changes = {
        "targets": "--method=drnas",
        "rate": f"{same} --search.rate=1",
        "weight_warmup_steps": f"{same} --search.weight_warmup_steps=1",
    }
    for key, changed in changes.items():
        other = call("search", "c.toml", *changed.split(), "--resume", cwd=project)
        assert f"run 'c' was made with search.{key} = " in other.error

    monkeypatch.delenv("GRAD_STOP")
    resumed = call(*again.split()[1:], "--json", cwd=project).json
    assert resumed == searched[1]
    mixture = "runs/c/results/search/mixture.json"
    assert (project / mixture).read_bytes() == (searched[0] / mixture).read_bytes()


def test_a_finished_search_is_exported_searched_on_and_told_again(
    searched: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(searched[0], folder)
    exported = call("export", "runs/c", "--export.formats=safetensors", "--json", cwd=folder).json
    about = json.loads((folder / "runs" / "c" / exported["json"]).read_text())
    assert about["subnet"] == searched[1]["subnet"]
    onward = call("search", "c.toml", "--method=random", "--search.name=more", "--json", cwd=folder).json
    assert {member["id"] for member in onward["front"]["members"]}
    # The run stands for its config, with the method and the targets that it was started with.
    again = call("search", "runs/c", "--resume", "--json", cwd=folder).json
    assert {**again, "run": "", "results": ""} == {**searched[1], "run": "", "results": ""}


MISTAKES: dict[str, tuple[list[str], str]] = {
    "unknown method": (["--method=drns"], r"unknown search method 'drns'; did you mean 'drnas'\?"),
    "second run": (["--method=drnas"], r"'runs/c' already holds a run; resume it, .* \(--resume, or --run=NAME\)"),
    "target out of reach": (["--method=drnas", "--run=n", "--target=parameters=5e9"], "the reachable range is"),
    "target of a search": (["--target=flops=3"], r"--target is for methods that train.*--search\.constraints"),
    "resumed search": (["--method=random", "--resume"], r"--resume is for methods that train.*'random' searches"),
    "stages of a search": (["--stages=2"], r"--stages is for methods that train"),
    "no validation data": (["--method=darts", "--run=n", "--data=grad_net:train_only"], "split some off"),
    "no choices": (["--method=darts", "--run=n", "--supernet=grad_net:no_choices"], "has nothing to search"),
    "no partial channels": (["--method=pc-darts", "--run=n"], r"'pc-darts' mixes a part of the channels.*partial=4"),
    "no rate": (["--method=darts", "--run=n", "--search.rate=0"], r"search\.rate is above 0"),
    "no warm-up": (["--method=darts", "--run=n", "--search.weight_warmup_steps=-1"], "is a whole number of 0"),
    "name of a search": (["--method=darts", "--run=n", "--search.name=../x"], r"a search cannot be called '\.\./x'"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_ends_with_one_clear_line_and_no_run(searched: tuple[Path, dict[str, Any]], case: str) -> None:
    arguments, words = MISTAKES[case]
    done = call("search", "c.toml", *arguments, cwd=searched[0])
    assert re.search(words, done.error), done.err
    assert [path.name for path in (searched[0] / "runs").iterdir()] == ["c"]
    assert Run.open(searched[0] / "runs" / "c").state() == "finished"


def test_settings_that_a_method_does_not_look_at_are_told(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits = ["--train.steps=2", "--search.minimize=flops", "--search.constraints=flops<=1e9"]
    assert call("search", "c.toml", "--method=darts", *limits, cwd=project).code == 0
    result = "'darts' does not look at search.minimize, search.constraints, but at search.targets and train.seed"
    assert [record.getMessage() for record in caplog.records if record.name == "weft"] == [result]


@pytest.mark.long
def test_two_processes_have_the_bits_of_one(searched: tuple[Path, dict[str, Any]], project: Path) -> None:
    done = call("search", "c.toml", "--method=drnas", "--target=parameters=900", "--stages=2", "--json", cwd=project)
    assert done.code == 0, done.err
    assert json.loads(done.out) == searched[1]
    mixture = "runs/c/results/search/mixture.json"
    assert (project / mixture).read_bytes() == (searched[0] / mixture).read_bytes()


def test_on_a_terminal_a_bar_tells_loss_entropy_rate_and_time_left_and_is_taken_away(project: Path) -> None:
    written = on_terminal("search", "c.toml", "--method=drnas", "--train.steps=60", cwd=project)
    drawn, _, result = written.rpartition("\x1b[2K")  # the last line that was cleared is that of the bar
    drawn = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", drawn)
    assert re.search(r"search\b.*\b\d+/60\b.*loss \d\.\d{3} \| [01]\.\d\d bits", drawn)
    assert re.search(r"\d steps/s", drawn)
    assert re.search(r"\b00:\d\d", drawn), "the time left"
    assert "searched by drnas" in result
    assert "steps/s" not in result


def test_search_in_python_says_how_it_is_called(tmp_path: Path) -> None:
    data = weft.data.digits()
    trained = weft.train(layered, data, steps=1, folder=tmp_path)
    search: Any = weft.search
    unknown: Any = weft.search_gradient
    for begun, words in (
        (lambda: search(layered), r"trained together by weft.search_gradient\(build, data, steps=...\)"),
        (lambda: search(trained, recalibrate=1), "the option 'recalibrate' is called 'bn_batches' now"),
        (lambda: search(trained, budgets=1), r"unknown option 'budgets'; did you mean 'budget'"),
        (lambda: search(trained, method=GDAS()), "'gdas' trains weights and architecture together"),
        (lambda: search(trained, method="drnas"), "'drnas' trains .* together: call weft.search_gradient"),
        (
            lambda: unknown(layered, data, method="dars", steps=3),
            "unknown gradient method 'dars'; did you mean 'darts'",
        ),
        (lambda: unknown(layered, data, method="evolution", steps=3), "'evolution' searches a trained run: call weft"),
    ):
        with pytest.raises(SearchError, match=words):
            begun()


def test_gradient_search_is_not_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SearchError, match="use stages=N and not torchrun"):
        weft.search_gradient(layered, weft.data.digits(), method="darts", steps=2)


def test_the_zoo_is_listed_with_all_its_spaces(tmp_path: Path) -> None:
    listed = call("zoo", "--json", cwd=tmp_path).json
    assert [entry["name"] for entry in listed] == list(zoo.SUPERNETS)
    for entry in listed:
        single = entry["name"] == "gpt"  # one network, with nothing to choose
        assert (entry["choices"] == 0, entry["subnets"] == 1) == (single, single)
        assert 0 < entry["smallest"] <= entry["largest"], entry["name"]
        assert re.fullmatch(r".+\.", entry["about"])
    known = {entry["name"]: entry for entry in listed}
    assert known["nas-bench-macro"]["subnets"] == 6561
    digits = known["digits-conv"]
    assert [digits[key] for key in ("subnets", "choices", "smallest", "largest")] == [4096, 6, 5178, 101466]
    assert digits["about"] == summary(zoo.digits_conv)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["digits-mlp", "vit-test", "gpt-test", "gpt", "nas-bench-macro-entangled", "toy-cell"])
def test_the_parameters_of_the_ends_are_those_of_extracted_modules(name: str) -> None:
    chain = weft.initialise(zoo.find(name))
    (entry,) = catalogue({name: zoo.find(name)})
    ends = [parameters(weft.extract(chain, subnet)) for subnet in (chain.smallest(), chain.largest())]
    assert [entry.smallest, entry.largest] == ends
    assert entry.subnets == chain.space.size()
    assert all(not p.is_meta for p in chain.parameters())
