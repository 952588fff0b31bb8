"""The expectation of a LayerNorm under a mixture of few widths, each by torch's own kernel.

On a CPU ``normalise``, which goes by all widths at once, is bound by the number of its operations as long as there are
few tokens: then a kernel for every width takes about .6 of the time (three widths; benchmarks/elastic.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_MOST_WIDTHS, _MOST_ENTRIES = 4, 1 << 18


def few_widths(x: Tensor, weight: Tensor, chances: Tensor, widths: Sequence[int]) -> bool:
    """Whether this way is the faster one, for what has one dtype, of single precision at least."""
    few = len(widths) <= _MOST_WIDTHS and x.numel() <= _MOST_ENTRIES and x.device.type == "cpu"
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
    """As ``normalise.mixed_norm``, for what is centred."""
    assert centred
    out: Tensor = _FewNorms.apply(x, weight, bias, chances, widths, eps)  # type: ignore[no-untyped-call]
    return out


class _FewNorms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, chances: Tensor, widths: tuple[int, ...], eps: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        kept: list[Tensor] = []
        out: Tensor | None = None
        # From the last, which is as wide as the sum.
        for width, chance in zip(widths[::-1], chances.unbind()[::-1], strict=True):
            shift = None if bias is None else bias[:width] * chance
            y, *statistics = torch.native_layer_norm(rows[:, :width], (width,), weight[:width] * chance, shift, eps)
            kept += statistics
            out = _added(out, y)
        ctx.save_for_backward(x, weight, bias, chances, *kept)
        ctx.widths = widths
        assert out is not None
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, chances, *kept = ctx.saved_tensors
        wants = ctx.needs_input_grad
        rows, dy = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, x.shape[-1])
        dx: Tensor | None = None
        dw: Tensor | None = None
        db: Tensor | None = None
        asked: list[Tensor] = []
        total = dy.sum(0) if bias is not None and (wants[2] or wants[3]) else None
        for index, (width, chance) in enumerate(zip(ctx.widths[::-1], chances.unbind()[::-1], strict=True)):
            own = weight[:width]
            of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
                dy[:, :width],
                rows[:, :width],
                (width,),
                kept[2 * index],
                kept[2 * index + 1],
                own * chance,
                None,
                (wants[0], wants[1] or wants[3], False),
            )
            dx = _added(dx, of_x) if wants[0] else None
            dw = _added(dw, of_weight * chance) if wants[1] else None
            db = _added(db, total[:width] * chance) if total is not None and wants[2] else None
            if wants[3]:
                # What a probability multiplies is weight * normalised + bias.
                asked.append(torch.dot(of_weight, own))
                if total is not None and bias is not None:
                    asked[-1] += torch.dot(total[:width], bias[:width])
        dq = torch.stack(asked[::-1]) if wants[3] else None
        return None if dx is None else dx.view(x.shape), dw, db, dq, None, None


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """The sum, of the part padded by zeros."""
    if total is None:
        return part
    total[..., : part.shape[-1]].add_(part)
    return total
