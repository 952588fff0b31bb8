"""An elastic perceptron of two layers, plain or gated."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from weft.space import Space
from weft.supernet.elastic.leaf import Module, call
from weft.supernet.elastic.linear import Linear, together
from weft.supernet.elastic.mixture import Pick
from weft.supernet.elastic.sizes import Dim


class MLP(Module):
    """``down(activation(up(x)))``; gated, ``down(activation(gate(x)) * up(x))``."""

    def __init__(
        self,
        space: Space,
        width: Dim,
        hidden: Dim,
        activation: Callable[[], nn.Module] = nn.GELU,
        gated: bool = False,
        bias: bool = True,
        linear: Callable[[Space, Dim, Dim, bool], Module] = Linear,
    ) -> None:
        super().__init__()
        self.gate = linear(space, width, hidden, bias) if gated else None
        self.up = linear(space, width, hidden, bias)
        self.activation = activation()
        self.down = linear(space, hidden, width, bias)

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        if self.gate is None:
            inner = call(self.activation, self.up(x, pick=pick), pick=pick)
        else:
            gate, up = together((self.gate, self.up), x, pick)
            inner = call(self.activation, gate, pick=pick) * up
        return cast("Tensor", self.down(inner, pick=pick))
