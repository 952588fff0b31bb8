"""The ends of a transformer: tokens or images become vectors, and vectors become predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor, nn

from weft.space import Space
from weft.supernet.elastic.embedding import Embedding
from weft.supernet.elastic.leaf import Module
from weft.supernet.elastic.linear import Linear
from weft.supernet.elastic.mixture import Pick
from weft.supernet.elastic.norm import LayerNorm
from weft.supernet.elastic.patches import Patches
from weft.supernet.elastic.rotary import places
from weft.supernet.elastic.sizes import Dim
from weft.supernet.elastic.transformer import draw


class TokenEmbedding(Module):
    """Token ids (batch, tokens) as vectors, to which those of the places are added if there are ``places`` of them."""

    def __init__(
        self, space: Space, vocabulary: int, width: Dim, places: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.token = Embedding(space, vocabulary, width)
        self.place = None if places is None else Embedding(space, places, width)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw(self)

    def forward(self, ids: Tensor, pick: Pick) -> Tensor:
        x = self.token(ids, pick=pick)
        if self.place is not None:
            x = x + self.place(places(ids[0]), pick=pick)
        return cast("Tensor", self.dropout(x))


class PatchEmbedding(Module):
    """Images as the vectors of their patches behind that of a class token, with those of the places added."""

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
        draw(self)

    def forward(self, images: Tensor, pick: Pick) -> Tensor:
        x = self.patches(images, pick=pick).flatten(2).transpose(1, 2)
        first = self.first(torch.zeros_like(x[:, :1, 0], dtype=torch.int64), pick=pick)
        x = torch.cat((first, x), 1)
        return cast("Tensor", self.dropout(x + self.place(places(x[0, :, 0]), pick=pick)))


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
        draw(self)

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        x = self.norm(x[:, 0] if self._of == "first" else x, pick=pick)
        return cast("Tensor", self.linear(x[:, 1:].mean(1) if self._of == "mean" else x, pick=pick))
