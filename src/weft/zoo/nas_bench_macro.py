"""NAS-Bench-Macro: eight layers with three candidates each, whose 6,561 true accuracies on CIFAR-10 are published.

Su et al., "Prioritized Architecture Sampling with Monto-Carlo Tree Search", CVPR 2021.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from torch import nn

from weft.elastic import Switch
from weft.errors import SpaceError
from weft.space import Space, Subnet
from weft.supernet import Chain, Choice, Elastic, Shared
from weft.zoo.layers import conv_norm, inverted_residual, pooled_linear
from weft.zoo.mobilenet import InvertedResidual

CANDIDATES = ("identity", "k3e3", "k5e6")
"""In the order of the digits of a published key."""

# Layers of each group; the first of a group halves the resolution and doubles the channels.
GROUPS = ((2, 64), (3, 128), (3, 256))
STEM = 32


def nas_bench_macro(classes: int = 10) -> Chain:
    """The supernet of the published space, for images of 3 x 32 x 32; every candidate has weights of its own."""
    space = Space()
    return _chain([_layer(space, *shape) for shape in _shapes()], classes)


def nas_bench_macro_entangled(classes: int = 10) -> Chain:
    """The same space, with ``k3e3`` entangled in ``k5e6``: the centre of its kernel, the first half of its channels."""
    space = Space()
    return _chain([_entangled(space, *shape) for shape in _shapes()], classes)


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


def _shapes() -> list[tuple[int, int, int, int]]:
    """Number, inputs, outputs and stride of each layer."""
    found: list[tuple[int, int, int, int]] = []
    channels = STEM
    for layers, width in GROUPS:
        for first in [True] + [False] * (layers - 1):
            found.append((len(found), channels, width, 2 if first else 1))
            channels = width
    return found


def _chain(layers: Sequence[Choice | Elastic], classes: int) -> Chain:
    stem = Shared(partial(conv_norm, 3, STEM, 3), "stem")
    return Chain(stem, *layers, Shared(partial(_head, GROUPS[-1][1], classes), "head"))


def _layer(space: Space, index: int, inputs: int, outputs: int, stride: int) -> Choice:
    candidates = {
        "identity": partial(_identity, inputs, outputs, stride),
        "k3e3": partial(inverted_residual, inputs, outputs, 3, 3, stride),
        "k5e6": partial(inverted_residual, inputs, outputs, 5, 6, stride),
    }
    return Choice(space, f"layer{index}", candidates)


def _entangled(space: Space, index: int, inputs: int, outputs: int, stride: int) -> Elastic:
    space.categorical(f"layer{index}", CANDIDATES)
    return Elastic(space, f"layer{index}", partial(_switch, space, f"layer{index}", inputs, outputs, stride))


def _switch(space: Space, name: str, inputs: int, outputs: int, stride: int) -> nn.Module:
    large = space.handle(name) == "k5e6"
    nested = InvertedResidual(space, inputs, outputs, 3 + 2 * large, 3 + 3 * large, stride)
    return Switch(space, name, {"identity": _identity(inputs, outputs, stride), ("k3e3", "k5e6"): nested})


def _identity(inputs: int, outputs: int, stride: int) -> nn.Module:
    same = stride == 1 and inputs == outputs
    return nn.Identity() if same else conv_norm(inputs, outputs, 1, stride, relu=False)


def _head(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(conv_norm(channels, 1280, 1), *pooled_linear(1280, classes))
