"""GPT-2 of transformers, made elastic."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.errors import SupernetError
from weft.space import Space
from weft.supernet.elastic.attention import Attention
from weft.supernet.elastic.ends import Head, TokenEmbedding
from weft.supernet.elastic.grid import Grid
from weft.supernet.elastic.mixture import Pick
from weft.supernet.elastic.mlp import MLP
from weft.supernet.elastic.norm import LayerNorm
from weft.supernet.elastic.pretrained import Wanted, activation, fill
from weft.supernet.elastic.sizes import Dim
from weft.supernet.elastic.transformer import TransformerBlock

if TYPE_CHECKING:
    from weft.supernet.chain import Chain

Turned = partial(Grid, transposed=True)
"""A linear layer with its weight as inputs x outputs, which is how GPT-2's are multiplied."""


class JoinedAttention(Attention):
    """Attention whose q, k and v come from one product, rows of the grid (3, heads, head_dim)."""

    def _make(self, space: Space, width: Dim, grid: tuple[Dim, Dim, Dim], bias: bool, out_bias: bool) -> None:
        heads, _, dim = grid
        self.qkv = Turned(space, width, (3, heads, dim), bias)
        self.out = Turned(space, (heads, dim), width, out_bias)

    def project(self, x: Tensor, pick: Pick) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = torch.chunk(self.qkv(x, pick=pick), 3, -1)
        return q, k, v


def gpt2(model: Any, wanted: Wanted) -> Chain:
    """The chain of a GPT2LMHeadModel; the head's weight, which the model shares with its embedding, is its own."""
    config, body, space = model.config, model.transformer, wanted.space
    if config.add_cross_attention or (wanted.eager and config.reorder_and_upcast_attn):
        raise SupernetError("GPT-2 with add_cross_attention or reorder_and_upcast_attn cannot be made elastic")
    count, own = config.num_hidden_layers, config.hidden_size
    width = wanted.size("width", own, wanted.width)
    heads = wanted.layers("heads", config.num_attention_heads, wanted.heads, count)
    hidden = wanted.layers("hidden", body.h[0].mlp.c_fc.nf, wanted.hidden, count)
    norm = partial(LayerNorm, eps=config.layer_norm_epsilon)
    layers = []
    with torch.device("meta"):
        first = TokenEmbedding(space, config.vocab_size, width, config.max_position_embeddings, config.embd_pdrop)
        for i, block in enumerate(body.h):
            attention = JoinedAttention(
                space,
                width,
                heads[i],
                block.attn.head_dim,
                causal=True,
                scale=block.attn.scaling,
                eager=wanted.eager,
            )
            act = activation(config.activation_function, block.mlp.act)
            mlp = MLP(space, width, hidden[i], act, linear=Turned)
            layers.append(TransformerBlock(space, width, attention, mlp, norm, config.resid_pdrop))
        head = Head(space, width, config.vocab_size, norm=norm, bias=False)
    fill(first.token, weight=body.wte.weight)
    fill(first.place, weight=body.wpe.weight)
    for made, block in zip(layers, body.h, strict=True):
        pairs = [
            (made.norm1, block.ln_1),
            (made.attention.qkv, block.attn.c_attn),
            (made.attention.out, block.attn.c_proj),
            (made.norm2, block.ln_2),
            (made.mlp.up, block.mlp.c_fc),
            (made.mlp.down, block.mlp.c_proj),
        ]
        for part, source in pairs:
            fill(part, weight=source.weight, bias=source.bias)
    fill(head.norm, weight=body.ln_f.weight, bias=body.ln_f.bias)
    fill(head.linear, weight=model.lm_head.weight)
    return wanted.chain(first, layers, head)
