"""NAS-Bench-201 and NAS-Bench-Macro: spaces of which the true accuracy of every network is published."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from weft.elastic import Conv2d, Module, Pick, Sequential, Switch, Zero
from weft.errors import SpaceError
from weft.space import Space, Subnet
from weft.supernet import Chain, Choice, Elastic, Shared
from weft.zoo.cells import Edges, relu_conv_norm
from weft.zoo.convolutions import conv_norm, inverted_residual, pooled_linear
from weft.zoo.mobilenet import InvertedResidual

# NAS-Bench-201 (Dong and Yang, ICLR 2020): a cell of six edges with five operations each, 15,625 accuracies.

NB201_OPERATIONS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
"""In the order of the digits of a key in the published table."""

# In the space the larger operations come last, as everywhere: the last subnet is the largest.
_BY_SIZE = ("none", "skip_connect", "avg_pool_3x3", "nor_conv_1x1", "nor_conv_3x3")

_EDGES = ((0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3))


def nas_bench_201(cells: int = 5, channels: int = 16, classes: int = 10, entangled: bool = False) -> Chain:
    """The published space: three stages of ``cells`` cells, all steered by the same six choices.

    ``entangled``: the 1 x 1 convolution of an edge is the centre of its 3 x 3 one; else each has its own weights.
    """
    space = Space()
    for source, target in _EDGES:
        space.categorical(f"edge{source}{target}", _BY_SIZE)
    blocks: list[Shared | Elastic] = [Shared(partial(conv_norm, 3, channels, 3, relu=False), "stem")]
    for stage in range(3):
        width = channels << stage
        if stage:
            blocks.append(Shared(partial(ReductionCell, width // 2, width), f"reduce{stage}"))
        for index in range(cells):
            made = partial(Cell201, space, width, entangled)
            blocks.append(Elastic(space, f"stage{stage}_cell{index}", made))
    return Chain(*blocks, Shared(partial(_head201, 4 * channels, classes), "head"))


def nb201_key(subnet: Subnet) -> str:
    """The subnet's key in the published table: six digits, for the edges 0-1, 0-2, 1-2, 0-3, 1-3 and 2-3.

    >>> space = nas_bench_201().space
    >>> nb201_key(nb201_subnet(space, "333132"))
    '333132'
    """
    names = (str(subnet[f"edge{source}{target}"]) for source, target in _EDGES)
    return "".join(str(NB201_OPERATIONS.index(name)) for name in names)


def nb201_subnet(space: Space, key: str) -> Subnet:
    """The subnet of a published key; raises SpaceError for what is none."""
    if not re.fullmatch("[0-4]{6}", key):
        raise SpaceError(f"'{key}' is no key of NAS-Bench-201: six digits, each 0 to 4")
    names = (f"edge{source}{target}" for source, target in _EDGES)
    return space.subnet({name: NB201_OPERATIONS[int(digit)] for name, digit in zip(names, key, strict=True)})


class Cell201(Module):
    """Four states, each but the first the sum of what its edges make of those before; the last comes out."""

    def __init__(self, space: Space, width: int, entangled: bool) -> None:
        super().__init__()
        self.inside = Edges({edge: _edge(space, f"edge{edge[0]}{edge[1]}", width, entangled) for edge in _EDGES})

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        out: Tensor = self.inside(x, pick=pick)[-1]
        return out


class ReductionCell(nn.Module):
    """A residual block that halves the resolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(relu_conv_norm(inputs, outputs, 3, 2), relu_conv_norm(outputs, outputs, 3))
        self.shortcut = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(inputs, outputs, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + self.body(x)
        return out


def _edge(space: Space, name: str, width: int, entangled: bool) -> Switch:
    small, large = "nor_conv_1x1", "nor_conv_3x3"
    modules: dict[str | tuple[str, ...], nn.Module] = {
        "none": Zero(),
        "skip_connect": nn.Identity(),
        "avg_pool_3x3": nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    }
    if entangled:
        conv = Conv2d(space, width, width, 1 + 2 * (space.handle(name) == large), bias=False)
        modules[small, large] = Sequential(nn.ReLU(), conv, nn.BatchNorm2d(width))
    else:
        modules |= {small: relu_conv_norm(width, width, 1), large: relu_conv_norm(width, width, 3)}
    return Switch(space, name, modules)


def _head201(width: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), *pooled_linear(width, classes))


# NAS-Bench-Macro (Su et al., "Prioritized Architecture Sampling with Monto-Carlo Tree Search", CVPR 2021): eight layers
# with three candidates each, 6,561 accuracies on CIFAR-10.

CANDIDATES = ("identity", "k3e3", "k5e6")
"""In the order of the digits of a published key."""

# Layers of each group; the first of a group halves the resolution and doubles the channels.
GROUPS = ((2, 64), (3, 128), (3, 256))
STEM = 32


def nas_bench_macro(classes: int = 10) -> Chain:
    """The supernet of the published space, for images of 3 x 32 x 32; every candidate has weights of its own."""
    return _macro(_layer, classes)


def nas_bench_macro_entangled(classes: int = 10) -> Chain:
    """The same space, with ``k3e3`` entangled in ``k5e6``: the centre of its kernel, the first half of its channels."""
    return _macro(_entangled, classes)


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


def _macro(make: Callable[[Space, int, int, int, int], Choice | Elastic], classes: int) -> Chain:
    space, layers, channels = Space(), list[Choice | Elastic](), STEM
    for count, width in GROUPS:
        for place in range(count):
            layers.append(make(space, len(layers), channels, width, 1 if place else 2))
            channels = width
    stem, head = partial(conv_norm, 3, STEM, 3), partial(_head, channels, classes)
    return Chain(Shared(stem, "stem"), *layers, Shared(head, "head"))


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
