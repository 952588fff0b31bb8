"""The losses of the methods of `paci.py`, each by the reference on one device: two processes have the same bits."""

from __future__ import annotations

import os
import statistics
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch
from paci_task import RANKS, Steps, Task
from paci_weft import KINDS

import weft
from weft.engine.reference import SequentialReference
from weft.engine.rng import deterministic
from weft.engine.train_step import TrainStep
from weft.space import Fixed

FLUSH = "weft-flush"
"""Whose losses all methods with a flush have: those of the method whose steps see all earlier updates."""

TARGET_AT = 0.8
"""The target is what our flush at the largest K has reached after this share of the micro-batches."""

Key = TypeVar("Key", bound=Hashable)


def curve(task: Task, method: str, k: int) -> list[float]:
    """The losses of a whole run."""
    chain = task.built()
    kind = KINDS[method.removeprefix("weft-")]
    steps = task.microbatches // k
    config = TrainStep(
        steps=steps,
        stream=Fixed(chain.space, chain.largest()),
        consistency=dict.fromkeys(chain.layers, kind.consistency(k, RANKS)),
        microbatches=k,
        loss=weft.cross_entropy,
        optimizer=task.optimizer(k),
        seed=task.seed,
    )
    run = SequentialReference(chain, config, torch.device("cpu"))
    run.train_mode()
    found: list[float] = []
    with deterministic(torch.device("cpu")):
        for step, batch in enumerate(Steps(task.draw(), task.rows * k).iterate(0, steps)):
            found += [float(loss) for loss in run.step(step, batch).losses]
    return found


def curves(jobs: Mapping[Key, tuple[Task, str, int]]) -> dict[Key, list[float]]:
    """Several of them, on as many cores as there are: nothing is timed."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn"), _begin) as pool:
        found = {key: pool.submit(curve, *job) for key, job in jobs.items()}
        return {key: each.result() for key, each in found.items()}


def _begin() -> None:
    torch.set_num_threads(1)


def target_of(losses: Sequence[float], over: int) -> float:
    """A loss that all reach: what a flush has reached late at the largest K, which makes the fewest updates."""
    n = round(TARGET_AT * len(losses))
    return statistics.mean(losses[n - over : n])


def reached(losses: Sequence[float], target: float, over: int) -> int | None:
    """The first micro-batch with which the mean loss of the last ``over`` is at most the target."""
    total = 0.0
    for n, loss in enumerate(losses):
        total += loss - (losses[n - over] if n >= over else 0.0)
        if n + 1 >= over and total / over <= target:
            return n
    return None
