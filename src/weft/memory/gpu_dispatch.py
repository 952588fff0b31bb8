"""The kernels that a GPU takes where the CPU, or a fake tensor, has others: attention, dropout, recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.plan.memory import recurrent
from weft.plan.memory.kernels import Kernels
from weft.plan.memory.overrides import Kernel, overriding

aten = torch.ops.aten


@contextmanager
def as_on_gpu(kernels: Kernels, adding: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Within the block, operators on (fake) tensors of the CPU take the way that they take on this device; within
    ``adding``, sums would be formed in place if the tensors held data."""
    kept: list[Tensor] = []

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        way = choose(query, key, value, attn_mask, kernels)
        if attn_mask is not None and attn_mask.dtype == torch.bool and way != "math":
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask, 0.0)
        operands: tuple[Any, ...]
        keeps = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        if way == "cudnn":
            operands = (query, key, value, attn_mask, keeps, dropout_p, is_causal, False)
            return aten._scaled_dot_product_cudnn_attention(*operands, scale=scale)[0]
        if way == "flash":
            operands = (query, key, value, dropout_p, is_causal, False)
            return aten._scaled_dot_product_flash_attention(*operands, scale=scale)[0]
        if way == "efficient":
            mask = _padded(attn_mask, query, key)
            operands = (query, key, value, mask, keeps, dropout_p, is_causal)
            return aten._scaled_dot_product_efficient_attention(*operands, scale=scale)[0]
        operands = (query, key, value, attn_mask, dropout_p, is_causal, None)
        with adding():
            return aten._scaled_dot_product_attention_math(*operands, scale=scale, enable_gqa=enable_gqa)[0]

    def dropout(input: Tensor, p: float, train: bool) -> Any:
        if train and 0 < p < 1 and input.numel():
            return aten.native_dropout(input, p, train)[0]
        if not train or p == 0:
            return input
        return input * torch.zeros_like(input)

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if bias is not None and input.is_contiguous():
            flat = torch.addmm(bias, input.reshape(-1, input.shape[-1]), weight.t())
            return flat if input.dim() == 2 else flat.view(*input.shape[:-1], weight.shape[0])
        if bias is not None and input.dim() == 2:
            return torch.addmm(bias, input, weight.t())
        result = torch.matmul(input, weight.t())
        # In place, as with tensors that hold data; with fake ones PyTorch would make another.
        return result if bias is None else result.add_(bias)

    own: dict[str, Kernel | None] = {"scaled_dot_product_attention": attention, "dropout": dropout, "linear": linear}
    own |= {f"{kind}.input": recurrent.operator(kind, kept) for kind in recurrent.GATES}
    with overriding(own, "AutogradCPU"):
        yield


def choose(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kernels: Kernels) -> str:
    """The kernel of an attention: ``cudnn``, ``flash``, ``efficient`` or ``math`` (cuda/sdp_utils.cpp)."""
    operands = (query, key, value)
    if any(one.dim() != 4 or one.stride(-1) != 1 for one in operands):
        return "math"
    half, width = query.element_size() == 2, query.shape[-1]
    grouped = key.shape[1] != query.shape[1]
    learned = mask is not None and mask.requires_grad
    crooked = mask is not None and mask.shape[-1] > 1 and mask.stride(-1) != 1
    if half and not crooked and not learned and width <= 128:
        if kernels.cudnn_attention and width % 8 == 0:
            return "cudnn"
        if mask is None and width % 8 == 0:
            return "flash"
    aligned = width % (8 if half else 4) == 0 and value.shape[-1] % (8 if half else 4) == 0
    if aligned and not grouped and not crooked:
        return "efficient"
    return "math"


def _padded(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Rows of a mask begin at multiples of eight elements, and it is as large as the products."""
    if mask is None:
        return None
    if any(stride % 8 for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, -length % 8))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
