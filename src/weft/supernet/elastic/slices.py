"""Slices of weights that autograd keeps as what they are: parts of a weight, and not copies of it.

A slice is copied so that kernels find it laid out as in the plain module and round alike. What is kept for the backward
is its place in the weight: the copy is made again then, from what the weight holds by that time. That spares memory,
and a backward under newer weights (``bounded``) sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Place(NamedTuple):
    view: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def narrowed(tensor: Tensor, *sizes: int) -> Tensor:
    """The first entries along every dimension, as a view."""
    for dim, size in enumerate(sizes):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, size)
    return tensor


def with_slice(run: Callable[[Tensor], Tensor], view: Tensor) -> Tensor:
    """What ``run`` makes of the slice, laid out without gaps."""
    if view.is_contiguous() or not torch.is_grad_enabled():
        return run(view.contiguous())
    copy, part = view.contiguous(), view.detach()
    where = copy.untyped_storage().data_ptr()

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != where:
            return tensor
        return _Place(part, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        return run(copy)


def _unpack(kept: Any) -> Tensor:
    if not isinstance(kept, _Place):
        return kept  # type: ignore[no-any-return]
    return kept.view.contiguous().as_strided(kept.shape, kept.stride, kept.offset)
