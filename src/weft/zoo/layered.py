"""The middle of the zoo's transformers: elastic layers of which a subnet uses the first, each of its own size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weft.space import Expr, Space
from weft.supernet import Elastic
from weft.supernet.elastic import MLP, Attention, TransformerBlock


def layered(
    space: Space,
    embed: Expr,
    depths: Sequence[int],
    heads: Sequence[int],
    ratios: Sequence[float],
    head_dim: int,
    causal: bool = False,
    dropout: float = 0.0,
) -> list[Elastic]:
    """The blocks ``layer0``, ``layer1``, ...; declares the choices ``depth``, and for each layer ``heads`` and
    ``ratio``, which are inactive where the layer is not used.

    The head size is fixed, as AutoFormer has it, so that heads and width are chosen apart. Were it width / heads,
    another number of heads would cut all features anew: a mixture would need an attention for each number of them.
    """
    depth = space.integer("depth", depths)
    blocks = []
    for i in range(max(depths)):
        when = None if i < min(depths) else depth > i
        own = space.integer(f"heads{i}", heads, when=when)
        ratio = space.categorical(f"ratio{i}", ratios, when=when)
        made = partial(_layer, space, embed, own, ratio, head_dim, causal, dropout, max(depths))
        blocks.append(Elastic(space, f"layer{i}", made, when=when))
    return blocks


def _layer(
    space: Space, embed: Expr, heads: Expr, ratio: Expr, head_dim: int, causal: bool, dropout: float, layers: int
) -> TransformerBlock:
    attention = Attention(space, embed, heads, head_dim, causal=causal)
    mlp = MLP(space, embed, ratio * embed)
    # A language model's layers add less to the sum the more of them there are, as in GPT-2.
    return TransformerBlock(space, embed, attention, mlp, dropout=dropout, sums=2 * layers if causal else 1)
