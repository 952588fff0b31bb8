"""An elastic linear layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from weft.space import Space, Subnet
from weft.supernet.elastic.leaf import Leaf, copied, load, prefix
from weft.supernet.elastic.mixture import Mixture, Pick
from weft.supernet.elastic.sizes import Dim, Sizes
from weft.supernet.elastic.slices import narrowed, with_slice
from weft.supernet.elastic.superpose import mixed_linear


class Linear(nn.Linear, Leaf):
    """``nn.Linear`` of which a subnet uses the first inputs and outputs; sizes are numbers or expressions."""

    def __init__(self, space: Space, inputs: Dim, outputs: Dim, bias: bool = True) -> None:
        sizes = Sizes(space, outputs, inputs, what=f"Linear({inputs}, {outputs})")
        super().__init__(sizes.largest[1], sizes.largest[0], bias)
        self.sizes = sizes

    def forward(self, x: Tensor, pick: Pick) -> Tensor:  # type: ignore[override]
        if isinstance(pick, Mixture):
            return mixed_linear(x, self.weight, self.bias, *self.sizes.factors(pick))
        outputs, inputs = self.sizes.of(pick)
        bias = None if self.bias is None else prefix(self.bias, outputs)
        return with_slice(lambda weight: F.linear(x, weight, bias), narrowed(self.weight, outputs, inputs))

    def plain(self, subnet: Subnet) -> nn.Module:
        outputs, inputs = self.sizes.of(subnet)
        bias = None if self.bias is None else copied(self.bias, outputs)
        made = nn.Linear(inputs, outputs, self.bias is not None, device="meta", dtype=self.weight.dtype)
        return load(made, {"weight": copied(self.weight, outputs, inputs), "bias": bias}, self.training)
