"""The expectation of a norm under a mixture of widths, and what autograd needs of it.

Widths e_1 < ... < e_K cut the features into K segments. With the probability q_k of width e_k and the mean and the
inverse deviation over the first e_k features, the expectation of the padded norm is, on segment j,

    out = weight * (x * A_j - C_j) + bias * u_j      A_j = sum over k >= j of q_k rstd_k, C_j that of q_k rstd_k mean_k,
                                                     u_j that of q_k.

So the statistics of the segments, gathered once, serve all widths, and what the backward needs beside x itself are two
numbers a token and a width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.elastic.ops.dispatch import norm_kernels


def mixed_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    probabilities: Tensor,
    widths: Sequence[int],
    eps: float,
    centred: bool = True,
) -> Tensor:
    """The expected ``F.layer_norm`` over the last dimension, or ``F.rms_norm`` if not centred.

    Computes in single precision at least.
    """
    fused = norm_kernels(x, weight, probabilities, widths)
    form: Any = _SegmentedNorm if fused is None else fused.TritonNorm
    out: Tensor = form.apply(x, weight, bias, probabilities, tuple(widths), eps, centred)
    return out


class _SegmentedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        probabilities: Tensor,
        widths: tuple[int, ...],
        eps: float,
        centred: bool,
    ) -> Tensor:
        rows, weights, shifts, probs = _accurate(x.reshape(-1, x.shape[-1]), weight, bias, probabilities)
        lengths = [end - start for start, end in zip((0, *widths[:-1]), widths, strict=True)]
        mean, rstd = _statistics(_cut(rows, lengths), widths, lengths, eps, centred)
        ctx.save_for_backward(x, weight, bias, probabilities, mean, rstd)
        ctx.widths, ctx.lengths = widths, lengths
        scale, shift, inside = _coefficients(probs, mean, rstd)
        out = torch.empty_like(rows)
        segments = _cut(out, lengths)
        # Two passes and not one addcmul: on a CPU that is slower than both.
        for part, into, factor in zip(_cut(rows, lengths), segments, _columns(scale), strict=True):
            torch.mul(part, factor, out=into)
        if shift is not None:
            for into, level in zip(segments, _columns(shift), strict=True):
                into.sub_(level)
        out.mul_(weights)
        if shifts is not None:
            out.add_(shifts * _by_feature(inside, lengths))
        # As F.layer_norm: on a GPU autocast makes its result one of single precision.
        single = x.is_cuda and torch.is_autocast_enabled("cuda")
        return out.view(x.shape).to(out.dtype if single else x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, probabilities, mean, rstd = ctx.saved_tensors
        wants, widths, lengths = ctx.needs_input_grad, ctx.widths, ctx.lengths
        rows, weights, shifts, probs = _accurate(x.reshape(-1, x.shape[-1]), weight, bias, probabilities)
        dy = gradient.reshape(rows.shape).to(rows.dtype)
        scale, shift, inside = _coefficients(probs, mean, rstd)
        product = dy * rows
        dx = dw = db = dq = dshift = None
        # What the statistics of a width are asked for: sums over its features, by way of the segments.
        dscale = inner = _cumulate(_sums(product, weights, lengths))
        if shift is not None:
            dshift = _cumulate(_sums(dy, weights, lengths).neg_())
            inner = torch.addcmul(dscale, mean, dshift)
        if wants[1]:
            dw = _sums_over_tokens(product, scale, lengths)
            if shift is not None:
                dw = dw - _sums_over_tokens(dy, shift, lengths)
            dw = dw.to(weight.dtype)
        total = dy.sum(0) if shifts is not None and (wants[2] or wants[3]) else None
        if wants[2] and total is not None:
            db = (total * _by_feature(inside, lengths)).to(weight.dtype)
        if wants[3]:
            dq = (rstd * inner).sum(1)
            if total is not None:
                dq = dq + _cumulate(_sums(total[None], shifts, lengths))[:, 0]
            dq = dq.to(probabilities.dtype)
        if wants[0]:
            probs = probs[:, None] * rstd
            # dvar_k = -1/2 rstd_k^3 * q_k * inner_k; x enters the variance as 2 (x - mean_k) / e_k.
            slope = _over(-probs * rstd.square() * inner, widths)
            level = None if dshift is None else _remaining(_over(probs * dshift, widths) - slope * mean)
            dx, direct = torch.empty_like(rows), torch.mul(dy, weights, out=product)
            segments = _cut(dx, lengths)
            for part, into, factor in zip(_cut(rows, lengths), segments, _columns(_remaining(slope)), strict=True):
                torch.mul(part, factor, out=into)
            for part, into, factor in zip(_cut(direct, lengths), segments, _columns(scale), strict=True):
                into.add_(part.mul_(factor))
            if level is not None:
                for into, constant in zip(segments, _columns(level), strict=True):
                    into.add_(constant)
            dx = dx.view(x.shape).to(x.dtype)
        return dx, dw, db, dq, None, None, None


def _cut(values: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """The segments of the last dimension."""
    return torch.split(values, list(lengths), -1)


def _sums(values: Tensor, weights: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sums over the features of each segment, by these weights: segments x tokens."""
    pairs = zip(_cut(values, lengths), _cut(weights, lengths), strict=True)
    return torch.stack([torch.mv(part, weight) for part, weight in pairs])


def _sums_over_tokens(values: Tensor, weights: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sums over the tokens, by the weights of each segment (segments x tokens): one for each feature."""
    pairs = zip(_cut(values, lengths), weights.unbind(0), strict=True)
    return torch.cat([torch.mv(part.t(), weight) for part, weight in pairs])


def _accurate(*tensors: Tensor | None) -> list[Any]:
    kind = torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
    return [None if tensor is None else tensor.to(kind) for tensor in tensors]


def _statistics(
    parts: Sequence[Tensor], widths: Sequence[int], lengths: Sequence[int], eps: float, centred: bool
) -> tuple[Tensor | None, Tensor]:
    """Mean (None if not centred) and inverse deviation, each widths x tokens, by Chan's rule from those of segments."""
    means: list[Tensor] = []
    variances: list[Tensor] = []
    for part, width, length in zip(parts, widths, lengths, strict=True):
        share = length / width
        mean = part.mean(1) if centred else None
        centred_part = part if mean is None else part - mean[:, None]  # torch.var_mean takes ten times as long on a CPU
        variance = torch.linalg.vector_norm(centred_part, dim=1).square_().div_(length)
        if variances:
            variance = torch.lerp(variances[-1], variance, share)
            if mean is not None:
                step = mean - means[-1]
                mean = torch.lerp(means[-1], mean, share)
                variance.addcmul_(step, step, value=share * (1 - share))
        variances.append(variance)
        if mean is not None:
            means.append(mean)
    return torch.stack(means) if means else None, torch.stack(variances).add_(eps).rsqrt_()


def _coefficients(probs: Tensor, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """A and C, segments x tokens, and u."""
    each = probs[:, None] * rstd
    shift = None if mean is None else _remaining(each * mean)
    return _remaining(each), shift, _remaining(probs.clone())


def _columns(values: Tensor) -> Sequence[Tensor]:
    """The rows, each as a column beside the tokens."""
    return values[:, :, None].unbind(0)


# Sums along the few widths by hand: torch.cumsum of floats is not deterministic on a GPU.


def _remaining(values: Tensor) -> Tensor:
    """Each row becomes the sum of itself and those behind it."""
    rows = values.unbind(0)
    for before, behind in zip(rows[-2::-1], rows[:0:-1], strict=True):
        before.add_(behind)
    return values


def _cumulate(values: Tensor) -> Tensor:
    """Each row becomes the sum of itself and those before it."""
    rows = values.unbind(0)
    for behind, before in zip(rows[1:], rows[:-1], strict=True):
        behind.add_(before)
    return values


def _over(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Each row divided by its number."""
    for row, size in zip(values.unbind(0), sizes, strict=True):
        row.div_(size)
    return values


def _by_feature(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """One number a segment, spread over its features."""
    return torch.cat([value.expand(length) for value, length in zip(values.unbind(0), lengths, strict=True)])
