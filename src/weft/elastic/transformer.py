"""Elastic transformers: embeddings of tokens and patches, blocks, perceptrons and heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from weft.elastic.attention import Attention, positions
from weft.elastic.conv import Patches
from weft.elastic.linear import Linear, linears
from weft.elastic.mixture import Mixture, Pick
from weft.elastic.module import Leaf, Module, call, load
from weft.elastic.norm import LayerNorm
from weft.elastic.sizes import Dim, Sizes
from weft.space import Space, Subnet


class Embedding(nn.Embedding, Leaf):
    """``nn.Embedding`` of ``count`` vectors, of which a subnet uses the first features."""

    def __init__(self, space: Space, count: int, width: Dim) -> None:
        sizes = Sizes(space, width, what=f"Embedding({count}, {width})")
        super().__init__(count, sizes.largest[0])
        self.sizes = sizes

    def forward(self, ids: Tensor, pick: Pick) -> Tensor:  # type: ignore[override]
        if isinstance(pick, Mixture):
            if self.sizes.is_fixed(0):
                return F.embedding(ids, self.weight)
            out: Tensor = _MixedEmbedding.apply(ids, self.weight, self.sizes.keep_probability(pick))  # type: ignore[no-untyped-call]
            return out
        # Not the usual contiguous slice: that would copy the whole table for the sake of a few of its rows.
        return F.embedding(ids, self.weight.narrow(1, 0, self.sizes.of(pick)[0]))

    def plain(self, subnet: Subnet) -> nn.Module:
        (width,) = self.sizes.of(subnet)
        made = nn.Embedding(self.num_embeddings, width, device="meta", dtype=self.weight.dtype)
        return load(made, self.training, weight=self.weight[:, :width].contiguous())


class _MixedEmbedding(torch.autograd.Function):
    """Vectors times the probability of each feature; the backward looks them up again and keeps none."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, inside: Tensor) -> Tensor:
        ctx.save_for_backward(ids, weight, inside)
        return F.embedding(ids, weight).mul_(inside.to(weight.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ids, weight, inside = ctx.saved_tensors
        dw = probabilities = None
        if ctx.needs_input_grad[1]:
            scaled = gradient * inside.to(gradient.dtype)
            dw = torch.ops.aten.embedding_dense_backward(scaled, ids, len(weight), -1, False)
        if ctx.needs_input_grad[2]:
            probabilities = F.embedding(ids, weight).mul_(gradient).flatten(0, -2).sum(0).to(inside.dtype)
        return None, dw, probabilities


class TokenEmbedding(Module):
    """Token ids (batch, tokens) as vectors, plus vectors of their positions if there are ``places`` of these."""

    def __init__(
        self, space: Space, vocabulary: int, width: Dim, places: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.token = Embedding(space, vocabulary, width)
        self.place = None if places is None else Embedding(space, places, width)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_gpt2_weights(self)

    def forward(self, ids: Tensor, pick: Pick) -> Tensor:
        x = self.token(ids, pick=pick)
        if self.place is not None:
            x = x + self.place(positions(ids[0]), pick=pick)
        return cast("Tensor", self.dropout(x))


class PatchEmbedding(Module):
    """Images as the vectors of their patches behind that of a class token, plus vectors of their positions."""

    def __init__(
        self, space: Space, image: int, patch: int, width: Dim, channels: int = 3, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.patches = Patches(space, channels, width, patch)
        self.first = Embedding(space, 1, width)
        self.place = Embedding(space, (image // patch) ** 2 + 1, width)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_gpt2_weights(self)

    def forward(self, images: Tensor, pick: Pick) -> Tensor:
        x = self.patches(images, pick=pick).flatten(2).transpose(1, 2)
        first = self.first(torch.zeros_like(x[:, :1, 0], dtype=torch.int64), pick=pick)
        x = torch.cat((first, x), 1)
        return cast("Tensor", self.dropout(x + self.place(positions(x[0, :, 0]), pick=pick)))


class Head(Module):
    """A norm and a linear layer: for every token, for the first, or for the mean of all but the first."""

    def __init__(
        self,
        space: Space,
        width: Dim,
        outputs: int,
        of: Literal["all", "first", "mean"] = "all",
        norm: Callable[[Space, Dim], Module] = LayerNorm,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self._of = of
        self.norm = norm(space, width)
        self.linear = Linear(space, width, outputs, bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_gpt2_weights(self)

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        x = self.norm(x[:, 0] if self._of == "first" else x, pick=pick)
        return cast("Tensor", self.linear(x[:, 1:].mean(1) if self._of == "mean" else x, pick=pick))


# An elastic transformer block, for language and for images.

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
        init_gpt2_weights(self)
        with torch.no_grad():
            for last in (self.attention.out, self.mlp.down):
                cast("Tensor", last.weight).div_(self._sums**0.5)

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x, pick=pick), pick=pick))
        return cast("Tensor", x + self.dropout(self.mlp(self.norm2(x, pick=pick), pick=pick)))


def init_gpt2_weights(module: nn.Module) -> None:
    """Fresh matrices, normal with a deviation of .02, and biases of 0, of all parts; vectors keep what they have."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=SPREAD)
        elif name.rpartition(".")[2] == "bias":
            nn.init.zeros_(parameter)


# An elastic perceptron of two layers, plain or gated.


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
            gate, up = linears((self.gate, self.up), x, pick)
            inner = call(self.activation, gate, pick=pick) * up
        return cast("Tensor", self.down(inner, pick=pick))
