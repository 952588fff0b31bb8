"""The batches of a run: a loader by step, micro-batches by number, and the validation data."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Protocol

import torch

from weft.data import Batch, Data, IterableLoader, Loader, Source
from weft.engine.bilevel import BilevelLoader, with_progress
from weft.engine.train_step import TrainStep
from weft.errors import TrainError


class Batches(Protocol):
    """What gives the batches of steps in order."""

    def iterate(self, start: int, stop: int) -> Generator[Batch, None, None]: ...


class MicroBatches:
    """The micro-batches of a stage by number, each given out once: batches are read in order, schedules differ."""

    def __init__(self, loader: Batches, first: int, steps: int, m: int, split: Callable[[Batch], list[Batch]]) -> None:
        self._batches = loader.iterate(first, steps)
        self._split = split
        self._m = m
        self._next = first
        self._held: dict[int, list[Batch | None]] = {}

    def __call__(self, n: int) -> Batch:
        step, j = divmod(n, self._m)
        while self._next <= step:
            batch = next(self._batches)
            self._held[self._next] = list(self._split(batch))
            self._next += 1
        held = self._held.get(step)
        part = None if held is None else held[j]
        if held is None or part is None:
            raise TrainError(f"micro-batch {n} was asked for twice")
        held[j] = None
        if all(other is None for other in held):
            del self._held[step]
        return part

    def close(self) -> None:
        self._batches.close()


def make_loader(
    data: Data, config: TrainStep, device: torch.device, workers: int = 0
) -> Loader | IterableLoader | BilevelLoader:
    """The batches of a run by step; a foreign loader of training data is taken as it is."""

    def loader(source: Source) -> Loader:
        return Loader(source, config.batch_size, config.seed, augment=config.augment, workers=workers, device=device)

    train = data.train if isinstance(data.train, IterableLoader) else loader(data.train)
    if config.architecture_search is None:
        return train
    if data.validation is None:
        raise TrainError(
            "architecture parameters learn on validation data, and this data set has none: split some off it"
        )
    return BilevelLoader(config.architecture_search, train, loader(data.validation), config.steps)


def validation_batches(loader: Loader, config: TrainStep, step: int) -> Iterator[Batch]:
    """The batches of validation data, with how far the run has come where a chain with an architecture may ask."""
    batches = loader.all()
    if config.architecture_search is None:
        return batches
    return (with_progress(batch, step / config.steps) for batch in batches)
