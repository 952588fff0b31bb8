"""GDAS (Dong and Yang, 2019): one option of each choice is drawn by the Gumbel trick; gradients go straight through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GDAS:
    """The temperature falls from ``first`` to ``last`` as the run goes on."""

    first: float = 10.0
    last: float = 0.1
    name: str = "gdas"
    order: int = 1
    anneals: bool = True
    warm: ClassVar[float] = 0.3
    quick: ClassVar[bool] = True

    def __call__(self, alpha: Tensor, training: bool, progress: Tensor | None) -> Tensor:
        if not training:
            return torch.softmax(alpha, 0)
        temperature = self.first + (self.last - self.first) * (0.0 if progress is None else progress)
        noise = -torch.empty_like(alpha).exponential_().clamp_min(1e-20).log()
        soft = torch.softmax((torch.log_softmax(alpha, 0) + noise) / temperature, 0)
        hard = torch.zeros_like(soft).scatter(0, soft.argmax(0, keepdim=True), 1.0)
        return hard - soft.detach() + soft
