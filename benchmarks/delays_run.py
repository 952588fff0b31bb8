"""One run of the grid of `delays.py`, and many of them beside each other on one device."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import weft
from weft.data import Data, text
from weft.errors import WeftError
from weft.zoo import language_model

CLIP = 0.05
"""The norm that the gradients of a layer are cut to, for `adamw-clipped`."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model with its batches, the same in every cell."""

    layers: int = 14
    width: int = 64
    heads: int = 4
    context: int = 64
    batch: int = 64
    steps: int = 300

    @property
    def blocks(self) -> int:
        return self.layers + 2


@dataclass(frozen=True, slots=True)
class Job:
    """One cell with one seed. ``flush`` and ``lagged`` have neither a depth nor a K: their step is one micro-batch."""

    optimizer: str
    lr: float
    method: str
    depth: int | None
    k: int | None
    seed: int
    steps: int

    @property
    def id(self) -> tuple[Any, ...]:
        return self.optimizer, self.lr, self.method, self.depth, self.k, self.seed, self.steps

    @property
    def consistency(self) -> str:
        named = {"flush": "exact", "lagged": "lagged(1)"}
        return named.get(self.method) or f"{self.method}({self.k}, {self.depth})"


def identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The ``id`` of the job that made a row."""
    return tuple(row[name] for name in ("optimizer", "lr", "method", "depth", "k", "seed", "steps"))


def optimizer(name: str, lr: float, **schedule: Any) -> weft.Optimizer:
    adamw = partial(weft.Optimizer, "adamw", lr=lr, betas=(0.9, 0.95), weight_decay=0.1, groups="matrices")
    if name == "nadam":  # with the long memory that asynchronous pipelines are published with
        long: dict[str, Any] = {"betas": (0.99, 0.999), "decoupled_weight_decay": True}
        return weft.Optimizer("nadam", lr=lr, weight_decay=0.1, groups="matrices", **long, **schedule)
    if name == "muon":  # its steps are made as long as AdamW's, so that one rate does for both
        own: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"}
        return weft.Optimizer("muon", lr=lr, weight_decay=0.1, others=adamw(), **own, **schedule)
    return adamw(**schedule)


class Log:
    """What the events of a run say of its losses and its drift."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validation = float("nan")
        self.version_lags: dict[str, dict[str, int]] = {}

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            self.losses.append(event["loss"])
        elif event["event"] == "validation":
            self.validation = event["scores"]["loss"]
        elif event["event"] == "finished":
            self.version_lags = event["version_lag"]

    def drift(self, backwards: int) -> float:
        """By how many updates backwards were ahead of their forwards, on the mean over all of them."""
        ahead = sum(int(drift) * count for layer in self.version_lags.values() for drift, count in layer.items())
        return ahead / backwards


def measure(job: Job, data: Data, size: Size, device: str) -> dict[str, Any]:
    """One row; ``val_loss`` is None where the run did not stay finite."""
    log, began = Log(), time.perf_counter()
    sizes: dict[str, Any] = {"context": size.context, "width": size.width, "layers": size.layers, "heads": size.heads}
    row = {"optimizer": job.optimizer, "lr": job.lr, "method": job.method, "depth": job.depth, "k": job.k}
    row |= {"seed": job.seed, "val_loss": None, "train_loss": None, "steps": job.steps}
    try:
        with tempfile.TemporaryDirectory() as folder:
            weft.train(
                partial(language_model, data.info["size"], dropout=0.0, **sizes),
                data,
                steps=job.steps,
                batch_size=size.batch,
                microbatches=job.k or 1,
                optimizer=optimizer(
                    job.optimizer,
                    job.lr,
                    schedule="cosine:0.1",
                    warmup_steps=job.steps // 15,
                    clip=CLIP if job.optimizer == "adamw-clipped" else None,
                ),
                consistency=job.consistency,
                validation=weft.Validation(job.steps, random=0, batch_size=256, bn_batches=0),
                device=device,
                seed=job.seed,
                callbacks=[log],
                folder=folder,
                checkpoint_every=job.steps,
                keep_checkpoints=1,
            )
    except WeftError as problem:
        return {**row, "failed": str(problem), "seconds": time.perf_counter() - began, "drift_mean": None}
    tail = log.losses[-max(job.steps // 10, 1) :]
    row |= {"val_loss": log.validation, "train_loss": sum(tail) / len(tail), "seconds": time.perf_counter() - began}
    return {**row, "drift_mean": log.drift(size.blocks * (job.k or 1) * job.steps)}


def read(path: str, size: Size) -> Data:
    """The text, of which the last tenth validates in windows that do not overlap."""
    return text(size.context, path, 1, split=(0.9, 0.1), validation_stride=size.context)


_HERE: dict[str, Any] = {}


def _enter(path: str, size: Size, device: str) -> None:
    logging.getLogger("weft").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    _HERE.update(data=read(path, size).to(device), size=size, device=device)


def _do(job: Job) -> dict[str, Any]:
    return measure(job, **_HERE)


class Workers:
    """Processes that measure beside each other; no job is begun once the time is up."""

    def __init__(self, options: argparse.Namespace, size: Size) -> None:
        self._end = None if options.seconds is None else time.monotonic() + options.seconds
        self._pool = ProcessPoolExecutor(
            options.workers,
            multiprocessing.get_context("spawn"),
            _enter,
            (options.data, size, options.device),
        )

    def rows(self, jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
        """A row for each job as it comes; they are begun in order."""
        futures: list[Future[dict[str, Any]]] = [self._pool.submit(_do, job) for job in jobs]
        for future in as_completed(futures):
            if not future.cancelled():
                yield future.result()
            if self.late:
                for waiting in futures:
                    waiting.cancel()

    @property
    def late(self) -> bool:
        return self._end is not None and time.monotonic() > self._end

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
