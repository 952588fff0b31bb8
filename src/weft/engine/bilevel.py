"""Two levels in one run: steps that train weights on the training data, and steps that train the architecture on
validation data."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.data import Batch, IterableLoader, Loader
from weft.errors import TrainError
from weft.pipeline.optimizer import Optimizer
from weft.supernet.mixed import PROGRESS

TRAINING = "train."
"""What the entries of the training batch are called in a batch that holds both, as the second order needs it."""


def _adam() -> Optimizer:
    return Optimizer("adam", lr=3e-3, betas=(0.5, 0.999), weight_decay=1e-3)


@dataclass(frozen=True)
class Bilevel:
    """How the levels alternate: ``warmup`` steps for the weights alone, then of every ``every`` steps the last is for
    the architecture. Its parameters learn by ``optimizer``, at a rate that stays as it is."""

    optimizer: Optimizer = field(default_factory=_adam)
    warmup: int = 0
    every: int = 2
    order: int = 1
    """2: the architecture's gradient looks one step of the weights ahead, as in second-order DARTS."""

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.every < 2 or self.order not in (1, 2):
            raise TrainError(
                f"bilevel needs warmup >= 0, every >= 2 and order 1 or 2, not {self.warmup}, {self.every}, {self.order}"
            )

    def architecture(self, step: int) -> bool:
        """Whether the step trains the architecture."""
        return step >= self.warmup and (step - self.warmup) % self.every == self.every - 1

    def before(self, step: int) -> tuple[int, int]:
        """How many steps before this one trained the weights, and how many the architecture."""
        found = max(step - self.warmup, 0) // self.every
        return step - found, found

    def describe(self) -> dict[str, Any]:
        """For a run's manifest."""
        told = self.optimizer.describe()
        return {"optimizer": told, "warmup": self.warmup, "every": self.every, "order": self.order}


class Alternating:
    """The batches of both levels by step, each with how far the run has come."""

    def __init__(self, bilevel: Bilevel, train: Loader | IterableLoader, held: Loader, steps: int) -> None:
        self._bilevel, self._train, self._held, self._steps = bilevel, train, held, steps

    def batch(self, i: int) -> Batch:
        """The batch of step i, prepared here and now."""
        weights, architecture = self._bilevel.before(i)
        if not self._bilevel.architecture(i):
            return self._marked(self._train.batch(weights), i)
        batch = self._held.batch(architecture)
        if self._bilevel.order == 2:
            batch = _both(batch, self._train.batch(weights))
        return self._marked(batch, i)

    def iterate(self, start: int = 0, stop: int | None = None) -> Generator[Batch, None, None]:
        """The batches of the steps from ``start`` on, prepared ahead."""
        weights, architecture = self._bilevel.before(start)
        train, held = self._train.iterate(weights), self._held.iterate(architecture)
        ahead: Batch | None = None  # the training batch that a second-order step has looked at already
        try:
            for i in range(start, self._steps if stop is None else stop):
                if not self._bilevel.architecture(i):
                    batch, ahead = ahead or next(train), None
                else:
                    batch = next(held)
                    if self._bilevel.order == 2:
                        ahead = next(train)
                        batch = _both(batch, ahead)
                yield self._marked(batch, i)
        finally:
            train.close()
            held.close()

    def _marked(self, batch: Batch, i: int) -> Batch:
        return marked(batch, i / self._steps)


def marked(batch: Batch, progress: float) -> Batch:
    """The batch with how far the run has come, from 0 to 1."""
    first = next(iter(batch.values()))
    return {**batch, PROGRESS: torch.full((len(first),), progress, device=first.device)}


def _both(batch: Batch, train: Batch) -> Batch:
    return {**batch, **{f"{TRAINING}{name}": tensor for name, tensor in train.items()}}


def training_part(batch: Batch) -> Batch:
    """The training batch within one that holds both."""
    found = {name.removeprefix(TRAINING): value for name, value in batch.items() if name.startswith(TRAINING)}
    return {**found, PROGRESS: batch[PROGRESS]}
