"""Elastic norms: each token over the features that are within the pick."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from weft.space import Space, Subnet
from weft.supernet.elastic.leaf import Leaf, copied, load, prefix
from weft.supernet.elastic.mixture import Mixture, Pick
from weft.supernet.elastic.normalise import mixed_norm
from weft.supernet.elastic.sizes import Dim, Sizes


class LayerNorm(nn.LayerNorm, Leaf):
    """``nn.LayerNorm`` over the last dimension, of which a subnet uses the first features.

    Under a mixture it is the expectation, over the widths, of the norm over the first features padded by zeros: with
    the width settled, mean and variance are those of the features that there are.
    """

    def __init__(self, space: Space, width: Dim, eps: float = 1e-5, bias: bool = True) -> None:
        sizes = Sizes(space, width, what=f"LayerNorm({width})")
        super().__init__(sizes.largest[0], eps, bias=bias)
        self.sizes = sizes

    def forward(self, x: Tensor, pick: Pick) -> Tensor:  # type: ignore[override]
        if isinstance(pick, Mixture) and not self.sizes.is_fixed(0):
            chances = self.sizes.distribution(pick)
            return mixed_norm(x, self.weight, self.bias, chances, self.sizes.values[0], self.eps)
        (width,) = self.sizes.largest if isinstance(pick, Mixture) else self.sizes.of(pick)
        bias = None if self.bias is None else prefix(self.bias, width)
        return F.layer_norm(x, (width,), prefix(self.weight, width), bias, self.eps)

    def plain(self, subnet: Subnet) -> nn.Module:
        (width,) = self.sizes.of(subnet)
        bias = None if self.bias is None else copied(self.bias, width)
        made = nn.LayerNorm(width, self.eps, bias=bias is not None, device="meta", dtype=self.weight.dtype)
        return load(made, {"weight": copied(self.weight, width), "bias": bias}, self.training)


class RMSNorm(nn.RMSNorm, Leaf):
    """``nn.RMSNorm`` over the last dimension, of which a subnet uses the first features; mixtures as for LayerNorm."""

    eps: float

    def __init__(self, space: Space, width: Dim, eps: float = 1e-6) -> None:
        sizes = Sizes(space, width, what=f"RMSNorm({width})")
        super().__init__(sizes.largest[0], eps)
        self.sizes = sizes

    def forward(self, x: Tensor, pick: Pick) -> Tensor:  # type: ignore[override]
        if isinstance(pick, Mixture) and not self.sizes.is_fixed(0):
            chances = self.sizes.distribution(pick)
            return mixed_norm(x, self.weight, None, chances, self.sizes.values[0], self.eps, centred=False)
        (width,) = self.sizes.largest if isinstance(pick, Mixture) else self.sizes.of(pick)
        return F.rms_norm(x, (width,), prefix(self.weight, width), self.eps)

    def plain(self, subnet: Subnet) -> nn.Module:
        (width,) = self.sizes.of(subnet)
        made = nn.RMSNorm(width, self.eps, device="meta", dtype=self.weight.dtype)
        return load(made, {"weight": copied(self.weight, width)}, self.training)
