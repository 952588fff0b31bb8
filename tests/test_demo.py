"""The demo: run for real, with fewer steps, from the search space to the files of the extracted model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from weft.cli.demo import run_demo
from weft.data import digits
from weft.runs import Run, list_runs
from weft.search import Front
from weft.supernet import extract, initialise
from weft.trace.analysis import summary
from weft.trace.reader import read_traces
from weft.zoo import digits_conv


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "weft.cli", "demo", "--json", "--runs", "kept", "--steps", "120", "--budget", "8"]
    one_core = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=one_core, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    return folder, json.loads(done.stdout, parse_constant=pytest.fail)


def test_the_extracted_model_is_the_subnet_in_the_supernet_to_the_last_bit(demo: tuple[Path, dict[str, Any]]) -> None:
    folder, result = demo
    assert result["extraction_bit_equal"] is True
    test = digits().test
    assert test is not None
    batch = test.take(np.arange(len(test)))
    images = batch["image"]
    program = torch.export.load(folder / result["files"]["torch"]).module()
    chain = initialise(digits_conv)
    front = Front.from_json(chain.space, result["front"])
    plain = extract(chain, front.best().subnet)
    plain.load_state_dict(load_file(folder / result["files"]["safetensors"]))
    with torch.inference_mode():
        assert torch.equal(program(images), plain(images))
        right = (plain(images).argmax(-1) == batch["label"]).sum()
    assert float(right) / len(images) == pytest.approx(result["test"]["chosen"]["accuracy"], abs=0.01)


def test_the_front_is_found_on_validation_data_and_tested_once(demo: tuple[Path, dict[str, Any]]) -> None:
    folder, result = demo
    assert len(result["front"]["members"]) >= 1
    assert set(result["test"]) == {"chosen", "random search", "largest"}
    for scores in result["test"].values():
        assert 0.5 < scores["accuracy"] <= 1.0
        assert set(scores) == {"loss", "accuracy", "parameters", "flops"}
    run = Run.open(folder / result["run"])
    recorded = json.loads((run.path / "results" / "test.json").read_text())
    assert recorded == run.test_scores
    for name, kept in recorded.items():
        assert kept["scores"] == {key: result["test"][name][key] for key in ("loss", "accuracy")}
    assert [event["name"] for event in run.events.read() if event["event"] == "test"] == list(result["test"])


def test_the_run_is_finished_and_holds_what_was_said(demo: tuple[Path, dict[str, Any]]) -> None:
    folder, result = demo
    (listed,) = list_runs(folder / "kept")
    assert (listed.state, listed.done, listed.total) == ("finished", 120, 120)
    run = Run.open(folder / result["run"])
    assert run.state() == "finished"
    finished = [event for event in run.events.read() if event["event"] == "finished"]
    assert [event["fingerprint"] for event in finished] == [result["fingerprint"]]
    saved = json.loads((run.path / "results" / "search" / "front.json").read_text())
    assert [member["id"] for member in saved["members"]] == [member["id"] for member in result["front"]["members"]]
    about = json.loads((folder / result["files"]["json"]).read_text())
    assert about["subnet"] == result["front"]["members"][0]["subnet"]
    assert about["test"] == result["test"]["chosen"]


def test_two_stages_and_one_have_the_same_fingerprint(demo: tuple[Path, dict[str, Any]]) -> None:
    folder, result = demo
    assert result["stages"] == 2
    assert result["same"] is True
    assert result["fingerprint_one_stage"] == result["fingerprint"]
    assert len(result["fingerprint"]) == 64
    assert set(result["training_seconds"]) == {"2", "1"}
    traced = summary(read_traces(folder / result["run"]))["stages"]
    assert result["busy"] == [stage["busy_share"] for stage in traced]
    assert [stage["ops"] for stage in traced] == [240, 240]  # a forward and a backward of each step
    assert all(0 < share <= 1 for share in result["busy"])


def test_it_ends_with_a_report_that_shows_the_stages_and_the_front(demo: tuple[Path, dict[str, Any]]) -> None:
    folder, result = demo
    run = Path(result["run"])
    assert result["report"] == str(run / "report.html")
    text = (folder / result["report"]).read_text()
    data = text.partition('id="weft-documents">')[2].partition("</script>")[0]
    documents = json.loads(data, parse_constant=pytest.fail)
    assert documents[f"/api/runs/{run.name}/pipeline"]["traced"] is True
    assert documents[f"/api/runs/{run.name}"]["fingerprint"] == result["fingerprint"]
    shown = [member["id"] for member in documents[f"/api/runs/{run.name}/search"]["front"]]
    assert sorted(shown) == sorted(member["id"] for member in result["front"]["members"])


@pytest.mark.long
def test_for_a_person_it_tells_every_part_in_order(tmp_path: Path) -> None:
    console = Console(record=True, file=io.StringIO(), width=160)
    torch.set_num_threads(2)
    result = run_demo(tmp_path / "runs", console, steps=20, budget=3)
    assert torch.get_num_threads() == 2
    text = console.export_text()
    parts = ["1  train", "4,096 subnets", "busy: stage 0", "stage 1", result["fingerprint"], "2  prove", "same: yes"]
    parts += ["3  search", "4  test", "random search", "5  extract", "to the last bit: yes", "6  where", result["run"]]
    parts += ["model.safetensors", "weft trace", "done in", "7  look", "report.html"]
    assert text.count(result["fingerprint"]) == 2
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
