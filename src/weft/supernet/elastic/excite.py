"""Squeeze and excite: channels weighed by what the whole image says."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from weft.space import Space
from weft.supernet.elastic.conv import Conv2d
from weft.supernet.elastic.leaf import Module
from weft.supernet.elastic.mixture import Pick
from weft.supernet.elastic.sizes import Dim


class SqueezeExcite(Module):
    """Multiplies each channel by a gate, MobileNetV3's: pooled, reduced, ReLU, expanded, hard sigmoid."""

    def __init__(self, space: Space, channels: Dim, reduced: Dim) -> None:
        super().__init__()
        self.reduce = Conv2d(space, channels, reduced, 1)
        self.expand = Conv2d(space, reduced, channels, 1)

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        pooled = F.adaptive_avg_pool2d(x, 1)
        gate = F.hardsigmoid(self.expand(F.relu(self.reduce(pooled, pick=pick)), pick=pick))
        return x * gate
