"""Elastic linear layers: Linear, and Grid, whose inputs or outputs form a grid such as heads x features of a head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.elastic.mixture import Mixture, Pick
from weft.elastic.module import Leaf, Module, contiguous_prefix, load, narrow_prefix, saved_as_view
from weft.elastic.ops.linear import few_tokens, mixed_linear, mixed_linears
from weft.elastic.sizes import Dim, Sizes
from weft.space import Space, Subnet

Dims = Dim | tuple[Dim, ...]


class Grid(Leaf):
    """A linear layer of which a subnet uses a corner: the first along each dimension of both grids.

    Its plain form is an ``nn.Linear``. ``transposed`` keeps the weight as inputs x outputs, as GPT-2 does, and hands it
    to the kernels so, which round by the layout. ``scaled`` folds 1 / sqrt(d) into what a mixture expects, d the last
    dimension of the outputs; a pick is not scaled.
    """

    def __init__(
        self,
        space: Space,
        inputs: Dims,
        outputs: Dims,
        bias: bool = True,
        *,
        transposed: bool = False,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        rows, columns = _as_tuple(outputs), _as_tuple(inputs)
        what = f"Grid({inputs}, {outputs})"
        self.sizes = RootScaled(space, rows, columns, what) if scaled else Sizes(space, *rows, *columns, what=what)
        self.transposed = transposed
        self._split = len(rows)
        shape = self._flat(self.sizes.largest)
        self.weight = nn.Parameter(torch.empty(shape[::-1] if transposed else shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Linear`` draws them."""
        bound = 1 / math.sqrt(self._flat(self.sizes.largest)[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        if isinstance(pick, Mixture):
            weight = self.weight.t() if self.transposed else self.weight
            return mixed_linear(x, weight, self.bias, *self._factors(pick))
        sizes = self.sizes.of(pick)
        bias = self._bias(sizes, self.bias)
        return saved_as_view(lambda part: F.linear(x, self._matrix(sizes, part), bias), self._view(sizes, self.weight))

    def plain(self, subnet: Subnet) -> nn.Module:
        sizes = self.sizes.of(subnet)
        outputs, inputs = self._flat(sizes)
        made = nn.Linear(inputs, outputs, self.bias is not None, device="meta", dtype=self.weight.dtype)
        # The copy keeps the strides, and with them the kernel.
        weight = self._matrix(sizes, self._view(sizes, self.weight).contiguous())
        return load(made, self.training, weight=weight, bias=self._bias(sizes, self.bias))

    def _bias(self, sizes: Sequence[int], bias: Tensor | None) -> Tensor | None:
        """The bias that a pick uses."""
        rows = self._split
        return None if bias is None else contiguous_prefix(bias.view(self.sizes.largest[:rows]), *sizes[:rows]).view(-1)

    def _view(self, sizes: Sequence[int], weight: Tensor) -> Tensor:
        """The corner of the grid that a pick uses."""
        most, rows = self.sizes.largest, self._split
        if self.transposed:
            return narrow_prefix(weight.view(most[rows:] + most[:rows]), *sizes[rows:], *sizes[:rows])
        return narrow_prefix(weight.view(most), *sizes)

    def _matrix(self, sizes: Sequence[int], part: Tensor) -> Tensor:
        """The corner, without gaps, as outputs x inputs."""
        flat = self._flat(sizes)
        return part.view(flat[::-1]).t() if self.transposed else part.view(flat)

    def _flat(self, sizes: Sequence[int]) -> tuple[int, int]:
        return math.prod(sizes[: self._split]), math.prod(sizes[self._split :])

    def _factors(self, mixture: Mixture) -> tuple[Tensor, Tensor]:
        def make() -> tuple[Tensor, Tensor]:
            each = self.sizes.mask_factors(mixture)
            return _join(each[: self._split]), _join(each[self._split :])

        return mixture.cached(("grid", self.sizes.key, self._split), make)  # type: ignore[no-any-return]


class RootScaled(Sizes):
    """Sizes whose factors expect 1 / sqrt(d) where others expect 1, d the last dimension of the rows."""

    def __init__(self, space: Space, rows: tuple[Dim, ...], columns: tuple[Dim, ...], what: str) -> None:
        super().__init__(space, *rows, *columns, what=what)
        self._root = len(rows) - 1
        self.key = (*self.key, self._root)  # type: ignore[assignment]

    def table(self, index: int, like: Tensor) -> Tensor:
        table = super().table(index, like)
        if index != self._root:
            return table

        def make() -> Tensor:
            roots = self.tables[index].clamp_min(1).double().rsqrt()
            return table * roots[:, None, :].to(like.device, like.dtype)

        return self.cached(("scaled", like.device, like.dtype), make)  # type: ignore[no-any-return]


def _as_tuple(dims: Dims) -> tuple[Dim, ...]:
    return dims if isinstance(dims, tuple) else (dims,)


def _join(factors: Sequence[Tensor]) -> Tensor:
    """The factors of the places of a grid, in order: combinations x places."""
    out = factors[0]
    for factor in factors[1:]:
        out = (out[:, :, None] * factor[:, None, :]).flatten(1)
    return out


class Linear(nn.Linear, Leaf):
    """``nn.Linear`` of which a subnet uses the first inputs and outputs; sizes are numbers or expressions."""

    def __init__(self, space: Space, inputs: Dim, outputs: Dim, bias: bool = True) -> None:
        sizes = Sizes(space, outputs, inputs, what=f"Linear({inputs}, {outputs})")
        super().__init__(sizes.largest[1], sizes.largest[0], bias)
        self.sizes = sizes

    def forward(self, x: Tensor, pick: Pick) -> Tensor:  # type: ignore[override]
        if isinstance(pick, Mixture):
            return _mixed([self], x, pick)[0]
        outputs, inputs = self.sizes.of(pick)
        bias, view = contiguous_prefix(self.bias, outputs), narrow_prefix(self.weight, outputs, inputs)
        return saved_as_view(lambda weight: F.linear(x, weight, bias), view)

    def plain(self, subnet: Subnet) -> nn.Module:
        outputs, inputs = self.sizes.of(subnet)
        bias = contiguous_prefix(self.bias, outputs)
        made = nn.Linear(inputs, outputs, bias is not None, device="meta", dtype=self.weight.dtype)
        return load(made, self.training, weight=contiguous_prefix(self.weight, outputs, inputs), bias=bias)


def linears(layers: Sequence[Module], x: Tensor, pick: Pick) -> list[Tensor]:
    """The outputs of several layers for one input; under a mixture neighbours of the same sizes are one product."""
    if not isinstance(pick, Mixture):
        return [layer(x, pick=pick) for layer in layers]
    outputs: list[Tensor] = []
    for kind, group in groupby(layers, _kind):
        same = list(group)
        outputs += (
            [layer(x, pick=pick) for layer in same] if kind is None else _mixed(cast("list[Linear]", same), x, pick)
        )
    return outputs


def _kind(layer: Module) -> tuple[object, ...] | None:
    """What layers of one product have in common; None for other kinds of layers."""
    return (layer.sizes.key, layer.bias is None) if type(layer) is Linear else None


def _mixed(layers: Sequence[Linear], x: Tensor, mixture: Mixture) -> Sequence[Tensor]:
    """Layers of the same sizes under a mixture."""
    sizes, weights = layers[0].sizes, [layer.weight for layer in layers]
    if not sizes.names:
        return [F.linear(x, layer.weight, layer.bias) for layer in layers]
    if few_tokens(x, weights[0], sizes.rank):
        rows, columns = sizes.mask_factors(mixture)
        return [mixed_linear(x, layer.weight, layer.bias, rows, columns) for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    out = mixed_linears(x, weights, biases, sizes, mixture)
    return (out,) if len(layers) == 1 else out.chunk(len(layers), -1)
