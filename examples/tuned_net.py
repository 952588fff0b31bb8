"""The network that tune.toml tunes: `tuned_net:build` makes it from the values of a trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def build(params: Mapping[str, Any]) -> nn.Module:
    """A plain perceptron on 8 x 8 images, as wide and as deep as the trial says."""
    width, depth = params["width"], params["depth"]
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))
