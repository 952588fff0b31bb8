"""Data with an augmentation of its own, as config.toml names them: `mydata:load` and `mydata:Jitter`."""

from __future__ import annotations

import math

import torch

import weft
from weft.data import Batch, Draws, split


def load(samples: int = 1200, seed: int = 0) -> weft.Data:
    """Points (x, y) on two spirals, with the number of their spiral."""
    dice = torch.Generator().manual_seed(seed)
    label = torch.arange(samples) % 2
    along = torch.rand(samples, generator=dice).sqrt() * 3.0
    angle = along * math.pi / 1.5 + label * math.pi
    point = torch.stack((angle.cos(), angle.sin()), 1) * along[:, None]
    point += 0.08 * torch.randn(samples, 2, generator=dice)
    train, validation, test = split(weft.Tensors(point=point, label=label), (0.6, 0.2, 0.2), seed, stratify="label")
    return weft.Data("spirals", train, validation, test, {"classes": 2})


class Jitter:
    """Moves every point a little; the draws belong to the sample and the epoch, so a run is the same each time."""

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        shift = torch.from_numpy(draws.uniform("shift", (2,)) - 0.5).float()
        return {**batch, "point": batch["point"] + 0.1 * shift}
