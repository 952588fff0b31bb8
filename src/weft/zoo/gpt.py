"""A language model without choices: GPT-2's transformer as nanoGPT trains it, as a chain that can be cut anywhere."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.elastic.transformer import init_gpt2_weights
from weft.errors import SupernetError, nearest
from weft.supernet import Chain, Shared

POSITIONS = ("learned", "rotary")


def language_model(
    vocabulary: int = 65,
    context: int = 256,
    width: int = 384,
    layers: int = 6,
    heads: int = 6,
    dropout: float = 0.2,
    positions: str = "learned",
    bias: bool = False,
    tied: bool = False,
) -> Chain:
    """One GPT, by default that of nanoGPT for the characters of Shakespeare: nothing to choose, and cut anywhere.

    The blocks are ``tokens``, ``layer0`` and so on, and ``head``: ``layers + 2`` of them. They take token ids, up to
    ``context`` of them in a row, and give a score for each of the vocabulary. ``positions`` are learned, or rotary:
    then queries and keys are turned by their place, and the model sees how far apart two tokens are. Unless ``tied``,
    as nanoGPT has them, the weights of tokens and head are two: tied ones exchange gradients once an update.
    """
    if min(vocabulary, context, width, layers, heads) < 1 or not 0.0 <= dropout < 1.0:
        raise SupernetError(
            "a language model has sizes of 1 or more and a dropout from 0 to below 1, not "
            f"vocabulary={vocabulary}, context={context}, width={width}, layers={layers}, heads={heads}, "
            f"dropout={dropout}"
        )
    if positions not in POSITIONS:
        raise SupernetError(f"unknown positions '{positions}'{nearest(str(positions), POSITIONS)}")
    rotary = positions == "rotary"
    if width % heads or (rotary and width // heads % 2):
        raise SupernetError(
            f"a width of {width} has no {heads} heads of one {'even ' if rotary else ''}size: use a multiple of "
            f"{heads * (2 if rotary else 1)}"
        )
    layer = partial(Transformer, width, heads, dropout, bias, 2 * layers, context if rotary else None)
    return Chain(
        Shared(partial(Tokens, vocabulary, context, width, dropout, not rotary), "tokens"),
        *[Shared(layer, f"layer{index}") for index in range(layers)],
        Shared(partial(LanguageHead, width, vocabulary, bias), "head"),
        tie=[("tokens.tokens.weight", "head.out.weight")] if tied else (),
    )


class Tokens(nn.Module):
    """A vector for every token and, if learned, for its place."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float, learned: bool) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width) if learned else None
        self.dropout = nn.Dropout(dropout)
        init_gpt2_weights(self)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise SupernetError(
                f"a row of {length} tokens is longer than the model's context of {self.context}: make the model with a "
                "larger context, or cut the text into shorter rows"
            )
        x: Tensor = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places.weight[:length]
        dropped: Tensor = self.dropout(x)
        return dropped


class Transformer(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Fresh weights are GPT-2's: normal with a deviation of .02, and what ends in one of the model's ``sums`` smaller by
    their square root.
    """

    def __init__(self, width: int, heads: int, dropout: float, bias: bool, sums: int, rotary: int | None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.attention = CausalAttention(width, heads, dropout, bias, rotary)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias)
        self.down = nn.Linear(4 * width, width, bias)
        self.dropout = nn.Dropout(dropout)
        init_gpt2_weights(self)
        with torch.no_grad():
            for last in (self.attention.out, self.down):
                last.weight.div_(sums**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        more: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return x + more


class CausalAttention(nn.Module):
    """Causal self-attention; with ``rotary``, the longest row of tokens, queries and keys are turned by their place."""

    turns: Tensor

    def __init__(self, width: int, heads: int, dropout: float, bias: bool, rotary: int | None) -> None:
        super().__init__()
        self.heads, self.drop, self.rotary = heads, dropout, rotary is not None
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.out = nn.Linear(width, width, bias)
        if rotary is not None:
            size = width // heads
            angles = torch.arange(rotary)[:, None] / 10_000.0 ** (torch.arange(0, size, 2) / size)
            # A table rather than the angles, which would cost every layer a dozen small kernels.
            self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        q, k, v = rows.chunk(3, 1)
        if self.rotary:
            q, k = self._turned(q), self._turned(k)
        drop = self.drop if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed

    def _turned(self, x: Tensor) -> Tensor:
        # The pairs of features (i, i + size / 2), as Llama has them.
        cos, sin = self.turns[:, : x.shape[-2]].to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class LanguageHead(nn.Module):
    """What the model thinks of every token of the vocabulary as the next one."""

    def __init__(self, width: int, vocabulary: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=bias)
        self.out = nn.Linear(width, vocabulary, bias=False)
        init_gpt2_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        # A product of three-dimensional tensors is a view of one of matrices, and torch's zero-bubble schedules cannot
        # take views from a stage.
        scores: Tensor = self.out(self.norm(x)).clone()
        return scores
