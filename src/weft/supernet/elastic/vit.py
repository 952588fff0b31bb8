"""ViT of transformers, made elastic."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.errors import SupernetError
from weft.supernet.elastic.attention import Attention
from weft.supernet.elastic.ends import Head, PatchEmbedding
from weft.supernet.elastic.mlp import MLP
from weft.supernet.elastic.norm import LayerNorm
from weft.supernet.elastic.pretrained import Wanted, activation, fill
from weft.supernet.elastic.transformer import TransformerBlock

if TYPE_CHECKING:
    from weft.supernet.chain import Chain


def vit(model: Any, wanted: Wanted) -> Chain:
    """The chain of a ViTForImageClassification."""
    config, body, space = model.config, model.vit, wanted.space
    if not isinstance(model.classifier, nn.Linear):
        raise SupernetError("this ViT has no classifier: give num_labels, so that there is something to predict")
    if not isinstance(config.image_size, int) or not isinstance(config.patch_size, int):
        raise SupernetError(
            f"only square images and patches can be made elastic, not {config.image_size} and {config.patch_size}"
        )
    count = config.num_hidden_layers
    width = wanted.size("width", config.hidden_size, wanted.width)
    heads = wanted.layers("heads", config.num_attention_heads, wanted.heads, count)
    hidden = wanted.layers("hidden", config.intermediate_size, wanted.hidden, count)
    norm = partial(LayerNorm, eps=config.layer_norm_eps)
    drop = config.hidden_dropout_prob
    layers = []
    with torch.device("meta"):
        first = PatchEmbedding(space, config.image_size, config.patch_size, width, config.num_channels, drop)
        for i, block in enumerate(body.layers):
            dim = block.attention.head_dim
            attention = Attention(space, width, heads[i], dim, bias=config.qkv_bias, eager=wanted.eager)
            mlp = MLP(space, width, hidden[i], activation(config.hidden_act, block.mlp.activation_fn))
            layers.append(TransformerBlock(space, width, attention, mlp, norm, drop))
        head = Head(space, width, config.num_labels, "first", norm)
    source = body.embeddings
    fill(first.patches, weight=source.patch_embeddings.projection.weight, bias=source.patch_embeddings.projection.bias)
    fill(first.first, weight=source.cls_token[0])
    fill(first.place, weight=source.position_embeddings[0])
    for made, block in zip(layers, body.layers, strict=True):
        pairs = [
            (made.norm1, block.layernorm_before),
            (made.attention.q, block.attention.q_proj),
            (made.attention.k, block.attention.k_proj),
            (made.attention.v, block.attention.v_proj),
            (made.attention.out, block.attention.o_proj),
            (made.norm2, block.layernorm_after),
            (made.mlp.up, block.mlp.fc1),
            (made.mlp.down, block.mlp.fc2),
        ]
        for part, own in pairs:
            fill(part, weight=own.weight, bias=own.bias)
    fill(head.norm, weight=body.layernorm.weight, bias=body.layernorm.bias)
    fill(head.linear, weight=model.classifier.weight, bias=model.classifier.bias)
    return wanted.chain(first, layers, head)
