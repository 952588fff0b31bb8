"""Two small convolutional spaces, and the modules that the zoo's convolutional spaces share."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from weft.elastic import BatchNorm2d, Conv2d, Dim, Sequential
from weft.errors import SupernetError
from weft.space import Space
from weft.supernet import Chain, Choice, Elastic, Shared


def conv_norm(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, relu: bool = True
) -> nn.Sequential:
    """Convolution without bias, batch norm and, by default, ReLU; keeps height and width at stride 1."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, nn.ReLU()) if relu else nn.Sequential(*layers)


def pooled_linear(channels: int, classes: int) -> nn.Sequential:
    """The mean over height and width, and a score for each class."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Residual(nn.Module):
    """The input plus what the body makes of it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


def inverted_residual(inputs: int, outputs: int, kernel: int, expansion: int, stride: int) -> nn.Module:
    """MobileNetV2's block: expand, depthwise, project; a shortcut where the shapes agree."""
    hidden = inputs * expansion
    body = nn.Sequential(
        conv_norm(inputs, hidden, 1),
        conv_norm(hidden, hidden, kernel, stride, groups=hidden),
        conv_norm(hidden, outputs, 1, relu=False),
    )
    return Residual(body) if stride == 1 and inputs == outputs else body


# A space for 8 x 8 images that trains in seconds on a CPU: scikit-learn's digits, the demo and the tests.


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
        "conv3": partial(_conv, width, 3),
        "conv5": partial(_conv, width, 5),
    }


def _separable(width: int, kernel: int) -> nn.Module:
    return Residual(nn.Sequential(conv_norm(width, width, kernel, groups=width), conv_norm(width, width, 1)))


def _conv(width: int, kernel: int) -> nn.Module:
    return Residual(conv_norm(width, width, kernel))


def _flat(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())


def _mlp(width: int, hidden: int) -> nn.Module:
    return Residual(nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)))


# TangleNAS's toy space of convolutions: four layers with a choice of channels and of kernel each, all entangled.

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
