"""Runs that are interrupted or killed in the middle of anything, in processes of their own, and go on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weft

SCRIPT = """
import json, os, sys, time
from functools import partial
import torch
from torch import nn
import weft
from weft import Optimizer
from weft.engine.losses import mean_squared_error
torch.set_num_threads(1)
p = nn.Parameter(torch.zeros(1))
p.grad = torch.zeros(1)
torch.optim.AdamW([p]).step()  # torch imports much when its first optimizer runs: once here, and not in every child

def build():
    space = weft.Space()
    layer = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))
    blocks = [weft.Choice(space, f"b{i}", {"p": layer, "q": layer}) for i in range(3)]
    ends = [weft.Shared(partial(nn.Linear, 4, 4), name) for name in ("stem", "head")]
    return weft.Chain(ends[0], *blocks, ends[1])

def train(pause, **more):
    generator = torch.Generator().manual_seed(0)
    data = {key: torch.randn(40, 4, generator=generator) for key in "xy"}
    def watch(event):
        if event["event"] in ("step", "started"):
            say(event.get("step", -1))
            time.sleep(pause)
    return weft.train(
        build, data, steps=24, batch_size=8, microbatches=2, loss=mean_squared_error, stream="iid", checkpoint_every=2,
        consistency={"shared": "lagged(3)", "b0": "delayed(2)", "b1": "bounded(4,4)"},
        optimizer=Optimizer("adamw", lr=0.01),
        callbacks=[watch], resume=True, **more)

def say(value):
    os.write(1, (json.dumps(value) + "\\n").encode())

for line in sys.stdin:
    task = json.loads(line)
    pid = os.fork()
    if pid == 0:
        say({"pid": os.getpid()})
        try:
            say({"fingerprint": train(**task).fingerprint})
        except BaseException as error:
            say({"error": type(error).__name__, "text": str(error)})
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    say({"end": os.waitstatus_to_exitcode(status)})
"""


class Trainings:
    """An interpreter that has imported torch forks a child for each training, whose words come back line by line."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = 0

    def start(self, runs: Path, run: str, pause: float = 0.0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"folder": str(runs), "run": run, "pause": pause}).encode() + b"\n")
        self.process.stdin.flush()
        self.pid = self.hear()["pid"]

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def finish(self) -> tuple[dict[str, Any], int]:
        """What the child said apart from its steps, and its exit status (-9 if killed)."""
        said: dict[str, Any] = {}
        while True:
            heard = self.hear()
            if isinstance(heard, dict):
                if "end" in heard:
                    return said, heard["end"]
                said |= heard


@pytest.fixture(scope="module")
def trainings() -> Iterator[Trainings]:
    home = Trainings()
    yield home
    assert home.process.stdin is not None
    home.process.stdin.close()
    home.process.wait(30)


@pytest.fixture(scope="module")
def undisturbed(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> str:
    trainings.start(tmp_path_factory.mktemp("whole"), "whole")
    said, end = trainings.finish()
    assert end == 0, said
    return str(said["fingerprint"])


@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_three_times_at_random_moments_ends_as_if_nothing_had_happened(
    trainings: Trainings, undisturbed: str, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    killed = 0
    while killed < 3:
        trainings.start(tmp_path, "x", pause=0.01)
        assert trainings.hear() == -1  # it has started
        time.sleep(draw.uniform(0.0, 0.15))
        os.kill(trainings.pid, signal.SIGKILL)
        _, end = trainings.finish()
        assert end == -signal.SIGKILL
        killed += 1
    trainings.start(tmp_path, "x")
    said, end = trainings.finish()
    assert end == 0, said
    assert said["fingerprint"] == undisturbed
    steps = [e["step"] for e in weft.Run.open(tmp_path / "x").events.read() if e["event"] == "step"]
    assert steps == list(range(24))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_finishes_the_step_writes_a_checkpoint_and_the_run_can_go_on(
    trainings: Trainings, undisturbed: str, tmp_path: Path, number: signal.Signals
) -> None:
    trainings.start(tmp_path, "x", pause=0.02)
    step = -1
    while step < 8:
        step = trainings.hear()
    os.kill(trainings.pid, number)
    said, end = trainings.finish()
    assert end == 0
    assert said["error"] == "KeyboardInterrupt"
    run = weft.Run.open(tmp_path / "x")
    assert run.state() == "stopped"
    last = list(run.events.read())[-1]
    assert last["event"] == "stopped"
    assert 9 <= last["at"] < 24
    assert run.checkpoints.steps()[-1] == last["at"]
    trainings.start(tmp_path, "x")
    said, _ = trainings.finish()
    assert said["fingerprint"] == undisturbed


def test_a_second_ctrl_c_stops_at_once_and_the_run_can_go_on(
    trainings: Trainings, undisturbed: str, tmp_path: Path
) -> None:
    trainings.start(tmp_path, "x", pause=0.2)
    step = -1
    while step < 3:
        step = trainings.hear()
    os.kill(trainings.pid, signal.SIGINT)
    time.sleep(0.05)
    os.kill(trainings.pid, signal.SIGINT)
    said, end = trainings.finish()
    assert end == 0
    assert said["error"] == "KeyboardInterrupt"
    trainings.start(tmp_path, "x")
    said, _ = trainings.finish()
    assert said["fingerprint"] == undisturbed


def test_two_processes_cannot_train_one_run(trainings: Trainings, undisturbed: str, tmp_path: Path) -> None:
    trainings.start(tmp_path, "x", pause=20.0)  # so that it still runs when the other one has been refused
    assert trainings.hear() == -1
    other = Trainings()
    try:
        other.start(tmp_path, "x")
        said, _ = other.finish()
        assert said["error"] == "RunError"
    finally:
        assert other.process.stdin is not None
        other.process.stdin.close()
        other.process.wait(30)
    os.kill(trainings.pid, signal.SIGKILL)
    trainings.finish()
    trainings.start(tmp_path, "x")
    said, _ = trainings.finish()
    assert said["fingerprint"] == undisturbed
