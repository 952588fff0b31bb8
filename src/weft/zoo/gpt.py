"""Spaces of language models: one width for all layers; heads and hidden size of each; depth.

The choices are those of TangleNAS (Sukthanker et al., AutoML 2024), but with a head size of 64 throughout, so that the
heads of a layer do not depend on the width: see ``layered``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weft.space import Space
from weft.supernet import Chain, Elastic
from weft.supernet.elastic import Head, TokenEmbedding
from weft.zoo.layered import layered


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
