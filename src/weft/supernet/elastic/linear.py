"""An elastic linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from weft.space import Space, Subnet
from weft.supernet.elastic.leaf import Leaf, Module, copied, load, prefix
from weft.supernet.elastic.mixture import Mixture, Pick
from weft.supernet.elastic.sizes import Dim, Sizes
from weft.supernet.elastic.slices import narrowed, with_slice
from weft.supernet.elastic.superpose import few_tokens, mixed_linear
from weft.supernet.elastic.together import mixed_linears


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
        bias = None if self.bias is None else prefix(self.bias, outputs)
        return with_slice(lambda weight: F.linear(x, weight, bias), narrowed(self.weight, outputs, inputs))

    def plain(self, subnet: Subnet) -> nn.Module:
        outputs, inputs = self.sizes.of(subnet)
        bias = None if self.bias is None else copied(self.bias, outputs)
        made = nn.Linear(inputs, outputs, self.bias is not None, device="meta", dtype=self.weight.dtype)
        return load(made, {"weight": copied(self.weight, outputs, inputs), "bias": bias}, self.training)


def together(layers: Sequence[Module], x: Tensor, pick: Pick) -> list[Tensor]:
    """What several layers make of one input; under a mixture neighbours of the same sizes are one product."""
    if not isinstance(pick, Mixture):
        return [layer(x, pick=pick) for layer in layers]
    found: list[Tensor] = []
    for kind, group in groupby(layers, _kind):
        same = list(group)
        found += (
            [layer(x, pick=pick) for layer in same] if kind is None else _mixed(cast("list[Linear]", same), x, pick)
        )
    return found


def _kind(layer: Module) -> tuple[object, ...] | None:
    """What layers of one product have in common; None for what computes in a way of its own."""
    return (layer.sizes.key, layer.bias is None) if type(layer) is Linear else None


def _mixed(layers: Sequence[Linear], x: Tensor, mixture: Mixture) -> Sequence[Tensor]:
    """Layers of the same sizes under a mixture."""
    sizes, weights = layers[0].sizes, [layer.weight for layer in layers]
    if not sizes.names:
        return [F.linear(x, layer.weight, layer.bias) for layer in layers]
    if few_tokens(x, weights[0], sizes.rank):
        rows, columns = sizes.factors(mixture)
        return [mixed_linear(x, layer.weight, layer.bias, rows, columns) for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    out = mixed_linears(x, weights, biases, sizes, mixture)
    return (out,) if len(layers) == 1 else out.chunk(len(layers), -1)
