"""NAS-Bench-Macro: eight layers with three candidates each, whose 6,561 true accuracies on CIFAR-10 are published.

Su et al., "Prioritized Architecture Sampling with Monto-Carlo Tree Search", CVPR 2021.
"""

from __future__ import annotations

import re
from functools import partial

from torch import nn

from weft.errors import SpaceError
from weft.space import Space, Subnet
from weft.supernet import Chain, Choice, Shared
from weft.zoo.parts import conv_norm, inverted_residual

CANDIDATES = ("identity", "k3e3", "k5e6")
"""In the order of the digits of a published key."""

# Layers of each group; the first of a group halves the resolution and doubles the channels.
GROUPS = ((2, 64), (3, 128), (3, 256))


def nas_bench_macro(classes: int = 10) -> Chain:
    """The supernet of the published space, for images of 3 x 32 x 32."""
    space = Space()
    blocks: list[Shared | Choice] = [Shared(partial(conv_norm, 3, 32, 3), "stem")]
    channels = 32
    for layers, width in GROUPS:
        for first in [True] + [False] * (layers - 1):
            blocks.append(_layer(space, len(blocks) - 1, channels, width, 2 if first else 1))
            channels = width
    return Chain(*blocks, Shared(partial(_head, channels, classes), "head"))


def macro_key(subnet: Subnet) -> str:
    """The subnet's key in the published table.

    >>> space = nas_bench_macro().space
    >>> macro_key(space.subnet({f"layer{i}": "k5e6" if i < 2 else "identity" for i in range(8)}))
    '22000000'
    """
    return "".join(str(CANDIDATES.index(str(subnet[f"layer{i}"]))) for i in range(8))


def macro_subnet(space: Space, key: str) -> Subnet:
    """The subnet of a published key; raises SpaceError for what is none."""
    if not re.fullmatch("[012]{8}", key):
        raise SpaceError(f"'{key}' is no key of NAS-Bench-Macro: eight digits, each 0, 1 or 2")
    return space.subnet({f"layer{i}": CANDIDATES[int(digit)] for i, digit in enumerate(key)})


def _layer(space: Space, index: int, inputs: int, outputs: int, stride: int) -> Choice:
    same = stride == 1 and inputs == outputs
    candidates = {
        "identity": nn.Identity if same else partial(conv_norm, inputs, outputs, 1, stride, relu=False),
        "k3e3": partial(inverted_residual, inputs, outputs, 3, 3, stride),
        "k5e6": partial(inverted_residual, inputs, outputs, 5, 6, stride),
    }
    return Choice(space, f"layer{index}", candidates)


def _head(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(conv_norm(channels, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes))
