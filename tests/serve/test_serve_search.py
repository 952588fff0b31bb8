"""The document of a run's searches, on a real small run that was searched from the command line."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft.cli import main
from weft.errors import RunError
from weft.serve.views import search as searches

CONFIG = """
run = "small"
supernet = "digits-conv"
data = "digits"
[train]
steps = 1
batch_size = 8
[execution]
threads = 1
[search]
budget = 6
recalibrate = 1
[export]
formats = ["safetensors"]
"""


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    here, threads = Path.cwd(), torch.get_num_threads()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
        torch.set_num_threads(threads)


def paste(command: str, folder: Path) -> str:
    """Runs a command as a shell in the folder would, in this process."""
    argv, out = sys.argv, StringIO()
    with inside(folder), redirect_stdout(out):
        try:
            sys.argv = shlex.split(command)
            with pytest.raises(SystemExit) as end:
                main()
            assert end.value.code in (0, None), out.getvalue()
        finally:
            sys.argv = argv
    return out.getvalue()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was searched twice, under two names; only to be read."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "c.toml").write_text(CONFIG)
    paste("weft train c.toml", folder)
    paste("weft search c.toml", folder)
    paste("weft search runs/small --search.name other --search.minimize loss --search.budget 3", folder)
    return folder


@pytest.fixture
def run(home: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    copy = tmp_path / "runs" / "small"
    shutil.copytree(home / "runs" / "small", copy, ignore=shutil.ignore_patterns("checkpoints"))
    return copy


def test_the_front_is_told_with_its_layers_which_add_up_to_its_costs(run: Path) -> None:
    found = searches.document(run)
    assert (found["searches"], found["name"], found["problem"]) == (["other", "search"], "search", None)
    assert found["objectives"] == [{"name": "accuracy", "maximize": True}, {"name": "flops", "maximize": False}]
    saved = json.loads((run / "results" / "search" / "front.json").read_text())
    assert [member["id"] for member in found["front"]] == [member["id"] for member in saved["members"]]
    for member in found["front"]:
        blocks = [layer["block"] for layer in member["layers"]]
        assert blocks == ["stem", "block0", "block1", "block2", "reduce", "block3", "block4", "block5", "head"]
        for name in ("parameters", "flops"):
            assert sum(layer[name] for layer in member["layers"]) == member["scores"][name]
        for layer in member["layers"]:
            assert layer["shared"] == (layer["block"] in ("stem", "reduce", "head"))
            assert layer["choice"] == member["values"].get(layer["block"])


def test_all_that_was_scored_is_told_with_every_objective(run: Path) -> None:
    found = searches.document(run)
    lines = [json.loads(line) for line in (run / "results" / "scores.jsonl").read_text().splitlines()]
    assert found["count"] == len(found["scored"]) == len({line["subnet"] for line in lines})
    whole = [one for one in found["scored"] if {"accuracy", "loss", "flops", "parameters"} <= one["scores"].keys()]
    assert len(whole) >= 6  # the other search asked for no costs
    scored = {one["id"]: one["scores"] for one in found["scored"]}
    for member in found["front"]:
        assert scored[member["id"]]["flops"] == member["scores"]["flops"]


def test_shares_are_told_of_every_option_of_the_space(run: Path) -> None:
    choices = searches.document(run)["choices"]
    assert [one["name"] for one in choices] == [f"block{at}" for at in range(6)]
    for one in choices:
        assert one["options"] == ["skip", "separable3", "conv3", "conv5"]
        assert sum(one["best"]) == pytest.approx(1, abs=1e-6)
        assert sum(one["all"]) == pytest.approx(1, abs=1e-6)


def test_the_command_exports_the_subnet_when_it_is_pasted(home: Path) -> None:
    with inside(home):
        member = searches.document(Path("runs/small"))["front"][-1]
    assert member["command"] == f"weft export runs/small --export.subnet {member['id']}"
    paste(member["command"], home)
    written = json.loads((home / "runs" / "small" / "results" / member["id"] / "model.json").read_text())
    assert written["subnet"]["values"] == member["values"]


def test_the_command_of_another_search_names_it(home: Path) -> None:
    with inside(home):
        found = searches.document(Path("runs/small"), name="other")
    command = found["front"][0]["command"]
    assert command == f"weft export runs/small --search.name other --export.subnet {found['front'][0]['id']}"
    paste(command, home)
    assert found["objectives"] == [{"name": "loss", "maximize": False}]


def test_a_run_that_was_started_from_python_has_no_command(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "config": None}))
    assert {member["command"] for member in searches.document(run)["front"]} == {None}


def test_an_unknown_name_is_answered_with_the_nearest(run: Path) -> None:
    with pytest.raises(RunError, match="has no search 'serch'; did you mean 'search'"):
        searches.document(run, name="serch")
    with pytest.raises(RunError, match="has no search"):
        searches.document(run, name="../../small/results/search")


def test_a_search_that_goes_on_shows_what_it_scored_before_there_is_a_front(run: Path) -> None:
    for name in ("search", "other"):
        shutil.rmtree(run / "results" / name)
    found = searches.document(run)
    assert (found["searches"], found["name"], found["front"]) == ([], "search", [])
    assert len(found["scored"]) >= 6
    assert found["objectives"] == [{"name": "accuracy", "maximize": True}, {"name": "flops", "maximize": False}]
    assert len(found["choices"]) == 6
    assert searches.present(run)


DAMAGED = {
    "torn": b'{"members": [{"id"',
    "not a front": b"[1, 2]",
    "odd members": json.dumps(
        {
            "members": [3, {"id": 4}, {"id": "a"}, {"id": "b", "subnet": 1, "scores": [2], "layers": 3}],
            "objectives": [1, {"name": 2}, {"name": "accuracy"}],
            "constraints": ["flops <= many", 4],
            "choices": {"a": 1},
            "context": 3,
        }
    ).encode(),
    "empty": b"",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_front_is_told_and_the_rest_is_shown(run: Path, content: bytes) -> None:
    (run / "results" / "search" / "front.json").write_bytes(content)
    found = searches.document(run)
    assert len(found["scored"]) >= 6
    assert isinstance(found["problem"], str) == (content != DAMAGED["odd members"])
    json.dumps(found, allow_nan=False)


def test_damaged_scores_and_a_damaged_manifest_give_a_document(run: Path) -> None:
    (run / "results" / "scores.jsonl").write_bytes(b"\xff\n{\n[]\n{}\n" + b"x" * 100)
    (run / "manifest.json").write_bytes(b"{")
    found = searches.document(run)
    assert found["scored"] == []
    assert found["front"]


def test_a_run_that_was_never_searched_has_no_search(tmp_path: Path) -> None:
    assert not searches.present(tmp_path)
    found = searches.document(tmp_path)
    assert (found["front"], found["scored"], found["choices"]) == ([], [], [])


def test_a_link_that_leads_out_of_the_run_is_no_front(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "front.json").write_text('{"members": []}')
    (run / "results" / "linked").symlink_to(tmp_path / "elsewhere")
    assert searches.document(run)["searches"] == ["other", "search"]


def test_however_large_a_front_is_its_document_is_not(run: Path) -> None:
    values = {f"block{at}": f"candidate{at}" for at in range(48)}
    layers = [
        {"block": name, "choice": one, "parameters": 1, "flops": 2, "shared": False} for name, one in values.items()
    ]
    members: list[dict[str, Any]] = [
        {"id": f"{at:016x}", "subnet": {"space": "s", "values": values}, "scores": {"accuracy": at / 3000, "flops": at}}
        for at in range(3000)
    ]
    for member in members:
        member["layers"] = layers
    front = {"format": 1, "members": members, "objectives": [{"name": "accuracy", "maximize": True}], "constraints": []}
    (run / "results" / "search" / "front.json").write_text(json.dumps(front))
    with open(run / "results" / "scores.jsonl", "a") as file:
        for at in range(3000):
            told = {"accuracy": at / 3000, "loss": at / 7}
            file.write(json.dumps({"subnet": f"{at:016x}", "context": "new", "scores": told, "values": values}) + "\n")
    found = searches.document(run)
    assert len(json.dumps(found)) < 700_000
    assert [found["front"][at]["id"] for at in (0, -1)] == [f"{0:016x}", f"{2999:016x}"]
    assert len(found["scored"]) == 2000


def test_a_gradient_search_is_shown_with_its_probabilities(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 3, "batch_size": 8, "recalibrate": 1, "folder": tmp_path, "name": "gradient"}
    metrics = {"accuracy": weft.accuracy}
    build = weft.zoo.find("digits-conv")
    found = weft.search_gradient(build, weft.data.digits(), method="darts", metrics=metrics, **options)
    shown = searches.document(tmp_path / "gradient")
    assert searches.present(tmp_path / "gradient")
    assert [member["id"] for member in shown["front"]] == [found.subnet.id]
    assert shown["probabilities"]["steps"] == [0, 1, 2]
    assert [one["name"] for one in shown["probabilities"]["choices"]] == [f"block{at}" for at in range(6)]
    first = shown["probabilities"]["choices"][0]
    assert first["options"] == ["skip", "separable3", "conv3", "conv5"]
    assert [values[0] for values in first["values"]] == [0.25] * 4  # all options begin alike
