"""A supernet with its loss, metric and schedule, as config.toml names them: `mynet:build` and so on."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft


class Dense(nn.Module):
    """A residual layer with one of several bends."""

    def __init__(self, width: int, bend: str) -> None:
        super().__init__()
        self.linear, self.bend = nn.Linear(width, width), {"relu": torch.relu, "sine": torch.sin}[bend]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bend(self.linear(x))


def build(width: int = 16) -> weft.Chain:
    """Candidates are functions that make modules: their weights then depend on the run's seed and their name alone."""
    space = weft.Space()
    bends = {"relu": partial(Dense, width, "relu"), "sine": partial(Dense, width, "sine"), "skip": nn.Identity}
    return weft.Chain(
        weft.Shared(partial(nn.Linear, 2, width), "stem"),
        *[weft.Choice(space, f"layer{i}", bends) for i in range(4)],
        weft.Shared(partial(nn.Linear, width, 2), "head"),
    )


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["label"], label_smoothing=0.05)


def confidence(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    """A metric gives a sum and a count, so that micro-batches and batches add up."""
    return outputs.softmax(-1).amax(-1).sum(), len(outputs)


def schedule(step: int, steps: int) -> float:
    """The factor of the learning rate: full for half of the run, then down to nothing."""
    return min(1.0, 2.0 * (1.0 - step / steps))
