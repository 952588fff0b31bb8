"""DARTS: normal and reduction cells of four nodes, each with two inputs and an operation for each of them.

Liu, Simonyan and Yang, "DARTS: Differentiable Architecture Search", ICLR 2019; partial channel connections: Xu et al.,
"PC-DARTS", ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial as bound
from functools import reduce
from itertools import combinations
from operator import add, or_
from typing import Any

import torch
from torch import Tensor, nn

from weft.elastic import Condition, Conv2d, Dim, Mixture, Module, Pick, Sequential, Switch, Zero, call
from weft.errors import SupernetError
from weft.space import Expr, Space
from weft.supernet import Chain, Elastic, Shared
from weft.zoo.convolutions import conv_norm, pooled_linear

DARTS_OPERATIONS = (
    "skip_connect",
    "max_pool_3x3",
    "avg_pool_3x3",
    "dil_conv_3x3",
    "dil_conv_5x5",
    "sep_conv_3x3",
    "sep_conv_5x5",
)
"""The operations that a found cell may have, the larger ones last."""

NODES = 4
KINDS = ("normal", "reduce")


def darts(
    cells: int = 8,
    channels: int = 16,
    classes: int = 10,
    partial: int | None = None,
    entangled: bool = False,
    all_edges: bool = False,
    affine: bool = False,
) -> Chain:
    """The space of the cells that DARTS can find: (1 * 3 * 6 * 10 * 7^8)^2, about 1.1e18.

    DARTS trains eight operations on all 14 edges of a cell, one of them "none", and afterwards keeps for each node the
    two strongest edges with their best operation but "none". Here that rule is part of the space. For the cells of a
    kind, ``normal_inputs4`` is the pair of states that node 4 takes (states 0 and 1 are the cell's inputs, 2 to 5 its
    nodes; node 2 has no choice), and ``normal_0_4`` the operation of an edge, which is active where the pair has it.
    So a subnet is a final cell, and in a mixture an edge counts by the probability of the pairs that hold it, which
    takes the place of "none" (and of the edge weights of PC-DARTS), times the mixture of its seven operations: the
    expectation of the node under independent choices, and at its corners the found cells.

    ``all_edges`` gives the encoding of DARTS's search instead: 28 choices of eight operations, 8^28, all edges kept.
    ``partial=4`` is PC-DARTS; ``entangled``: kernels of 3 x 3 are the centres of those of 5 x 5; ``affine``: batch
    norms have gains and shifts, as in retraining but not in the published search. Extraction needs an example batch,
    since two tensors pass through this chain.
    """
    space = Space()
    conditions = {kind: _choices(space, kind, all_edges) for kind in KINDS}
    if partial is not None and (partial < 1 or channels % (2 * partial)):
        raise SupernetError(f"partial={partial} needs channels that are a multiple of {2 * partial}, not {channels}")
    stem = 3 * channels
    blocks: list[Shared | Elastic] = [Shared(bound(conv_norm, 3, stem, 3, relu=False), "stem")]
    before, last, width, reduced = stem, stem, channels, False
    for index in range(cells):
        reduces = index in (cells // 3, 2 * cells // 3) and index > 0
        kind = "reduce" if reduces else "normal"
        width = 2 * width if reduces else width
        shape = (before, last, width, reduced, index == 0, index == cells - 1)
        made = bound(DartsCell, space, kind, shape, conditions[kind], partial, entangled, affine)
        blocks.append(Elastic(space, f"cell{index}", made))
        before, last, reduced = last, NODES * width, reduces
    return Chain(*blocks, Shared(bound(pooled_linear, last, classes), "head"))


class DartsCell(Module):
    """Takes the outputs of the last two cells and returns those of the last one and its own; the first cell takes the
    stem's output as both, and the last returns its own alone."""

    def __init__(
        self,
        space: Space,
        kind: str,
        shape: tuple[int, int, int, bool, bool, bool],
        conditions: dict[Nodes, Condition],
        partial: int | None,
        entangled: bool,
        affine: bool,
    ) -> None:
        super().__init__()
        before, last, width, reduced, self._first, self._last = shape
        self.enter0 = Halved(before, width, affine) if reduced else relu_conv_norm(before, width, affine=affine)
        self.enter1 = relu_conv_norm(last, width, affine=affine)
        edges = {}
        for source, target in _edges(2, NODES):
            stride = 2 if kind == "reduce" and source < 2 else 1
            choice = space.handle(f"{kind}_{source}_{target}")
            modules = _operations(space, choice, width // (partial or 1), stride, entangled, affine)
            edges[source, target] = Edge(space, choice, modules, conditions.get((source, target)), partial, stride)
        self.inside = Edges(edges)

    def forward(self, *states: Tensor, pick: Pick) -> Tensor | tuple[Tensor, Tensor]:
        if len(states) != (1 if self._first else 2):
            raise SupernetError(
                "a cell of DARTS takes what the last two gave: extract it with an example batch, as in "
                "extract(chain, subnet, example=batch)"
            )
        old, new = states[0], states[-1]
        first = call(self.enter0, old, pick=pick)
        out = torch.cat(self.inside(first, self.enter1(new), pick=pick)[2:], 1)
        return out if self._last else (new, out)


class Halved(Module):
    """Half the resolution, by two convolutions over alternate pixels."""

    def __init__(self, inputs: int, outputs: int, affine: bool) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs, affine=affine)

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        x = torch.relu(x)
        out: Tensor = self.norm(torch.cat((self.even(x), self.odd(x[:, :, 1:, 1:])), 1))
        return out


def _choices(space: Space, kind: str, all_edges: bool) -> dict[Nodes, Condition]:
    """Declares the choices of a kind of cell; when each edge is there, for those that not every subnet has."""
    conditions: dict[Nodes, Condition] = {}
    for target in range(2, 2 + NODES):
        pairs = [f"{a}-{b}" for a, b in combinations(range(target), 2)]
        inputs = space.categorical(f"{kind}_inputs{target}", pairs) if len(pairs) > 1 and not all_edges else None
        for source in range(target):
            name = f"{kind}_{source}_{target}"
            if inputs is None:
                space.categorical(name, ("none", *DARTS_OPERATIONS) if all_edges else DARTS_OPERATIONS)
            else:
                there = reduce(or_, [inputs == pair for pair in pairs if str(source) in pair.split("-")])
                conditions[source, target] = Condition(space, there)
                space.categorical(name, DARTS_OPERATIONS, when=there)
    return conditions


def _operations(
    space: Space, choice: Expr, width: int, stride: int, entangled: bool, affine: bool
) -> dict[str | tuple[str, ...], nn.Module]:
    pools = {
        "max_pool_3x3": nn.MaxPool2d(3, stride, 1),
        "avg_pool_3x3": nn.AvgPool2d(3, stride, 1, count_include_pad=False),
    }
    found: dict[str | tuple[str, ...], nn.Module] = {
        "skip_connect": nn.Identity() if stride == 1 else Halved(width, width, affine),
        **{name: nn.Sequential(pool, nn.BatchNorm2d(width, affine=affine)) for name, pool in pools.items()},
        **kernels_of(space, choice, width, stride, entangled, affine),
    }
    name = str(choice)
    return {"none": Zero(stride), **found} if "none" in (space.choices[name].options or ()) else found


# Cells: small graphs whose edges are choices between operations, and the toy space that is made of two kinds of them.
#
# The same choices steer every cell of a kind; each cell has weights of its own.

TOY_OPERATIONS = ("dil_conv_3x3", "dil_conv_5x5", "sep_conv_3x3", "sep_conv_5x5")

Nodes = tuple[int, int]
"""The states that an edge leads from and to."""


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
        Elastic(space, f"cell{index}", bound(ToyCell, space, kind, inputs, width, entangled, dropout))
        for index, (kind, inputs, width) in enumerate(plan)
    ]
    side = (size + 3) // 4 // 2  # halved by each reduction, rounded up, and by the pooling, rounded down
    return Chain(*cells, Shared(bound(_toy_head, 4 * channels, side, classes, dropout), "head"))


class Edge(Switch):
    """An edge of a cell: a switch between operations. With a condition, only some subnets have the edge.

    Returns None for a subnet that does not have it; under a mixture the output counts by its probability.
    """

    def __init__(
        self,
        space: Space,
        choice: str | Expr,
        operations: Mapping[Any, nn.Module],
        condition: Condition | None = None,
        partial: int | None = None,
        stride: int = 1,
    ) -> None:
        super().__init__(space, choice, operations, partial, stride)
        self._condition = condition

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, *(() if self._condition is None else self._condition.names))

    def forward(self, x: Tensor, pick: Pick) -> Tensor | None:  # type: ignore[override]
        if self._condition is None:
            return super().forward(x, pick)
        if isinstance(pick, Mixture):
            out = super().forward(x, pick)
            return self._condition.probability(pick).to(out.dtype) * out
        return super().forward(x, pick) if self._condition.holds(pick) else None


class Edges(Module):
    """The inside of a cell: each node is the sum of the outputs of its edges. Takes the first states and returns all
    of them."""

    def __init__(self, edges: Mapping[Nodes, nn.Module]) -> None:
        super().__init__()
        self._order = sorted(edges, key=lambda edge: (edge[1], edge[0]))
        self.edges = nn.ModuleDict({_label(edge): edges[edge] for edge in self._order})

    def forward(self, *states: Tensor, pick: Pick) -> list[Tensor]:
        found = list(states)
        for target in range(len(states), self._order[-1][1] + 1):
            terms = [self.edges[_label(edge)](found[edge[0]], pick=pick) for edge in self._order if edge[1] == target]
            found.append(reduce(add, (term for term in terms if term is not None)))
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


def _edges(inputs: int, nodes: int) -> list[Nodes]:
    return [(source, target) for target in range(inputs, inputs + nodes) for source in range(target)]


def _label(edge: Nodes) -> str:
    return f"{edge[0]}_{edge[1]}"


def _toy_head(width: int, side: int, classes: int, dropout: float) -> nn.Module:
    layers = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(width * side * side, width), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, classes))
