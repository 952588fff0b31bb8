"""DrNAS (Chen et al., 2021): probabilities are drawn from a Dirichlet distribution whose concentration is learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Gamma
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class DrNAS:
    """The concentration is elu(alpha) + 1; gradients pass through the draw. Without training, its mean."""

    name: str = "drnas"
    order: int = 1
    anneals: bool = False
    warm: ClassVar[float] = 0.3
    quick: ClassVar[bool] = True
    pick: ClassVar[str] = "missed"

    def __call__(self, alpha: Tensor, training: bool, progress: Tensor | None) -> Tensor:
        concentration = F.elu(alpha) + 1.0
        if not training:
            return concentration / concentration.sum()
        # A normalised draw of gammas is one of the Dirichlet distribution; checks would make a GPU wait.
        gammas = Gamma(concentration.clamp_min(1e-4), torch.ones_like(concentration), validate_args=False)
        drawn = gammas.rsample()
        return drawn / drawn.sum()
