"""An elastic embedding: every vector has the first features of the largest size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from weft.elastic.mixture import Mixture, Pick
from weft.elastic.module import Leaf, load
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
            out: Tensor = _Mixed.apply(ids, self.weight, self.sizes.keep_probability(pick))  # type: ignore[no-untyped-call]
            return out
        # Not the usual contiguous slice: that would copy the whole table for the sake of a few of its rows.
        return F.embedding(ids, self.weight.narrow(1, 0, self.sizes.of(pick)[0]))

    def plain(self, subnet: Subnet) -> nn.Module:
        (width,) = self.sizes.of(subnet)
        made = nn.Embedding(self.num_embeddings, width, device="meta", dtype=self.weight.dtype)
        return load(made, self.training, weight=self.weight[:, :width].contiguous())


class _Mixed(torch.autograd.Function):
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
