"""Small modules that the zoo's convolutional spaces share."""

from __future__ import annotations

from torch import Tensor, nn


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
