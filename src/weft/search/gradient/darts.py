"""DARTS (Liu et al., 2019): a softmax over the options of each choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Darts:
    """First order, or second (``order=2``), where the architecture's gradient looks one step of the weights ahead."""

    order: int = 1
    name: str = "darts"
    anneals: bool = False
    pick: ClassVar[str] = "missed"

    def __call__(self, alpha: Tensor, training: bool, progress: Tensor | None) -> Tensor:
        return torch.softmax(alpha, 0)
