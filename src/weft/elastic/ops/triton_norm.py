"""The expectation of a norm under a mixture of widths, fused for GPUs with triton; ``ops.norm`` says what it computes.

A program owns some tokens. Sums over tokens are left by each program in a row of its own and added in a fixed order, so
that the same inputs give the same bits every time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.elastic.ops.dispatch import current_device

MOST_WIDTHS, MOST_FEATURES = 16, 8192
_PROGRAMS = 512  # of the backward, at most: each leaves a row of sums


class TritonNorm(torch.autograd.Function):
    """What ``ops.norm.mixed_norm`` applies, of the same arguments."""

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
        features = x.shape[-1]
        rows = x.reshape(-1, features).contiguous()
        # As F.layer_norm: autocast makes its result one of single precision.
        single = torch.is_autocast_enabled("cuda")
        out = torch.empty_like(rows, dtype=torch.float32 if single else x.dtype)
        number = rows.shape[0]
        mean, rstd = torch.empty(2, len(widths), number, device=x.device, dtype=torch.float32).unbind(0)
        table, (block, tokens) = _widths(widths, x.device), _tile(features)
        if number:
            with current_device(x.device):
                _forward[(-(-number // tokens),)](
                    rows,
                    weight,
                    weight if bias is None else bias,
                    probabilities.contiguous(),
                    table,
                    out,
                    mean,
                    rstd,
                    number,
                    features,
                    eps,
                    WIDTHS=len(widths),
                    CENTRED=centred,
                    BIAS=bias is not None,
                    TOKENS=tokens,
                    BLOCK=block,
                    num_warps=_warps(block),
                )
        ctx.save_for_backward(x, weight, bias, probabilities, mean, rstd)
        ctx.widths, ctx.centred = widths, centred
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, probabilities, mean, rstd = ctx.saved_tensors
        features, count = x.shape[-1], len(ctx.widths)
        rows, dy = x.reshape(-1, features).contiguous(), gradient.reshape(-1, features).contiguous()
        dx = torch.empty_like(rows)
        table, (block, tokens) = _widths(ctx.widths, x.device), _tile(features)
        number = rows.shape[0]
        tiles = -(-number // tokens)
        programs = max(1, min(_PROGRAMS, tiles))
        # The gradients of weight, bias and probabilities side by side.
        parts = torch.empty(programs, 2 * features + count, device=x.device, dtype=torch.float32)
        with current_device(x.device):
            _backward[(programs,)](
                rows,
                dy,
                weight,
                weight if bias is None else bias,
                probabilities.contiguous(),
                table,
                mean,
                rstd,
                dx,
                parts,
                number,
                features,
                -(-tiles // programs),
                WIDTHS=count,
                CENTRED=ctx.centred,
                BIAS=bias is not None,
                TOKENS=tokens,
                BLOCK=block,
                SLOTS=_power(count),
                num_warps=_warps(block),
            )
        wants = ctx.needs_input_grad
        dw, db, dq = parts.sum(0).split_with_sizes([features, features, count])
        return (
            dx.view(x.shape) if wants[0] else None,
            dw.to(weight.dtype) if wants[1] else None,
            db.to(weight.dtype) if wants[2] else None,
            dq.to(probabilities.dtype) if wants[3] else None,
            None,
            None,
            None,
        )


@cache
def _widths(widths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(widths, dtype=torch.int32, device=device)  # copied once: a copy makes the host wait


def _tile(features: int) -> tuple[int, int]:
    """Features, up to a power of two, and tokens of a program."""
    block = _power(features)
    return block, max(1, 2048 // block)


def _power(number: int) -> int:
    """The next power of two; triton's own takes a while to say so."""
    return 1 << (number - 1).bit_length()


def _warps(block: int) -> int:
    return max(4, block // 512)


@triton.jit(do_not_specialize_on_alignment=("probabilities",))  # type: ignore[untyped-decorator,unused-ignore]
def _forward(  # type: ignore[no-untyped-def]  # annotations of pointers would be read as globals
    x,
    weight,
    bias,
    probabilities,
    widths,
    out,
    means,
    rstds,
    rows,
    features,
    eps,
    WIDTHS: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    feature = tl.arange(0, BLOCK)
    in_rows = row < rows
    in_features = feature < features
    at = row[:, None].to(tl.int64) * features + feature[None, :]
    within = in_rows[:, None] & in_features[None, :]
    value = tl.load(x + at, mask=within, other=0.0).to(tl.float32)
    scale = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
    shift = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
    inside = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(WIDTHS):
        width = tl.load(widths + k)
        q = tl.load(probabilities + k).to(tl.float32)
        here = (feature < width) & in_features
        mean = tl.zeros((TOKENS,), dtype=tl.float32)
        if CENTRED:
            mean = tl.sum(tl.where(here[None, :], value, 0.0), axis=1) / width
        apart = tl.where(here[None, :], value - mean[:, None], 0.0)
        variance = tl.sum(apart * apart, axis=1) / width
        rstd = 1.0 / tl.sqrt(variance + eps)
        tl.store(means + k * rows + row, mean, mask=in_rows)
        tl.store(rstds + k * rows + row, rstd, mask=in_rows)
        each = q * rstd
        scale += tl.where(here[None, :], each[:, None], 0.0)
        shift += tl.where(here[None, :], (each * mean)[:, None], 0.0)
        inside += tl.where(here, q, 0.0)
    w = tl.load(weight + feature, mask=in_features, other=0.0).to(tl.float32)
    result = (value * scale - shift) * w[None, :]
    if BIAS:
        b = tl.load(bias + feature, mask=in_features, other=0.0).to(tl.float32)
        result += (b * inside)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize_on_alignment=("probabilities",))  # type: ignore[untyped-decorator,unused-ignore]
def _backward(  # type: ignore[no-untyped-def]  # annotations of pointers would be read as globals
    x,
    dy,
    weight,
    bias,
    probabilities,
    widths,
    means,
    rstds,
    dx,
    parts,
    rows,
    features,
    turns,
    WIDTHS: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    feature = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    in_features = feature < features
    w = tl.load(weight + feature, mask=in_features, other=0.0).to(tl.float32)
    b = tl.zeros((BLOCK,), dtype=tl.float32)
    if BIAS:
        b = tl.load(bias + feature, mask=in_features, other=0.0).to(tl.float32)
    inside = tl.zeros((BLOCK,), dtype=tl.float32)  # how likely a feature, and with it its bias, is within the pick
    for k in tl.static_range(WIDTHS):
        inside += tl.where(feature < tl.load(widths + k), tl.load(probabilities + k).to(tl.float32), 0.0)
    sum_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    sum_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    sum_chance = tl.zeros((SLOTS,), dtype=tl.float32)
    for turn in range(turns):
        row = (program * turns + turn) * TOKENS + tl.arange(0, TOKENS)
        in_rows = row < rows
        at = row[:, None].to(tl.int64) * features + feature[None, :]
        within = in_rows[:, None] & in_features[None, :]
        value = tl.load(x + at, mask=within, other=0.0).to(tl.float32)
        gradient = tl.load(dy + at, mask=within, other=0.0).to(tl.float32)
        direct = gradient * w[None, :]
        product = direct * value
        scale = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
        shift = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
        slope = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
        level = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
        for k in tl.static_range(WIDTHS):
            width = tl.load(widths + k)
            q = tl.load(probabilities + k).to(tl.float32)
            here = (feature < width) & in_features
            mean = tl.load(means + k * rows + row, mask=in_rows, other=0.0)
            rstd = tl.load(rstds + k * rows + row, mask=in_rows, other=0.0)
            each = q * rstd
            pull = tl.zeros((TOKENS,), dtype=tl.float32)
            if CENTRED:
                pull = -tl.sum(tl.where(here[None, :], direct, 0.0), axis=1)
            inner = tl.sum(tl.where(here[None, :], product, 0.0), axis=1) + mean * pull
            asked = rstd * inner
            if BIAS:
                asked += tl.sum(tl.where(here[None, :], gradient * b[None, :], 0.0), axis=1)
            sum_chance += tl.where(slot == k, tl.sum(asked, axis=0), 0.0)
            steep = -each * rstd * rstd * inner / width
            scale += tl.where(here[None, :], each[:, None], 0.0)
            shift += tl.where(here[None, :], (each * mean)[:, None], 0.0)
            slope += tl.where(here[None, :], steep[:, None], 0.0)
            level += tl.where(here[None, :], (each * pull / width - steep * mean)[:, None], 0.0)
        sum_weight += tl.sum(gradient * (value * scale - shift), axis=0)
        sum_bias += tl.sum(gradient, axis=0)
        change = direct * scale + value * slope + level
        tl.store(dx + at, change.to(dx.dtype.element_ty), mask=within)
    into = parts + program * (2 * features + WIDTHS)
    tl.store(into + feature, sum_weight, mask=in_features)
    tl.store(into + features + feature, sum_bias * inside, mask=in_features)
    tl.store(into + 2 * features + slot, sum_chance, mask=slot < WIDTHS)
