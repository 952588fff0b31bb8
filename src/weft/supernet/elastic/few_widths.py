"""The expectation of a norm under a mixture of few widths on a CPU, by thin products over chunks of the tokens.

What ``normalise`` does to each segment is here one product of K rows, which hold a number a token and a width, with K
rows that are the weight within each width: no pass is cut at the widths.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_MOST_WIDTHS = 8
_CHUNK = 1 << 18  # entries, for each thread


def few_widths(x: Tensor, weight: Tensor, chances: Tensor, widths: Sequence[int]) -> bool:
    """Whether this way is the faster one, for what has one dtype, of single precision at least."""
    few = len(widths) <= _MOST_WIDTHS and x.device.type == "cpu" and type(x) in (Tensor, nn.Parameter)
    return few and x.dtype == weight.dtype == chances.dtype and x.dtype in (torch.float32, torch.float64)


def few_norms(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chances: Tensor,
    widths: tuple[int, ...],
    eps: float,
    centred: bool = True,
) -> Tensor:
    """As ``normalise.mixed_norm``."""
    out: Tensor = _FewNorms.apply(x, weight, bias, chances, widths, eps, centred)  # type: ignore[no-untyped-call]
    return out


class _FewNorms(torch.autograd.Function):
    # Products are written into what is there: so autocast leaves them alone.

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chances: Tensor,
        widths: tuple[int, ...],
        eps: float,
        centred: bool,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        inside, over = _tables(widths, x.dtype)
        weights, likely = inside * weight, chances[:, None]
        shifts = None if bias is None else torch.mv(inside.t(), chances).mul_(bias)
        out, rstd = torch.empty_like(rows), rows.new_empty(len(widths), len(rows))
        mean = torch.empty_like(rstd) if centred else None
        for (values, into), (scale, centre), (spare, other) in _chunks((rows, out), (rstd, mean)):
            if centre is not None:
                torch.mm(over, values.t(), out=centre)
                first = centre[:1]
                step = centre - first
                values = torch.sub(values, first.t(), out=other)
            torch.mm(over, torch.mul(values, values, out=spare).t(), out=scale)
            if centre is not None:
                scale.addcmul_(step, step, value=-1).clamp_min_(0)
            scale.add_(eps).rsqrt_()
            each = scale * likely
            torch.mm(each.t(), weights, out=spare)
            if centre is None:
                torch.mul(spare, values, out=into)
                if shifts is not None:
                    into.add_(shifts)
            elif shifts is None:
                torch.mm(each.mul_(step).neg_().t(), weights, out=into).addcmul_(spare, values)
            else:
                torch.addmm(shifts, each.mul_(step).t(), weights, alpha=-1, out=into).addcmul_(spare, values)
        ctx.save_for_backward(x, weight, bias, chances, mean, rstd)
        ctx.widths = widths
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, chances, mean, rstd = ctx.saved_tensors
        wants, widths = ctx.needs_input_grad, ctx.widths
        rows, dys = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, x.shape[-1])
        inside, over = _tables(widths, x.dtype)
        weights, likely = inside * weight, chances[:, None]
        dx = torch.empty_like(rows) if wants[0] else None
        normal, total = torch.zeros_like(inside), torch.zeros_like(weight)
        for (values, dy, into), (scale, centre), (product, _) in _chunks((rows, dys, dx), (rstd, mean)):
            torch.mul(dy, values, out=product)
            if wants[1] or wants[3]:
                normal.addmm_(scale, product)
                if centre is not None:
                    normal.addmm_(scale * centre, dy, alpha=-1)
            if bias is not None and (wants[2] or wants[3]):
                total += dy.sum(0)
            if into is None:
                continue
            each = scale * likely
            torch.mm(each.t(), weights, out=into).mul_(dy)
            inner, pull = torch.empty_like(each), None
            torch.mm(weights, product.t(), out=inner)
            if centre is not None:
                pull = torch.mm(weights, dy.t(), out=torch.empty_like(each))
                inner.addcmul_(centre, pull, value=-1)
            slope = inner.mul_(each).mul_(scale).mul_(scale)
            into.addcmul_(torch.mm(slope.t(), over, out=product), values, value=-1)
            if pull is not None:
                into.addmm_(each.mul_(pull).addcmul_(slope, centre, value=-1).t(), over, alpha=-1)
        normal.mul_(inside)
        dw = (normal * likely).sum(0) if wants[1] else None
        db = torch.mv(inside.t(), chances).mul_(total) if wants[2] else None
        dq = None
        if wants[3]:
            dq = torch.mv(normal, weight)
            if bias is not None:
                dq.addmv_(inside, total.mul_(bias))
        return None if dx is None else dx.view(x.shape), dw, db, dq, None, None, None


_room = threading.local()


def _chunks(rows: Sequence[Tensor | None], columns: Sequence[Tensor | None]) -> Iterator[Any]:
    """Parts of what has a row or a column for each token, each with room for two results of that shape.

    The room is kept: a new large tensor costs a CPU more than a pass over it.
    """
    first = rows[0]
    assert first is not None
    number, features = first.shape
    most = max(1, min(number, _CHUNK * torch.get_num_threads() // features))
    size = 2 * most * features
    room = getattr(_room, "held", None)
    if room is None or room.dtype != first.dtype or room.numel() < size:
        with torch.inference_mode(False):
            room = _room.held = torch.empty(size, dtype=first.dtype)
    spare = room[:size].view(2, most, features)
    if number <= most:
        yield rows, columns, spare.unbind()
        return
    for start in range(0, number, most):
        end = min(start + most, number)
        yield (
            [None if one is None else one[start:end] for one in rows],
            [None if one is None else one[:, start:end] for one in columns],
            spare[:, : end - start].unbind(),
        )


@cache
def _tables(widths: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Which features are inside of each width, as zeros and ones, and the same over the width."""
    sizes = torch.tensor(widths)[:, None]
    inside = (torch.arange(widths[-1]) < sizes).to(dtype)
    return inside, inside / sizes
