"""Attention of several lanes in one call: lanes become samples, since attention looks at each sample by itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ATTENTION = F.scaled_dot_product_attention


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    """``scaled_dot_product_attention`` without dropout; under vmap one kernel for all lanes, not one for each."""
    found: Tensor = _Folded.apply(query, key, value, mask, causal, scale, grouped)  # type: ignore[no-untyped-call]
    return found


class _Folded(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> Tensor:
        # Outside of vmap only forwards that nobody differentiates come here.
        return _attention(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        """Called with plain tensors, whose gradients autograd follows as those of any others."""
        lanes = info.batch_size
        tensors = [_laned(tensor, where, lanes) for tensor, where in zip(args[:3], in_dims[:3], strict=True)]
        mask = None if args[3] is None else _laned(args[3], in_dims[3], lanes)
        batch = tensors[0].shape[1:-3]
        if mask is not None:  # (lanes, ..., length, length), with ones where it is the same for all
            wide = mask.view(lanes, *[1] * (tensors[0].dim() - mask.dim()), *mask.shape[1:])
            mask = wide.expand(lanes, *batch, *wide.shape[-3:]).flatten(0, -4)
        query, key, value = (tensor.flatten(0, -4) for tensor in tensors)
        found = _attention(query, key, value, mask, *args[4:])
        return found.view(lanes, *batch, *found.shape[-3:]), 0


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    return _ATTENTION(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped)


def _laned(tensor: Tensor, where: int | None, lanes: int) -> Tensor:
    return tensor.expand(lanes, *tensor.shape) if where is None else tensor.movedim(where, 0)
