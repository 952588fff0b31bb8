"""A space for 8 x 8 images that trains in seconds on a CPU: scikit-learn's digits, the demo and the tests."""

from __future__ import annotations

from functools import partial

from torch import nn

from weft.space import Space
from weft.supernet import Chain, Choice, Shared
from weft.zoo.layers import Residual, conv_norm, pooled_linear


def digits_conv(blocks: int = 6, width: int = 16, classes: int = 10) -> Chain:
    """``blocks`` choices between a skip, separable, plain and wide convolutions; the resolution halves in the
    middle."""
    space = Space()
    half = blocks // 2
    chain: list[Shared | Choice] = [Shared(partial(conv_norm, 1, width, 3), "stem")]
    for index in range(blocks):
        if index == half:
            chain.append(Shared(partial(conv_norm, width, 2 * width, 3, 2), "reduce"))
        chain.append(Choice(space, f"block{index}", _candidates(width if index < half else 2 * width)))
    return Chain(*chain, Shared(partial(pooled_linear, 2 * width, classes), "head"))


def digits_mlp(blocks: int = 4, width: int = 64, classes: int = 10) -> Chain:
    """Fully connected: each block a residual layer of one of three hidden sizes, or nothing."""
    space = Space()
    chain: list[Shared | Choice] = [Shared(partial(_flat, width), "stem")]
    for index in range(blocks):
        sizes = {f"hidden{hidden}": partial(_mlp, width, hidden) for hidden in (32, 64, 128)}
        chain.append(Choice(space, f"block{index}", {"skip": nn.Identity, **sizes}))
    return Chain(*chain, Shared(partial(nn.Linear, width, classes), "head"))


def _candidates(width: int) -> dict[str, partial[nn.Module] | type[nn.Module]]:
    return {
        "skip": nn.Identity,
        "separable3": partial(_separable, width, 3),
        "conv3": partial(_convolution, width, 3),
        "conv5": partial(_convolution, width, 5),
    }


def _separable(width: int, kernel: int) -> nn.Module:
    return Residual(nn.Sequential(conv_norm(width, width, kernel, groups=width), conv_norm(width, width, 1)))


def _convolution(width: int, kernel: int) -> nn.Module:
    return Residual(conv_norm(width, width, kernel))


def _flat(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())


def _mlp(width: int, hidden: int) -> nn.Module:
    return Residual(nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)))
