"""Attention on parts of batch and heads; with dropout, its weights are dropped as a single device would drop them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from weft.plan.execute.chance import keep
from weft.plan.execute.site import Local, Site, Unfit
from weft.plan.execute.wire import Wire
from weft.plan.layout import REPLICATED


def _attention(site: Site) -> Local:
    query = site.argument("query").tensor
    if site.argument("is_causal") and site.parts(query.dims[-2]) > 1:
        raise Unfit("a part of the queries does not know which of them it is, and the mask is causal")
    probability = site.argument("dropout_p")
    if not probability:
        return site.local()
    keys = site.argument("key").tensor
    shape = (*query.shape[:-1], keys.shape[-2])
    # The weights have the axes of the queries; the keys' length is whole.
    laid = tuple(place if place < len(shape) - 1 else REPLICATED for place in site.wanted(site.argument("query")))
    at = {name: site.index(name) for name in ("attn_mask", "is_causal")}

    def run(wire: Wire, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        q, k, v = args[:3]
        ones = torch.ones(shape, dtype=q.dtype, device=wire.device)
        kept = keep(wire, functional.dropout(ones, probability), laid)
        if kwargs.get("enable_gqa"):
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        scale = kwargs.get("scale")
        scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        scores = _masked(scores, args[at["attn_mask"]], args[at["is_causal"]])
        # A query that may see no key at all gives zeros, as torch's own attention does.
        weights: Tensor = torch.ops.aten._safe_softmax(scores, -1)
        return torch.matmul(weights * kept, v)

    return site.local(run)


def _masked(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


RULES: dict[str, Callable[[Site], Local]] = {"scaled_dot_product_attention": _attention}
