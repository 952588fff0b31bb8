"""Llama of transformers, made elastic."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from weft.errors import SupernetError
from weft.supernet.elastic.attention import Attention
from weft.supernet.elastic.ends import Head, TokenEmbedding
from weft.supernet.elastic.mlp import MLP
from weft.supernet.elastic.norm import RMSNorm
from weft.supernet.elastic.pretrained import Wanted, activation, fill
from weft.supernet.elastic.rotary import Rotary
from weft.supernet.elastic.transformer import TransformerBlock

if TYPE_CHECKING:
    from weft.supernet.chain import Chain


def llama(model: Any, wanted: Wanted) -> Chain:
    """The chain of a LlamaForCausalLM; every layer has its own copy of the rotary frequencies."""
    config, body, space = model.config, model.model, wanted.space
    turn = body.rotary_emb
    if turn.rope_type in ("dynamic", "longrope"):
        raise SupernetError(
            f"the rotary frequencies of kind '{turn.rope_type}' change with the length of the input, which a chain's "
            "cannot: use another rope_type"
        )
    count, dim = config.num_hidden_layers, body.layers[0].self_attn.head_dim
    width = wanted.size("width", config.hidden_size, wanted.width)
    heads = wanted.layers("heads", config.num_attention_heads, wanted.heads, count)
    groups = wanted.layers("kv_heads", config.num_key_value_heads, wanted.kv_heads, count)
    hidden = wanted.layers("hidden", config.intermediate_size, wanted.hidden, count)
    frequencies = turn.inv_freq.tolist()
    turns = [Rotary(dim, frequencies=frequencies, gain=turn.attention_scaling) for _ in range(count)]
    norm = partial(RMSNorm, eps=config.rms_norm_eps)
    layers = []
    with torch.device("meta"):
        first = TokenEmbedding(space, config.vocab_size, width)
        for i, block in enumerate(body.layers):
            bias = config.attention_bias
            attention = Attention(
                space,
                width,
                heads[i],
                dim,
                groups[i],
                causal=True,
                bias=bias,
                out_bias=bias,
                rotary=turns[i].to(turn.inv_freq.device),
                eager=wanted.eager,
            )
            act = activation(config.hidden_act, block.mlp.act_fn)
            mlp = MLP(space, width, hidden[i], act, gated=True, bias=config.mlp_bias)
            layers.append(TransformerBlock(space, width, attention, mlp, norm))
        head = Head(space, width, config.vocab_size, norm=norm, bias=False)
    fill(first.token, weight=body.embed_tokens.weight)
    for made, block in zip(layers, body.layers, strict=True):
        fill(made.norm1, weight=block.input_layernorm.weight)
        fill(made.norm2, weight=block.post_attention_layernorm.weight)
        source, mlp = block.self_attn, block.mlp
        pairs = [
            (made.attention.q, source.q_proj),
            (made.attention.k, source.k_proj),
            (made.attention.v, source.v_proj),
            (made.attention.out, source.o_proj),
            (made.mlp.gate, mlp.gate_proj),
            (made.mlp.up, mlp.up_proj),
            (made.mlp.down, mlp.down_proj),
        ]
        for part, linear in pairs:
            fill(part, weight=linear.weight, bias=linear.bias)
    fill(head.norm, weight=body.norm.weight)
    fill(head.linear, weight=model.lm_head.weight)
    return wanted.chain(first, layers, head)
