"""AutoFormer's spaces of vision transformers: one width for all layers; heads and hidden size of each; depth.

Chen et al., "AutoFormer: Searching Transformers for Visual Recognition", ICCV 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weft.errors import SupernetError
from weft.space import Space
from weft.supernet import Chain, Elastic
from weft.supernet.elastic import Head, PatchEmbedding
from weft.zoo.layered import layered


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
