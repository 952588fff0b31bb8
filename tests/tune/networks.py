"""Small networks for the digits, for tests of how a trial trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def mlp(params: Mapping[str, Any]) -> nn.Module:
    drop = nn.Dropout(params.get("dropout", 0.3))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, params.get("width", 24)), nn.ReLU(), drop, nn.Linear(24, 10))


def conv(params: Mapping[str, Any]) -> nn.Module:
    body = [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(4, 6, 3, 2)]
    return nn.Sequential(*body, nn.ReLU(), nn.Flatten(), nn.Linear(24, 10))


class Transformer(nn.Module):
    """Rows of the image as tokens, at frozen positions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(8, 16), nn.Linear(16, 10)
        self.places = nn.Parameter(torch.randn(8, 16), requires_grad=False)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.enter(image.flatten(1, 2)) + self.places).mean(1))
        return out


def transformer(params: Mapping[str, Any]) -> nn.Module:
    return Transformer(params.get("dropout", 0.1))


class Tied(nn.Module):
    """The same weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.one, self.two, self.head = (nn.Linear(*n) for n in ((64, 16), (16, 16), (16, 16), (16, 10)))
        self.two.weight = self.one.weight

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.two(self.one(self.enter(image.flatten(1))).relu()))
        return out


class Idle(nn.Module):
    """One of its layers gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.spare = nn.Linear(64, 10), nn.Linear(3, 3)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(image.flatten(1))
        return out


class Between(nn.Module):
    """Two layers, and between them what a test makes of it."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.prepare(params)

    def prepare(self, params: Mapping[str, Any]) -> None: ...

    def between(self, x: Tensor) -> Tensor:
        return x.relu()

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.between(self.enter(image.flatten(1))))
        return out


def between(function: Callable[[Any, Tensor], Tensor], **attributes: Callable[[Mapping[str, Any]], Any]) -> Any:
    """A kind of model with that between its layers, and attributes that follow from a trial's values."""

    class Made(Between):
        def prepare(self, params: Mapping[str, Any]) -> None:
            for name, make in attributes.items():
                setattr(self, name, make(params))

        def between(self, x: Tensor) -> Tensor:
            return function(self, x)

    return Made


class CachesTable(Between):
    """A tensor that the first forward makes."""

    table: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 16, device=x.device)
        return x.relu() * self.table
