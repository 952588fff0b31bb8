"""An elastic transformer block, for language and for images."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from weft.space import Space
from weft.supernet.elastic.attention import Attention
from weft.supernet.elastic.leaf import Module
from weft.supernet.elastic.mixture import Pick
from weft.supernet.elastic.mlp import MLP
from weft.supernet.elastic.norm import LayerNorm
from weft.supernet.elastic.sizes import Dim

SPREAD = 0.02
"""The standard deviation of fresh weights in a transformer."""


class TransformerBlock(Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; ``norm`` is called with the space and the width.

    Fresh weights are normal with a deviation of .02, and biases 0, whatever the parts would draw by themselves; what
    ends in the sum is smaller by sqrt(``sums``), as GPT-2 has it with two sums a layer.
    """

    def __init__(
        self,
        space: Space,
        width: Dim,
        attention: Attention,
        mlp: MLP,
        norm: Callable[[Space, Dim], Module] = LayerNorm,
        dropout: float = 0.0,
        sums: int = 1,
    ) -> None:
        super().__init__()
        self.norm1 = norm(space, width)
        self.attention = attention
        self.norm2 = norm(space, width)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)
        self._sums = sums
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw(self)
        with torch.no_grad():
            for last in (self.attention.out, self.mlp.down):
                cast("Tensor", last.weight).div_(self._sums**0.5)

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x, pick=pick), pick=pick))
        return cast("Tensor", x + self.dropout(self.mlp(self.norm2(x, pick=pick), pick=pick)))


def draw(module: nn.Module) -> None:
    """Fresh matrices, normal with a deviation of .02, and biases of 0, of all parts; vectors keep what they have."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=SPREAD)
        elif name.rpartition(".")[2] == "bias":
            nn.init.zeros_(parameter)
