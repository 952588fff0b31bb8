"""The expectation of a weight under a mixture, in one pass over it, and what autograd needs of it.

A weight W (rows x columns) of which a pick uses a prefix of each has the expectation W * M, where M[r, c] is the
probability that (r, c) is within the pick. M is given by its factors, M = A.T @ B with A (rank x rows) and
B (rank x columns). Neither M nor W * M is kept for the backward: both come from W, A and B again, at the price of a
pass over the weight, which is small beside the activations that it spares.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from weft.supernet.elastic.fused import weight_kernels
from weft.supernet.elastic.passes import exactly, expected, gradients


def superpose(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The expected weight; rows are those of the first dimension, columns all others."""
    rows, columns = rows.to(weight.dtype), columns.to(weight.dtype)
    out: Tensor = _Superpose.apply(weight, rows, columns)  # type: ignore[no-untyped-call]
    return out


def mixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
    """``F.linear`` with the expected weight and bias."""
    rows, columns = rows.to(weight.dtype), columns.to(weight.dtype)
    form = _Scaled if few_tokens(x, weight, len(rows)) else _Masked
    out: Tensor = form.apply(x, weight, bias, rows, columns)  # type: ignore[no-untyped-call]
    return out


def few_tokens(x: Tensor, weight: Tensor, rank: int) -> bool:
    """Whether the mask is better put on what goes in and out: of rank 1, and less work.

    5 passes over the inputs and 2 over the outputs, against some 5 over the weight (measured: benchmarks/elastic.py),
    unless these are fused.
    """
    tokens = x.numel() // x.shape[-1]
    few = rank == 1 and tokens * (5 * weight.shape[1] + 2 * weight.shape[0]) < 5 * weight.numel()
    return few and weight_kernels(weight, rank) is None


class _Superpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(weight, rows, columns)
        return expected(weight.flatten(1), None, rows, columns, weight.dtype)[0].view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, rows, columns = ctx.saved_tensors
        flat = weight.flatten(1)
        wants = (ctx.needs_input_grad[0], False, *ctx.needs_input_grad[1:])
        # The gradient belongs to the graph, so it is not written over.
        direct, _, own, other = gradients(wants, gradient.reshape(flat.shape), flat, None, rows, columns)
        return None if direct is None else direct.view_as(weight), own, other


class _Masked(torch.autograd.Function):
    """The mask is put on the weight: passes over the weight alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
        x = _begin(ctx, x, weight, bias, rows, columns)
        return F.linear(x, *expected(weight, bias, rows, columns, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, rows, columns = ctx.saved_tensors
        wants = ctx.needs_input_grad
        inputs, outputs = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        dx = raw = total = None
        with _autocast(ctx):
            if wants[0]:
                dx = torch.matmul(gradient, expected(weight, None, rows, columns, gradient.dtype)[0]).to(ctx.dtype)
            if wants[1] or wants[3] or wants[4]:
                # Laid out as the weight is.
                same = weight.is_contiguous()
                raw = torch.mm(outputs.t(), inputs) if same else torch.mm(inputs.t(), outputs).t()
            if bias is not None and (wants[2] or wants[3]):
                total = outputs.sum(0)
        return dx, *gradients(wants[1:], raw, weight, bias, rows, columns, total, reuse=True)


class _Scaled(torch.autograd.Function):
    """The mask, of rank 1, is put on the inputs and the outputs: fewer passes over the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
        x = _begin(ctx, x, weight, bias, rows, columns)
        return F.linear(x * columns[0], weight, bias).mul_(rows[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, rows, columns = ctx.saved_tensors
        wants = ctx.needs_input_grad
        inputs, outputs = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        dx = dw = db = own = other = total = None
        with _autocast(ctx):
            behind = torch.mm(outputs * rows[0], weight) if wants[0] or wants[4] else None
            raw = torch.mm(outputs.t(), inputs * columns[0]).to(weight.dtype) if wants[1] or wants[3] else None
            if bias is not None and (wants[2] or wants[3]):
                total = outputs.sum(0)
        with exactly(x.device.type):
            if behind is not None:
                if wants[4]:
                    other = (inputs * behind.to(columns.dtype)).sum(0, keepdim=True)
                dx = behind.mul_(columns[0]).view_as(x).to(ctx.dtype)
            if raw is not None:
                own = torch.linalg.vecdot(raw, weight)[None] if wants[3] else None
                dw = raw.mul_(rows[0][:, None])
            if total is not None:
                total = total.to(bias.dtype)
                db = total * rows[0] if wants[2] else None
                own = None if own is None else torch.addcmul(own, total, bias)
        return dx, dw, db, own, other


def _begin(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
    """Saves what the backward needs, the input as F.linear uses it: under autocast that is the smaller one."""
    kind = x.device.type
    ctx.dtype = x.dtype
    ctx.autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    if ctx.autocast[1] and x.dtype != torch.float64:
        x = x.to(ctx.autocast[2])
    ctx.save_for_backward(x, weight, bias, rows, columns)
    return x


def _autocast(ctx: Any) -> AbstractContextManager[Any]:
    """Autocast as it was in the forward, whatever it is now."""
    kind, enabled, dtype = ctx.autocast
    return torch.autocast(kind, dtype) if enabled else exactly(kind)
