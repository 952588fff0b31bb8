"""Once-for-all's MobileNetV3: five stages of two to four inverted residuals, each with its kernel and expansion.

Cai et al., "Once for All: Train One Network and Specialize it for Efficient Deployment", ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from weft.elastic import BatchNorm2d, Conv2d, Dim, Module, Pick, Sequential, SqueezeExcite
from weft.space import Expr, Space, maximum
from weft.supernet import Chain, Elastic, Shared
from weft.zoo.convolutions import Residual, conv_norm

# Width, stride of the first block, activation, squeeze and excite.
STAGES: tuple[tuple[int, int, type[nn.Module], bool], ...] = (
    (24, 2, nn.ReLU, False),
    (40, 2, nn.ReLU, True),
    (80, 2, nn.Hardswish, False),
    (112, 1, nn.Hardswish, True),
    (160, 2, nn.Hardswish, True),
)
STEM, EXPANDED, LAST = 16, 960, 1280


def ofa_mobilenet_v3(
    classes: int = 1000,
    width: float = 1.0,
    kernels: Sequence[int] = (3, 5, 7),
    expansions: Sequence[int] = (3, 4, 6),
    depths: Sequence[int] = (2, 3, 4),
    dropout: float = 0.1,
) -> Chain:
    """The published space, (9^2 + 9^3 + 9^4)^5, about 2.2e19, for images of 3 x 224 x 224 or other multiples of 32.

    Smaller kernels are the centres of larger ones, without the matrices that once-for-all learns in between. A
    ``width`` of 1.2 is its wider variant; all widths are rounded to multiples of 8.
    """
    space = Space()
    channels = divisible(STEM * width)
    blocks: list[Shared | Elastic] = [
        Shared(partial(_conv, 3, channels, 3, 2), "stem"),
        Shared(partial(_first, channels), "first"),
    ]
    for number, (outputs, stride, activation, excite) in enumerate(STAGES, start=1):
        outputs = divisible(outputs * width)
        depth = space.integer(f"depth{number}", depths)
        for index in range(max(depths)):
            when = None if index < min(depths) else depth > index
            kernel = space.integer(f"kernel{number}_{index}", kernels, when=when)
            expansion = space.integer(f"expand{number}_{index}", expansions, when=when)
            step = stride if index == 0 else 1
            made = partial(InvertedResidual, space, channels, outputs, kernel, expansion, step, activation, excite)
            blocks.append(Elastic(space, f"stage{number}_{index}", made, when=when))
            channels = outputs
    wide, last = divisible(EXPANDED * width), divisible(LAST * width)
    return Chain(*blocks, Shared(partial(_head, channels, wide, last, classes, dropout), "head"))


class InvertedResidual(Module):
    """MobileNet's block: expand, depthwise, squeeze and excite or not, project; a shortcut where the shapes agree."""

    def __init__(
        self,
        space: Space,
        inputs: int,
        outputs: int,
        kernel: Dim,
        expansion: Dim,
        stride: int,
        activation: Callable[[], nn.Module] = nn.ReLU,
        excite: bool = False,
    ) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.body = Sequential(
            Conv2d(space, inputs, hidden, 1, bias=False),
            BatchNorm2d(space, hidden),
            activation(),
            Conv2d(space, hidden, hidden, kernel, stride, "depthwise", bias=False),
            BatchNorm2d(space, hidden),
            activation(),
            *([SqueezeExcite(space, hidden, _rounded(hidden // 4))] if excite else []),
            Conv2d(space, hidden, outputs, 1, bias=False),
            BatchNorm2d(space, outputs),
        )
        self._shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        out: Tensor = self.body(x, pick=pick)
        return x + out if self._shortcut else out


def divisible(channels: float) -> int:
    """The nearest multiple of 8, but never less than 9 tenths of what was asked for.

    >>> [divisible(channels) for channels in (3, 18, 19.2, 30, 84)]
    [8, 24, 24, 32, 88]
    """
    return int(_rounded(channels).value({}))


def _rounded(channels: object) -> Expr:
    wanted = Expr.of(channels)
    near = maximum(8, (wanted + 4) // 8 * 8)
    return near + 8 * (10 * near < 9 * wanted)


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    return nn.Sequential(*conv_norm(inputs, outputs, kernel, stride, relu=False), nn.Hardswish())


def _first(channels: int) -> nn.Module:
    depthwise = conv_norm(channels, channels, 3, groups=channels)
    return Residual(nn.Sequential(depthwise, conv_norm(channels, channels, 1, relu=False)))


def _head(channels: int, wide: int, last: int, classes: int, dropout: float) -> nn.Module:
    mixed = (nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, last, 1, bias=False), nn.Hardswish(), nn.Flatten())
    return nn.Sequential(*_conv(channels, wide, 1, 1), *mixed, nn.Dropout(dropout), nn.Linear(last, classes))
