"""Objectives of the tests: each trial does what its choice `what` says."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.data import Data, Tensors, digits
from weft.tune import Trial


def act(trial: Trial) -> Any:
    """What the trial's value `what` names, or a parabola."""
    return globals()[str(trial.params.get("what", "parabola"))](trial)


def parabola(trial: Trial) -> float:
    """Three reports on the way to (x - 0.3)^2."""
    x = float(trial["x"])
    for step in (1, 2, 3):
        trial.report((x - 0.3) ** 2 + 1 / step, step)
    return (x - 0.3) ** 2


def counting(trial: Trial) -> float:
    """Ten steps, each reported and then kept; it kills itself once in the fourth if a file `kill` names it."""
    state = trial.directory / "state.json"
    at, total, lives = json.loads(state.read_text()) if trial.resumed else (0, 0.0, 0)
    lives += 1
    kill = _study(trial, "kill")
    while at < 10:
        total += float(trial["x"]) * (at + 1)
        at += 1
        if at == 4 and lives == 1 and kill.exists() and str(trial.number) in kill.read_text().split():
            os.kill(os.getpid(), signal.SIGKILL)
        trial.report(total, at)
        state.write_text(json.dumps([at, total, lives]))
    print(f"lives {lives}")
    return total


def slow(trial: Trial) -> float:
    """Says that it runs, then waits for a file `go`."""
    (trial.directory / "here").write_text(str(os.getpid()))
    while not _study(trial, "go").exists():
        time.sleep(0.02)
    return float(trial["x"])


def doomed(trial: Trial) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def starting(trial: Trial) -> float:
    """A process of its own, and then hangs."""
    started = subprocess.Popen(["sleep", "77"])
    (trial.directory / "started").write_text(str(started.pid))
    time.sleep(1000)
    return 0.0


def failing(trial: Trial) -> float:
    raise ValueError("the objective is wrong")


def leaving(trial: Trial) -> float:
    sys.exit(3)


def nothing(trial: Trial) -> None:
    return None


def nan(trial: Trial) -> float:
    return float("nan")


def text(trial: Trial) -> str:
    return "good"


def late(trial: Trial) -> float:
    """Reports after more steps than databases have room for."""
    trial.report(1.0, 2**31)
    return 1.0


def drawn(trial: Trial) -> float:
    """From the global generators, which nobody should use."""
    return float(np.random.rand()) + torch.rand(()).item()  # noqa: NPY002


def greedy(trial: Trial) -> float:
    """Runs out of memory as often as a file `.tries` says."""
    seen = trial.directory / "seen"
    tries = int(seen.read_text()) if seen.exists() else 0
    seen.write_text(str(tries + 1))
    if tries < int(_study(trial, ".tries").read_text()):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return float(tries)


def pid(trial: Trial) -> float:
    return float(os.getpid())


def leaking(trial: Trial) -> float:
    """From now on its process is taken to hold memory of its device."""
    import weft.tune.executors.worker as worker

    worker.has_leaked_memory = lambda device: True
    return float(os.getpid())


def printing(trial: Trial) -> float:
    print("to the file")
    os.write(2, b"even so\n")
    return 1.0


def perceptron(params: Mapping[str, Any]) -> nn.Module:
    """Four layers for 8 x 8 digits: the model of recipes."""
    width = int(params["width"])
    inner = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), *inner, nn.Linear(width, 10))


def quits(params: Mapping[str, Any]) -> nn.Module:
    if not params["width"]:
        sys.exit(3)
    return perceptron(params)


class Waves(nn.Module):
    """One row of many steps and hardly any weights: all but nothing of what it takes is what its forward keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image.flatten(1).repeat(1, 64)
        for _ in range(90):
            x = (x * self.rate).sin()
        out: torch.Tensor = self.head(x.unflatten(1, (64, 64)).mean(1))
        return out


def waves(params: Mapping[str, Any]) -> nn.Module:
    return Waves()


class Experts(nn.Module):
    """Each sample goes to the one that a gate says."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(64, 2), nn.ModuleList(nn.Linear(64, 10) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        gates, result = self.gate(x), x.new_zeros(len(x), 10)
        for number, expert in enumerate(self.experts):
            rows = (gates.argmax(1) == number).nonzero().squeeze(1)
            result = result.index_copy(0, rows, expert(x[rows]) * gates[rows, number, None])
        return result


def experts(params: Mapping[str, Any]) -> nn.Module:
    return Experts()


def few() -> Data:
    """Sixteen digits."""
    part = Tensors(**digits().train.take(np.arange(16)))
    return Data("few", part, part)


def _study(trial: Trial, name: str) -> Path:
    return trial.directory.parent.parent / name


@functools.lru_cache
def causal(size: int) -> torch.Tensor:
    return torch.ones(size, size).tril()


class Remembers(nn.Module):
    """Rows see those above, by a mask that is made once in a process."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(8, width), nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.enter(image.flatten(1, 2))
        out: torch.Tensor = self.head((causal(x.shape[1]) @ x).relu().mean(1))
        return out


def remembers(params: Mapping[str, Any]) -> nn.Module:
    return Remembers(int(params["width"]))
