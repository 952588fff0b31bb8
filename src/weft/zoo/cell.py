"""Cells: small graphs whose edges are choices between operations, and the toy space that is made of two kinds of them.

The same choices steer every cell of a kind; each cell has weights of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from weft.space import Expr, Space
from weft.supernet import Chain, Elastic, Shared
from weft.supernet.elastic import Condition, Conv2d, Dim, Mixture, Module, Pick, Sequential, Switch

TOY_OPERATIONS = ("dil_conv_3x3", "dil_conv_5x5", "sep_conv_3x3", "sep_conv_5x5")

Edge = tuple[int, int]
"""From which state to which."""


def toy_cell(
    channels: int = 32, classes: int = 10, size: int = 28, entangled: bool = True, dropout: float = 0.2
) -> Chain:
    """TangleNAS's toy cell space for grey images, 28 x 28 in its published table: 4^6 = 4,096 networks.

    A reduction cell, a normal one and another reduction cell, each of two nodes and so three edges. ``entangled``: the
    kernels of 3 x 3 are the centres of those of 5 x 5.
    """
    space = Space()
    for kind in ("normal", "reduce"):
        for source, target in _edges(1, 2):
            space.categorical(f"{kind}_{source}_{target}", TOY_OPERATIONS)
    plan = (("reduce", 1, channels), ("normal", 2 * channels, channels), ("reduce", 2 * channels, 2 * channels))
    cells = [
        Elastic(space, f"cell{index}", partial(ToyCell, space, kind, inputs, width, entangled, dropout))
        for index, (kind, inputs, width) in enumerate(plan)
    ]
    side = (size + 3) // 4 // 2  # halved by each reduction, rounded up, and by the pooling, rounded down
    return Chain(*cells, Shared(partial(_toy_head, 4 * channels, side, classes, dropout), "head"))


class Edges(Module):
    """The inside of a cell: each node is the sum of what its edges make of earlier states.

    Edges with a condition are there for some subnets; under a mixture they count by its probability. Takes the first
    states and gives all of them.
    """

    def __init__(self, edges: Mapping[Edge, nn.Module], conditions: Mapping[Edge, Condition] | None = None) -> None:
        super().__init__()
        self._conditions = dict(conditions or {})
        self._order = sorted(edges, key=lambda edge: (edge[1], edge[0]))
        self.edges = nn.ModuleDict({_label(edge): edges[edge] for edge in self._order})

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for condition in self._conditions.values() for name in condition.names))

    def forward(self, *states: Tensor, pick: Pick) -> list[Tensor]:
        found = list(states)
        for target in range(len(states), self._order[-1][1] + 1):
            total: Tensor | None = None
            for edge in self._order:
                if edge[1] != target:
                    continue
                condition = self._conditions.get(edge)
                if condition is not None and not isinstance(pick, Mixture) and not condition.holds(pick):
                    continue
                term: Tensor = self.edges[_label(edge)](found[edge[0]], pick=pick)
                if condition is not None and isinstance(pick, Mixture):
                    term = condition.probability(pick).to(term.dtype) * term
                total = term if total is None else total + term
            assert total is not None
            found.append(total)
        return found


class ToyCell(Module):
    """One input, two nodes, which are joined."""

    def __init__(self, space: Space, kind: str, inputs: int, width: int, entangled: bool, dropout: float) -> None:
        super().__init__()
        self.enter = relu_conv_norm(inputs, width, affine=False)
        edges = {}
        for source, target in _edges(1, 2):
            choice = space.handle(f"{kind}_{source}_{target}")
            stride = 2 if kind == "reduce" and source == 0 else 1
            edges[source, target] = Switch(space, choice, kernels_of(space, choice, width, stride, entangled, False))
        self.inside = Edges(edges)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        out: Tensor = self.dropout(torch.cat(self.inside(self.enter(x), pick=pick)[1:], 1))
        return out


def kernels_of(
    space: Space, choice: Expr, width: int, stride: int, entangled: bool, affine: bool
) -> dict[str | tuple[str, ...], nn.Module]:
    """The four convolutions of DARTS by their options; entangled, the two sizes of a kind are one module."""
    found: dict[str | tuple[str, ...], nn.Module] = {}
    for kind, make in (("dil", dilated), ("sep", separable)):
        small, large = f"{kind}_conv_3x3", f"{kind}_conv_5x5"
        if entangled:
            found[small, large] = make(space, width, 3 + 2 * (choice == large), stride, affine)
        else:
            found |= {name: make(space, width, size, stride, affine) for name, size in ((small, 3), (large, 5))}
    return found


def separable(space: Space, width: int, kernel: Dim, stride: int, affine: bool) -> nn.Module:
    """Twice: ReLU, a depthwise and a pointwise convolution, batch norm."""
    first, second = (_depthwise(space, width, kernel, step, 1, affine) for step in (stride, 1))
    return Sequential(*first, *second)


def dilated(space: Space, width: int, kernel: Dim, stride: int, affine: bool) -> nn.Module:
    """ReLU, a depthwise convolution with holes and a pointwise one, batch norm."""
    return Sequential(*_depthwise(space, width, kernel, stride, 2, affine))


def relu_conv_norm(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, affine: bool = True) -> nn.Sequential:
    """ReLU, convolution, batch norm, as cells have them."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(outputs, affine=affine))


def _depthwise(
    space: Space, width: int, kernel: Dim, stride: int, dilation: int, affine: bool
) -> tuple[nn.Module, ...]:
    conv = Conv2d(space, width, width, kernel, stride, "depthwise", dilation=dilation, bias=False)
    return nn.ReLU(), conv, nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width, affine=affine)


def _edges(inputs: int, nodes: int) -> list[Edge]:
    return [(source, target) for target in range(inputs, inputs + nodes) for source in range(target)]


def _label(edge: Edge) -> str:
    return f"{edge[0]}_{edge[1]}"


def _toy_head(width: int, side: int, classes: int, dropout: float) -> nn.Module:
    layers = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(width * side * side, width), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, classes))
