"""Passages that gradients take back: what is moved forward one way is moved backward in its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.plan.execute.passage import Move
from weft.plan.execute.wire import Wire

Moves = tuple[Move, ...]


def carried(tensor: Tensor, wire: Wire, moves: Moves, backs: Sequence[Moves]) -> tuple[Tensor, ...]:
    """The tensor after the moves, once for each way in ``backs`` that a reader's gradient lies.

    Readers that want a tensor alike may leave their gradients differently: whole, or as summands. Each of ``backs``
    brings one of them to how the tensor itself lies, where they are added.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()) or not (moves or any(backs)):
        return (wire.carry(tensor, moves),) * len(backs)
    outcome: tuple[Tensor, ...] = _Carried.apply(tensor, wire, moves, tuple(backs))  # type: ignore[no-untyped-call]
    return outcome


def summed(tensor: Tensor, wire: Wire, axes: Sequence[int]) -> Tensor:
    """The sum over the devices along the mesh axes, on each of them; each of them uses it for its own part."""
    if not axes:
        return tensor
    outcome: Tensor = _Summed.apply(tensor, wire, tuple(axes))  # type: ignore[no-untyped-call]
    return outcome


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, wire: Wire, moves: Moves, backs: tuple[Moves, ...]) -> tuple[Tensor, ...]:
        ctx.wire, ctx.backs = wire, backs
        ctx.set_materialize_grads(False)
        moved = wire.carry(tensor, moves)
        return tuple(moved.view_as(moved) for _ in backs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        total = None
        for gradient, back in zip(gradients, ctx.backs, strict=True):
            if gradient is not None:
                gradient = ctx.wire.carry(gradient, back)
                total = gradient if total is None else total + gradient
        return total, None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, wire: Wire, axes: tuple[int, ...]) -> Tensor:
        ctx.wire, ctx.axes = wire, axes
        return wire.total(tensor, axes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Each device's gradient says how its own part of the result depends on the sum.
        return ctx.wire.total(gradient, ctx.axes), None, None
