"""The loss and the metrics of a mixed supernet, whose outputs are followed by the probabilities of all choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.data import Batch
from weft.elastic import Mixture
from weft.engine.train_step import Loss, Metric
from weft.search.targets import Target

Layout = tuple[tuple[str, int], ...]
"""Choices in the order of the vector of probabilities, with the number of their options."""


def outputs_of(seen: tuple[Tensor, ...]) -> Any:
    """The outputs of the network itself."""
    return seen[0] if len(seen) == 2 else seen[:-1]


def mixture_of(layout: Layout, vector: Tensor) -> Mixture:
    """The mixture of a vector of probabilities."""
    parts = torch.split(vector, [count for _, count in layout])
    return Mixture.unchecked(None, {name: part for (name, _), part in zip(layout, parts, strict=True)})


@dataclass(frozen=True)
class MixedLoss:
    """The user's loss plus a penalty for expected costs that are off their targets."""

    loss: Loss
    layout: Layout
    targets: Sequence[Target] = ()
    method: str = ""
    """The method that makes the probabilities: part of the manifest, so that a run is not resumed with another."""

    def __call__(self, seen: tuple[Tensor, ...], batch: Batch) -> Tensor:
        loss = self.loss(outputs_of(seen), batch)
        if self.targets and seen[-1].requires_grad:  # only steps that train the architecture
            mixture = mixture_of(self.layout, seen[-1])
            for target in self.targets:
                loss = loss + target.penalty(mixture).to(loss.dtype)
        return loss


@dataclass(frozen=True)
class MixedMetric:
    """A metric of the network's outputs."""

    metric: Metric

    def __call__(self, seen: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, float]:
        return self.metric(outputs_of(seen), batch)


@dataclass(frozen=True)
class Probabilities:
    """The probabilities of a step, for the log."""

    size: int

    def __call__(self, seen: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, float]:
        return seen[-1].detach(), 1.0
