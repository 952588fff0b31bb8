"""Operations on many tensors at once: torch's private ``_foreach`` functions, which no other module calls."""

from __future__ import annotations

import torch
from torch import Tensor


def add_(sums: list[Tensor], terms: list[Tensor]) -> None:
    """sums[i] += terms[i]."""
    if sums:
        torch._foreach_add_(sums, terms)


def div(tensors: list[Tensor], divisor: float) -> list[Tensor]:
    """tensors[i] / divisor, as new tensors."""
    return list(torch._foreach_div(tensors, divisor)) if tensors else []


def mul(tensors: list[Tensor], factor: Tensor) -> list[Tensor]:
    """tensors[i] * factor, a tensor with one element, as new tensors; no host synchronisation."""
    return list(torch._foreach_mul(tensors, factor)) if tensors else []


def lerp_(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """tensors[i] += weight * (ends[i] - tensors[i])."""
    if tensors:
        torch._foreach_lerp_(tensors, ends, weight)


def copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """targets[i] = sources[i], in place."""
    if targets:
        torch._foreach_copy_(targets, sources)


def norm(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of all tensors taken together, in float32 or wider, in one fixed order of summation."""
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    norms = torch._foreach_norm(tensors, 2.0, dtype=wide)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total
