"""The border between two blocks: where gradients from several consumers are added in one fixed order at every cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.supernet import Carry


class _Boundary(torch.autograd.Function):
    # One node for all tensors of the carry: its backward runs only after everything behind the border is done, so the
    # order in which a tensor's gradients are summed never depends on whether the chain is cut here.
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return gradients


class _Entry(torch.autograd.Function):
    # An alias and not a view: a layer may work on what it gets in place, as nn.ReLU(inplace=True) does.
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(tensor.data for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return gradients


def entered(leaves: Carry) -> Carry:
    """The leaves as a layer behind a cut may use them; their gradients are summed as at any border."""
    places = [index for index, tensor in enumerate(leaves) if tensor.requires_grad]
    passed = list(leaves)
    if places:
        behind = _Entry.apply(*(leaves[index] for index in places))  # type: ignore[no-untyped-call]
        for index, tensor in zip(places, behind, strict=True):
            passed[index] = tensor
    return tuple(passed)


def boundary(carry: Carry) -> Carry:
    """The same tensors behind a border. A single tensor that needs a gradient is a border by itself."""
    places = [index for index, tensor in enumerate(carry) if tensor.requires_grad]
    if len(places) < 2:
        return carry
    passed = list(carry)
    behind = _Boundary.apply(*(carry[index] for index in places))  # type: ignore[no-untyped-call]
    for index, tensor in zip(places, behind, strict=True):
        passed[index] = tensor
    return tuple(passed)
