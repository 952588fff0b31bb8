"""Elastic norms: BatchNorm2d over channels, LayerNorm and RMSNorm over features."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.elastic.mixture import Mixture, Pick
from weft.elastic.module import Leaf, contiguous_prefix, load
from weft.elastic.ops.norm import mixed_norm
from weft.elastic.sizes import Dim, Sizes
from weft.space import Space, Subnet


class BatchNorm2d(nn.BatchNorm2d, Leaf):
    """``nn.BatchNorm2d`` of which a subnet uses the first channels.

    Training moves the running statistics of the channels that it sees, and of no others.
    """

    weight: nn.Parameter
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, space: Space, channels: Dim, eps: float = 1e-5, momentum: float = 0.1) -> None:
        sizes = Sizes(space, channels, what=f"BatchNorm2d({channels})")
        super().__init__(sizes.largest[0], eps, momentum)
        self.sizes = sizes

    def forward(self, x: Tensor, pick: Pick) -> Tensor:  # type: ignore[override]
        self._check_input_dim(x)
        if isinstance(pick, Mixture):
            return self._mixed(x, pick)
        (channels,) = self.sizes.of(pick)
        weight, bias = contiguous_prefix(self.weight, channels), contiguous_prefix(self.bias, channels)
        return self._normalise(x, weight, bias, channels)

    def plain(self, subnet: Subnet) -> nn.Module:
        (channels,) = self.sizes.of(subnet)
        made = nn.BatchNorm2d(channels, self.eps, self.momentum, device="meta")
        tensors = {name: tensor[:channels] if tensor.dim() else tensor for name, tensor in self.state_dict().items()}
        return load(made, self.training, **tensors)

    def _mixed(self, x: Tensor, mixture: Mixture) -> Tensor:
        """Channels are normalised one by one, so the expectation is each of them times its probability."""
        if self.sizes.is_fixed(0):
            return self._normalise(x, self.weight, self.bias, self.num_features)
        probability = self.sizes.keep_probability(mixture).to(self.weight.dtype)
        moved = [self.running_mean, self.running_var] if self.training else []
        before = [buffer.clone() for buffer in moved]
        out = self._normalise(x, self.weight * probability, self.bias * probability, self.num_features)
        for buffer, old in zip(moved, before, strict=True):
            # What cannot be picked was not seen. Autograd has noted the buffer, though a training backward reads none.
            buffer.data.copy_(torch.where(probability.detach() > 0, buffer, old))
        return out

    def _normalise(self, x: Tensor, weight: Tensor, bias: Tensor, channels: int) -> Tensor:
        factor = self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:  # as a calibration sets it: the average over all batches
                factor = 1.0 / float(self.num_batches_tracked)
        # Parts of the buffers, in their memory: the statistics are written through them.
        mean, var = contiguous_prefix(self.running_mean, channels), contiguous_prefix(self.running_var, channels)
        return F.batch_norm(x, mean, var, weight, bias, self.training, factor or 0.0, self.eps)


# Elastic norms: each token over the features that are within the pick.


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
            probabilities = self.sizes.distribution(pick)
            return mixed_norm(x, self.weight, self.bias, probabilities, self.sizes.values[0], self.eps)
        (width,) = self.sizes.largest if isinstance(pick, Mixture) else self.sizes.of(pick)
        weight, bias = contiguous_prefix(self.weight, width), contiguous_prefix(self.bias, width)
        return F.layer_norm(x, (width,), weight, bias, self.eps)

    def plain(self, subnet: Subnet) -> nn.Module:
        (width,) = self.sizes.of(subnet)
        bias = contiguous_prefix(self.bias, width)
        made = nn.LayerNorm(width, self.eps, bias=bias is not None, device="meta", dtype=self.weight.dtype)
        return load(made, self.training, weight=contiguous_prefix(self.weight, width), bias=bias)


class RMSNorm(nn.RMSNorm, Leaf):
    """``nn.RMSNorm`` over the last dimension, of which a subnet uses the first features; mixtures as for LayerNorm."""

    eps: float

    def __init__(self, space: Space, width: Dim, eps: float = 1e-6) -> None:
        sizes = Sizes(space, width, what=f"RMSNorm({width})")
        super().__init__(sizes.largest[0], eps)
        self.sizes = sizes

    def forward(self, x: Tensor, pick: Pick) -> Tensor:  # type: ignore[override]
        if isinstance(pick, Mixture) and not self.sizes.is_fixed(0):
            probabilities = self.sizes.distribution(pick)
            return mixed_norm(x, self.weight, None, probabilities, self.sizes.values[0], self.eps, centred=False)
        (width,) = self.sizes.largest if isinstance(pick, Mixture) else self.sizes.of(pick)
        return F.rms_norm(x, (width,), contiguous_prefix(self.weight, width), self.eps)

    def plain(self, subnet: Subnet) -> nn.Module:
        (width,) = self.sizes.of(subnet)
        made = nn.RMSNorm(width, self.eps, device="meta", dtype=self.weight.dtype)
        return load(made, self.training, weight=contiguous_prefix(self.weight, width))
