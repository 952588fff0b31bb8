"""A convolution with the expectation of its weight, which the backward computes again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn import grad as gradients  # the public form of autograd's own

from weft.elastic.ops.weight import expected

Pair = tuple[int, int]


def mixed_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    """``F.conv2d`` with the expected weight and bias; the factors are those of ``ops.weight``."""
    rows, columns = rows.to(weight.dtype), columns.to(weight.dtype)
    out: Tensor = _MixedConv.apply(x, weight, bias, rows, columns, stride, padding, dilation, groups)  # type: ignore[no-untyped-call]
    return out


class _MixedConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor, *where: Any
    ) -> Tensor:
        kind = x.device.type
        ctx.dtype = x.dtype
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))  # kept as the convolution uses it
        ctx.save_for_backward(x, weight, bias, rows, columns)
        ctx.where = where
        inside = None if bias is None else bias * rows.sum(0)
        return F.conv2d(x, _expected(weight, rows, columns), inside, *where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, rows, columns = ctx.saved_tensors
        wants = ctx.needs_input_grad
        dx = dw = db = of_rows = of_columns = None
        if wants[0]:
            mixed = _expected(weight, rows, columns).to(gradient.dtype)
            dx = gradients.conv2d_input(x.shape, mixed, gradient, *ctx.where)  # type: ignore[no-untyped-call]
            dx = dx.to(ctx.dtype)
        if wants[1] or wants[3] or wants[4]:
            raw = gradients.conv2d_weight(x, weight.shape, gradient, *ctx.where)  # type: ignore[no-untyped-call]
            raw = raw.to(weight.dtype).flatten(1)
            product = raw * weight.flatten(1) if wants[3] or wants[4] else raw
            of_rows = torch.mm(columns, product.t()) if wants[3] else None
            of_columns = torch.mm(rows, product) if wants[4] else None
            if wants[1]:
                dw = torch.mm(rows.t(), columns).mul_(raw).view_as(weight)
        if bias is not None and (wants[2] or wants[3]):
            total = gradient.sum((0, 2, 3)).to(bias.dtype)
            db = total * rows.sum(0) if wants[2] else None
            of_rows = of_rows if of_rows is None else of_rows + total * bias
        return dx, dw, db, of_rows, of_columns, None, None, None, None


def _expected(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The expected weight: all dimensions but the first count as columns."""
    return expected(weight.flatten(1), None, rows, columns, weight.dtype)[0].view_as(weight)
