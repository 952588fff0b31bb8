"""Trials on a few of the digits, as tests train them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import weft
from weft.data import Data, Source, Tensors, digits
from weft.runs import Checkpoints
from weft.tune.fusion.trainer import train_fused
from weft.tune.jobs import Fit
from weft.tune.recipe import Recipe, TrialConfig, trial_config
from weft.tune.training.trainer import Result, train

BATCH = 16
Told = list[tuple[int, tuple[float, ...]]]


class Killed(Exception):
    """Stands for the end of a process."""


@cache
def few() -> Data:
    """96 digits to train on, and 32 to validate on."""
    whole = digits()
    assert whole.validation is not None

    def first(part: Source, count: int) -> Tensors:
        return Tensors(**part.take(np.arange(count)))

    return Data("few", first(whole.train, 96), first(whole.validation, 32))


def recipe_of(model: Any, **fields: Any) -> Recipe:
    given: dict[str, Any] = {
        "data": few,
        "metrics": {"accuracy": weft.accuracy},
        "objectives": ("accuracy", "loss"),
        "steps": 12,
        "batch_size": BATCH,
        "report_every": 4,
        "optimizer_options": {"lr": 0.01},
    }
    return Recipe(model=model, **given | fields)


def config_of(model: Any, params: Mapping[str, Any] | None = None, **fields: Any) -> TrialConfig:
    return trial_config(recipe_of(model, **fields), params or {})


def fit_of(micro: int = BATCH, strategy: Any = "accumulate", batch: int = BATCH) -> Fit:
    return Fit(strategy, micro, -(-batch // micro), 1, 0, None, "a test says so")


def run(
    config: TrialConfig,
    folder: Path,
    fit: Fit | None = None,
    *,
    memory: int | None = None,
    prune_at: int | None = None,
    kill_at: int | None = None,
    device: str = "cpu",
) -> tuple[Result, Told]:
    """The result of a trial, and what it reported."""
    told: Told = []

    def report(step: int, values: tuple[float, ...]) -> bool:
        if step == kill_at:
            raise Killed
        told.append((step, values))
        return step == prune_at

    return train(config, fit, device=device, memory=memory, directory=folder, report=report), told


def run_fused(
    configs: list[TrialConfig],
    folder: Path,
    fit: Fit | None = None,
    report: Callable[[int, int, tuple[float, ...]], bool] = lambda *_: False,
    memory: int | None = None,
    device: str = "cpu",
) -> dict[int, Result | Literal["pruned"] | Any]:
    """The result of each of the trials, whose folders are the numbers."""
    ended: dict[int, Any] = {}
    folders = [folder / str(trial) for trial in range(len(configs))]
    train_fused(configs, fit, device=device, memory=memory, directories=folders, report=report, ended=ended.__setitem__)
    return ended


def saved(folder: Path, step: int | None = None) -> Mapping[str, Tensor]:
    """The tensors of a trial's checkpoint."""
    return Checkpoints(folder / "checkpoints").load(step).tensors


def check_same(one: Result, other: Result, mine: Path, its: Path) -> None:
    """Losses, values, the weights at the end and the optimizer's state at the last fifth step before."""
    assert (one.losses, one.values) == (other.losses, other.values)
    last = len(one.losses)
    for step in ((last - 1) // 5 * 5, last):
        tensors, wanted = saved(mine, step), saved(its, step)
        assert tensors.keys() == wanted.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, wanted[name]), name


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until something is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
