"""TangleNAS's toy space of convolutions: four layers with a choice of channels and of kernel each, all entangled."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from torch import nn

from weft.elastic import BatchNorm2d, Conv2d, Dim, Sequential
from weft.errors import SupernetError
from weft.space import Space
from weft.supernet import Chain, Elastic, Shared

CHANNELS = ((8, 16, 32), (16, 32, 64), (32, 64, 128), (64, 128, 256))
KERNELS = (3, 5, 7)
LAST = 256


def conv_macro(classes: int = 10, size: int = 32, dropout: float = 0.5, norm: bool = False) -> Chain:
    """3^8 = 6,561 networks for colour images, 32 x 32 in the published table.

    The choices are ``channels1`` to ``channels4`` and ``kernel1`` to ``kernel4``. A fifth convolution, of 256 channels
    and 7 x 7 without full padding, and four linear layers are common to all. The published networks have no batch
    norms; ``norm`` puts one behind each of the four convolutions.
    """
    side = size // 4 - 2
    if side < 1:
        raise SupernetError(f"conv_macro halves images twice and then takes 2 pixels off: {size} is less than 12")
    space = Space()
    blocks: list[Shared | Elastic] = []
    inputs: Dim = 3
    for number, options in enumerate(CHANNELS, start=1):
        outputs = space.integer(f"channels{number}", options)
        kernel = space.integer(f"kernel{number}", KERNELS)
        drop = dropout if number == 3 else None
        made = partial(_layer, space, inputs, outputs, kernel, norm, drop, number in (2, 3))
        blocks.append(Elastic(space, f"conv{number}", made))
        inputs = outputs
    blocks.append(Elastic(space, "conv5", partial(_last, space, inputs, dropout)))
    return Chain(*blocks, Shared(partial(_head, LAST * side * side, classes), "head"))


def _layer(
    space: Space, inputs: Dim, outputs: Dim, kernel: Dim, norm: bool, dropout: float | None, pool: bool
) -> nn.Module:
    parts: list[nn.Module] = [Conv2d(space, inputs, outputs, kernel)]
    if norm:
        parts.append(BatchNorm2d(space, outputs))
    parts.append(nn.ReLU())
    if dropout is not None:
        parts.append(nn.Dropout2d(dropout))
    return Sequential(*parts, nn.MaxPool2d(2)) if pool else Sequential(*parts)


def _last(space: Space, inputs: Dim, dropout: float) -> nn.Module:
    return Sequential(Conv2d(space, inputs, LAST, 7, padding=2), nn.Dropout2d(dropout))


def _head(inputs: int, classes: int) -> nn.Module:
    sizes = (inputs, 256, 128, 64)
    hidden = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, classes))
