"""AutoFormer's spaces of vision transformers: one width for all layers; heads and hidden size of each; depth.

Chen et al., "AutoFormer: Searching Transformers for Visual Recognition", ICCV 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weft.elastic import MLP, Attention, Head, PatchEmbedding, TokenEmbedding, TransformerBlock
from weft.errors import SupernetError
from weft.space import Expr, Space
from weft.supernet import Chain, Elastic


def autoformer_tiny(classes: int = 1000, image: int = 224, patch: int = 16) -> Chain:
    """The published choices of the tiny space, about 1.06e9 subnets.

    The largest has 10.4 million parameters. Of the published supernet the relative positions are left out.
    """
    return vit((192, 216, 240), (12, 13, 14), (3, 4), (3.5, 4.0), classes, image, patch)


def autoformer_small(classes: int = 1000, image: int = 224, patch: int = 16) -> Chain:
    """The published choices of the small space, about 7.7e13 subnets; see ``autoformer_tiny``."""
    return vit((320, 384, 448), (12, 13, 14), (5, 6, 7), (3.0, 3.5, 4.0), classes, image, patch)


def autoformer_base(classes: int = 1000, image: int = 224, patch: int = 16) -> Chain:
    """The published choices of the base space, about 1.0e13 subnets; see ``autoformer_tiny``."""
    return vit((528, 576, 624), (14, 15, 16), (9, 10), (3.0, 3.5, 4.0), classes, image, patch)


def vit_test() -> Chain:
    """Small enough to train in seconds on a CPU, on the 8 x 8 digits: 774 subnets."""
    return vit((16, 24, 32), (1, 2, 3), (1, 2, 3), (1.0, 2.5), 10, 8, 2, channels=1, head_dim=8)


def vit(
    embeds: Sequence[int],
    depths: Sequence[int],
    heads: Sequence[int],
    ratios: Sequence[float],
    classes: int,
    image: int,
    patch: int,
    channels: int = 3,
    head_dim: int = 64,
    dropout: float = 0.0,
) -> Chain:
    """Vision transformers with a class token, that predict from the mean of the patches.

    The choices are ``embed`` and ``depth``, and for each layer ``heads0``, ``ratio0`` and so on.
    """
    if image % patch:
        raise SupernetError(f"images of {image} x {image} have no whole number of patches of {patch} x {patch}")
    space = Space()
    embed = space.integer("embed", embeds)
    return Chain(
        Elastic(space, "patches", partial(PatchEmbedding, space, image, patch, embed, channels, dropout)),
        *layered(space, embed, depths, heads, ratios, head_dim, dropout=dropout),
        Elastic(space, "head", partial(Head, space, embed, classes, "mean")),
    )


# Spaces of language models: one width for all layers; heads and hidden size of each; depth.
#
# The choices are those of TangleNAS (Sukthanker et al., AutoML 2024), but with a head size of 64 throughout, so that
# the heads of a layer do not depend on the width: see ``layered``.


def gpt_small(vocabulary: int = 50304, block: int = 224, dropout: float = 0.2) -> Chain:
    """The space for TinyStories, about 1.6e7 subnets."""
    return gpt((384, 576, 768), (5, 6, 7), (6, 8, 12), (2, 3, 4), vocabulary, block, dropout=dropout)


def gpt_default(vocabulary: int = 50304, block: int = 1024, dropout: float = 0.0) -> Chain:
    """The space of the size of GPT-2, about 9.5e11 subnets."""
    return gpt((192, 384, 768), (10, 11, 12), (6, 8, 12), (2, 3, 4), vocabulary, block, dropout=dropout)


def gpt_shakespeare(vocabulary: int = 65, block: int = 256, dropout: float = 0.2) -> Chain:
    """The space for the characters of Shakespeare's works, about 1.8e6 subnets."""
    return gpt((96, 192, 384), (4, 5, 6), (2, 4, 6), (2, 3, 4), vocabulary, block, dropout=dropout)


def gpt_test(vocabulary: int = 128, block: int = 32) -> Chain:
    """Small enough to train in seconds on a CPU, on characters: 774 subnets."""
    return gpt((16, 24, 32), (1, 2, 3), (1, 2, 3), (1, 2.5), vocabulary, block, head_dim=8)


def gpt(
    embeds: Sequence[int],
    depths: Sequence[int],
    heads: Sequence[int],
    ratios: Sequence[float],
    vocabulary: int,
    block: int,
    head_dim: int = 64,
    dropout: float = 0.0,
) -> Chain:
    """Language models with learned places, for sequences of up to ``block`` tokens, whose ids are the input.

    The weights of tokens and head are not tied, so that each can lie on a stage of its own. The choices are ``embed``
    and ``depth``, and for each layer ``heads0``, ``ratio0`` and so on.
    """
    space = Space()
    embed = space.integer("embed", embeds)
    return Chain(
        Elastic(space, "tokens", partial(TokenEmbedding, space, vocabulary, embed, block, dropout)),
        *layered(space, embed, depths, heads, ratios, head_dim, causal=True, dropout=dropout),
        Elastic(space, "head", partial(Head, space, embed, vocabulary, bias=False)),
    )


# The middle of the zoo's transformers: elastic layers of which a subnet uses the first, each of its own size.


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
