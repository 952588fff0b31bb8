"""Whole runs whose layers live on the host: in processes, killed in the middle of a copy, searched."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stages
import torch
from disturbed import samples

import weft
from weft.errors import TrainError
from weft.offload.host_memory import allocate_host
from weft.trace.perfetto import perfetto
from weft.trace.reader import STATES, read_traces

ADAM = weft.Optimizer("adamw", lr=1e-3)
BUDGET = "56KiB"


def train(folder: Path, **options: Any) -> weft.TrainedRun:
    told = {"steps": 12, "batch_size": 4, "optimizer": ADAM, "folder": folder, **options}
    return weft.train(stages.text, partial(samples, "text"), **told)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> weft.TrainedRun:
    return train(tmp_path_factory.mktemp("alone"), run="alone", validation=4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> weft.TrainedRun:
    return train(tmp_path_factory.mktemp("small"), run="small", validation=4, offload=BUDGET)


def events(run: weft.TrainedRun, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in run.run.events.path.read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


def test_a_run_says_what_moved_and_scores_and_ends_as_one_without(
    small: weft.TrainedRun, alone: weft.TrainedRun
) -> None:
    assert small.fingerprint == alone.fingerprint
    scores = [[row["scores"] for row in events(run, "validation")] for run in (small, alone)]
    assert scores[0] == scores[1]
    (told,) = events(small, "finished")[0]["offload"]
    assert min(told["loaded_bytes"], told["evicted_bytes"]) > 0
    assert told["peak"] <= told["budget"] == 56 * 1024
    assert told["uses"] == 12 * 6
    assert events(small, "offload")[-1]["stages"][0]["hit_rate"] > 0.9


def test_a_search_scores_subnets_of_a_supernet_that_does_not_fit(
    small: weft.TrainedRun, alone: weft.TrainedRun
) -> None:
    loaded = weft.load_run(small.path, stages.text, samples("text"), offload=BUDGET)
    fronts = [weft.search(run, minimize=["loss", "flops"], budget=6) for run in (alone, small, loaded)]
    scores = [[(pick.subnet.id, pick.scores) for pick in front] for front in fronts]
    assert scores[0] == scores[1] == scores[2]


def test_memory_that_cannot_be_pinned_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("here it can be pinned")
    with caplog.at_level(logging.WARNING, logger="weft.pipeline"):
        memory = allocate_host(1 << 16, pin=True)
    assert memory.numel() == 1 << 16
    assert memory.data_ptr() % 512 == 0
    assert "cannot be pinned" in caplog.text
    assert "half the speed" in caplog.text


def test_more_than_the_host_has_is_refused_with_a_way_out() -> None:
    with pytest.raises(TrainError, match="in host memory only: use more stages"):
        allocate_host(2**50, pin=False)


def test_a_mistake_in_the_budget_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="The least that would do"):
        train(tmp_path, run="never", offload="4KiB")
    assert not (tmp_path / "never").exists()


KILLED = """
import os, signal, sys, torch
sys.path[:0] = {folders!r}
from pathlib import Path
from weft.offload.copy_engine import CopyEngine
import test_offload_runs as runs

count = 0

def torn(self, target, source, after):
    global count
    count += 1
    half = target.numel() // 2
    target[:half].copy_(source[:half])
    if count == 25:
        os.kill(os.getpid(), signal.SIGKILL)
    target.copy_(source)

CopyEngine.to_host = torn
runs.train(Path({folder!r}), run="killed", checkpoint_every=2, validation=4, offload=runs.BUDGET)
"""


def test_a_run_killed_in_the_middle_of_a_write_back_goes_on_with_another_budget(
    tmp_path: Path, alone: weft.TrainedRun
) -> None:
    script = KILLED.format(
        folders=[str(Path(__file__).parent), str(Path(stages.__file__).parent)], folder=str(tmp_path)
    )
    ended = subprocess.run([sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert any((tmp_path / "killed" / "checkpoints").iterdir())
    again = train(tmp_path, run="killed", checkpoint_every=2, validation=4, offload="80KiB", resume=True)
    assert 0 < events(again, "started")[-1]["at"] < 12
    assert again.fingerprint == alone.fingerprint


def test_two_processes_with_a_budget_each_give_the_bits_of_one_and_say_how_layers_came_and_went(
    tmp_path: Path, alone: weft.TrainedRun
) -> None:
    staged = {"stages": 2, "cut": (3,), "max_restarts": 0}
    found = train(tmp_path, run="two", validation=4, offload=weft.OffloadConfig("48KiB"), trace=True, **staged)
    assert found.fingerprint == alone.fingerprint
    told = events(found, "finished")[0]["offload"]
    assert len(told) == 2
    assert all(own["peak"] <= own["budget"] for own in told)
    trace = read_traces(found.path)
    first = trace.stages[0].memory
    assert {STATES[state] for state in first["state"]} == {"arriving", "resident", "leaving"}
    assert (first["resident"] + first["arriving"]).max() <= 48 * 1024
    tracks: dict[Any, list[str]] = {}
    for event in perfetto(trace)["traceEvents"]:
        if event["ph"] in ("b", "e"):
            tracks.setdefault(event["id"], []).append(event["ph"])
    assert set(tracks) >= {"0/embed", "1/out"}
    assert all(kinds == ["b", "e"] * (len(kinds) // 2) for kinds in tracks.values())


def test_a_config_gives_the_budget_and_no_part_of_it_is_compared_on_resume() -> None:
    from weft.cli.build import train_parts
    from weft.config import make_config
    from weft.data import digits
    from weft.supernet import initialise
    from weft.trainer.config import Execution, TrainConfig, resolve
    from weft.trainer.manifest import describe_run
    from weft.zoo import digits_conv

    config = make_config({"supernet": "digits-conv"}, ["--offload.budget=8GiB", "--offload.prefetch=4"])
    found = train_parts(config, Path())[1].offload
    assert found == weft.OffloadConfig("8GiB", prefetch=4)
    chain = initialise(digits_conv)
    step, data = resolve(TrainConfig(steps=1), chain), digits()
    without, with_offload = (describe_run(chain, data, step, Execution(offload=offload)) for offload in (None, found))
    assert without == with_offload
