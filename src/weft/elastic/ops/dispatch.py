"""Chooses fused kernels: those for GPUs need triton, and plain tensors of the types that they support."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from weft.elastic.sizes import Probabilities, Sizes


def weight_kernels(weight: Tensor, rank: int) -> ModuleType | None:
    """``triton_weight``, for a weight with factors of a small rank in single precision on a GPU."""
    if not _can_fuse(weight):
        return None
    from weft.elastic.ops import triton_weight

    return triton_weight if rank <= triton_weight.MOST_RANK else None


def linear_kernels(weights: Sequence[Tensor], probabilities: Probabilities, sizes: Sizes) -> ModuleType | None:
    """``triton_linear``, for a few weights and combinations of options in single precision on a GPU."""
    if not _can_fuse(*weights, *(held for held in probabilities if held is not None)):
        return None
    from weft.elastic.ops import triton_linear

    few = len(weights) <= triton_linear.MOST_LAYERS and sizes.combinations <= triton_linear.MOST_COMBINATIONS
    return triton_linear if few else None


def norm_kernels(x: Tensor, weight: Tensor, probabilities: Tensor, widths: Sequence[int]) -> ModuleType | None:
    """``triton_norm``, for few widths and no double precision on a GPU."""
    if not _can_fuse(x, weight, probabilities, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
        return None
    from weft.elastic.ops import triton_norm

    few = len(widths) <= triton_norm.MOST_WIDTHS and x.shape[-1] <= triton_norm.MOST_FEATURES
    return triton_norm if few else None


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within the block this GPU is the current one; that costs nothing where it is already."""
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def _can_fuse(*tensors: Tensor, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> bool:
    """Whether these are on a GPU, of one of these types, and plain: subclasses (fake tensors, distributed ones) support
    torch's operations only."""
    plain = all(held.is_cuda and held.dtype in dtypes and type(held) in (Tensor, nn.Parameter) for held in tensors)
    return plain and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
