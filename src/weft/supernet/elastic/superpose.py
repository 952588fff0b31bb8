"""The expectation of a weight under a mixture, in one pass over it, and what autograd needs of it.

A weight W (rows x columns) of which a pick uses a prefix of each has the expectation W * M, where M[r, c] is the
probability that (r, c) is within the pick. M is given by its factors, M = A.T @ B with A (rank x rows) and
B (rank x columns). Neither M nor W * M is kept for the backward: both come from W, A and B again, at the price of a
pass over the weight, which is small beside the activations that it spares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def superpose(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The expected weight; rows are those of the first dimension, columns all others."""
    out: Tensor = _Superpose.apply(weight, rows, columns)  # type: ignore[no-untyped-call]
    return out


def mixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
    """``F.linear`` with the expected weight and bias."""
    tokens = x.numel() // x.shape[-1]
    # Of rank 1 the mask can be put on what goes in and out instead, which is less as long as there are few tokens.
    if len(rows) == 1 and 2 * tokens * sum(weight.shape) < 3 * weight.numel():
        out: Tensor = _Scaled.apply(x, weight, bias, rows, columns)  # type: ignore[no-untyped-call]
    else:
        out = _Masked.apply(x, weight, bias, rows, columns)  # type: ignore[no-untyped-call]
    return out


def _mask(rows: Tensor, columns: Tensor) -> Tensor:
    return torch.mm(rows.t(), columns) if len(rows) > 1 else rows[0][:, None] * columns


def _factor_gradients(ctx: Any, product: Tensor, rows: Tensor, columns: Tensor, at: int) -> tuple[Any, Any]:
    """Gradients of the factors, from that of the mask."""
    own = torch.mm(columns, product.t()) if ctx.needs_input_grad[at] else None
    other = torch.mm(rows, product) if ctx.needs_input_grad[at + 1] else None
    return own, other


class _Superpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(weight, rows, columns)
        return _mask(rows, columns).mul_(weight.flatten(1)).view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, rows, columns = ctx.saved_tensors
        gradient = gradient.reshape(len(weight), -1)
        own, other = None, None
        if any(ctx.needs_input_grad[1:]):
            own, other = _factor_gradients(ctx, gradient * weight.flatten(1), rows, columns, 1)
        direct = _mask(rows, columns).mul_(gradient).view_as(weight) if ctx.needs_input_grad[0] else None
        return direct, own, other


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias, rows, columns)
        ctx.autocast = _autocast_of(x)
        inside = None if bias is None else bias * rows.sum(0)
        return F.linear(x, _mask(rows, columns).mul_(weight), inside)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, rows, columns = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        mask = _mask(rows, columns)
        dx = dw = db = own = other = None
        with _autocast(ctx):
            if ctx.needs_input_grad[0]:
                dx = torch.matmul(gradient, mask * weight)
            raw = torch.mm(flat.t(), x.reshape(-1, x.shape[-1])).to(weight.dtype)
        if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
            own, other = _factor_gradients(ctx, raw * weight, rows, columns, 3)
        if ctx.needs_input_grad[1]:
            dw = raw.mul_(mask)
        if bias is not None:
            total = flat.sum(0).to(bias.dtype)
            db = total * rows.sum(0) if ctx.needs_input_grad[2] else None
            if own is not None:
                own = own + total * bias
        return dx, dw, db, own, other


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias, rows, columns)
        ctx.autocast = _autocast_of(x)
        return F.linear(x * columns[0], weight, bias).mul_(rows[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, rows, columns = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        scaled = (x * columns[0]).reshape(-1, x.shape[-1])
        dx = dw = db = own = other = None
        with _autocast(ctx):
            if ctx.needs_input_grad[0] or ctx.needs_input_grad[4]:
                behind = torch.matmul(gradient * rows[0], weight)
            raw = torch.mm(flat.t(), scaled).to(weight.dtype)
        if ctx.needs_input_grad[4]:
            other = (x * behind).reshape(-1, x.shape[-1]).sum(0)[None].to(columns.dtype)
        if ctx.needs_input_grad[0]:
            dx = behind.mul_(columns[0])
        total = flat.sum(0).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            inner = torch.bmm(raw[:, None], weight[:, :, None])[:, 0, 0]
            own = (inner if bias is None else inner + total * bias)[None]
        if ctx.needs_input_grad[1]:
            dw = raw.mul_(rows[0][:, None])
        if bias is not None and ctx.needs_input_grad[2]:
            db = total * rows[0]
        return dx, dw, db, own, other


def _autocast_of(x: Tensor) -> tuple[str, bool, torch.dtype]:
    kind = x.device.type
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _autocast(ctx: Any) -> torch.autocast:
    kind, enabled, dtype = ctx.autocast
    return torch.autocast(kind, dtype, enabled)
