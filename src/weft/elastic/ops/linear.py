"""Linear layers with expected weights, and gradients down to the probabilities, in few operations.

``superpose`` takes the factors of a mask as they are; here they belong to the sizes of a matrix under a mixture, whose
``chances`` are the probabilities p of s, the combinations of the choices that rows and columns share, of a, those of
the rows alone, and of b, those of the columns alone:

    A[s, r] = p(s) * sum over a of p(a) [r < rows(s, a)]      B[s, c] = sum over b of p(b) [c < columns(s, b)]

So autograd sees one node from the probabilities to the output, and layers of the same sizes that read the same input
(q, k and v) are one product. A and B, which are large beside the activations of few tokens, are made again and not
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from weft.elastic.mixture import Mixture
from weft.elastic.ops.dispatch import linear_kernels, weight_kernels
from weft.elastic.sizes import Chances, Sizes

Factors = tuple[Tensor, Tensor]


def mixed_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], sizes: Sizes, mixture: Mixture
) -> Tensor:
    """``F.linear`` with the expected weights and biases (as many, or none) of layers of these sizes, side by side."""
    chances = sizes.chances(mixture)
    fused = linear_kernels(weights, chances, sizes)
    out: Tensor = _Together.apply(x, *chances, fused, sizes, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return out


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shared: Tensor | None,
        first: Tensor | None,
        second: Tensor | None,
        fused: Any,
        sizes: Sizes,
        count: int,
        *held: Tensor,
    ) -> Tensor:
        kind = x.device.type
        ctx.dtype, ctx.fused, ctx.sizes, ctx.count = x.dtype, fused, sizes, count
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))  # kept as the product uses it
        chances = (shared, first, second)
        ctx.save_for_backward(x, *chances, *held)
        with exactly(kind):
            factors = _factors(ctx, chances, held[0].dtype)
            return F.linear(x, *_expected(ctx, held[:count], held[count:], chances, factors, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x, *given), count, wants = ctx.saved_tensors, ctx.count, ctx.needs_input_grad
        chances, weights, biases = tuple(given[:3]), given[3 : 3 + count], given[3 + count :]
        asked = (any(wants[7 : 7 + count]), any(wants[7 + count :]), *wants[1:4])
        dx = None
        found: tuple[Tensor | None, ...] = (None,) * (3 + len(weights) + len(biases))
        with exactly(x.device.type):
            factors = _factors(ctx, chances, weights[0].dtype)
            if wants[0]:
                expected, _ = _expected(ctx, weights, (), chances, factors, gradient.dtype)
                dx = torch.matmul(gradient, expected).to(ctx.dtype)
            if any(asked):
                inputs, outputs = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
                raw = torch.mm(outputs.t(), inputs)
                total = outputs.sum(0, dtype=weights[0].dtype) if biases else None
                of = ctx.fused.gradients if factors is None else partial(_gradients, factors)
                found = of(asked, raw, total, weights, biases, chances, ctx.sizes)
        return dx, *found[:3], None, None, None, *found[3:]


def _factors(ctx: Any, chances: Chances, dtype: torch.dtype) -> Factors | None:
    """A and B; None where fused kernels work them out as they go."""
    if ctx.fused is not None:
        return None
    rows, columns = ctx.sizes.make_factors(*chances)
    return rows.to(dtype), columns.to(dtype)


def _expected(
    ctx: Any,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    chances: Chances,
    factors: Factors | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """The expected weights one below the other, and biases one behind the other, in this dtype."""
    if factors is None:
        return ctx.fused.expected(weights, biases, chances, ctx.sizes, dtype)  # type: ignore[no-any-return]
    pairs = [
        expected(weight, biases[index] if biases else None, *factors, dtype) for index, weight in enumerate(weights)
    ]
    weight, bias = pairs[0] if len(pairs) == 1 else (_joined([w for w, _ in pairs]), _joined([b for _, b in pairs]))
    assert weight is not None
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    return None if tensors[0] is None else torch.cat(tensors)  # type: ignore[arg-type]


def _gradients(
    factors: Factors,
    asked: tuple[bool, ...],
    raw: Tensor,
    total: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    chances: Chances,
    sizes: Sizes,
) -> tuple[Tensor | None, ...]:
    """The gradients of chances, weights and biases, from those of the expected weights (raw) and biases (total)."""
    weighs, shifts, *likely = asked
    wants = (weighs, shifts, likely[0] or likely[1], likely[2])
    own: Tensor | None = None
    other: Tensor | None = None
    found: list[list[Tensor | None]] = [[], []]
    height = len(weights[0])
    for index, weight in enumerate(weights):
        span = slice(index * height, (index + 1) * height)
        bias, sums = (None, None) if total is None else (biases[index], total[span])
        direct, shift, more, others = gradients(wants, raw[span], weight, bias, *factors, sums, reuse=True)
        own = more if own is None or more is None else own.add_(more)
        other = others if other is None or others is None else other.add_(others)
        found[0].append(direct)
        found[1] += [] if total is None else [shift]
    return *_of_chances(likely, own, other, chances, sizes), *found[0], *found[1]


def _of_chances(
    likely: Sequence[bool], own: Tensor | None, other: Tensor | None, chances: Chances, sizes: Sizes
) -> tuple[Tensor | None, ...]:
    """The gradients of the probabilities, from those of both factors."""
    shared, first, second = chances
    of_shared = of_first = of_second = None
    if own is not None:
        table = sizes.table(0, first if shared is None else shared)  # type: ignore[arg-type]
        own = torch.bmm(own.to(table.dtype)[:, None], table)[:, 0]  # by shared combination and one of the rows alone
        if likely[0]:
            of_shared = own[:, 0] if first is None else torch.mv(own, first)
        if likely[1]:
            of_first = own[0] if shared is None else torch.mv(own.t(), shared)
    if other is not None and second is not None:
        table = sizes.table(1, second)
        of_second = torch.mv(table.flatten(0, 1).t(), other.to(table.dtype).flatten())
    return of_shared, of_first, of_second


# The expectation of a weight under a mixture, in one pass over it, and what autograd needs of it.
#
# A weight W (rows x columns) of which a pick uses a prefix of each has the expectation W * M, where M[r, c] is the
# probability that (r, c) is within the pick. M is given by its factors, M = A.T @ B with A (rank x rows) and B (rank
# x columns). Neither M nor W * M is kept for the backward: both come from W, A and B again, at the price of a pass
# over the weight, which is small beside the activations that it spares.


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


# The passes over a weight that a mixture costs: its expectation, and gradients from that of the expectation.
#
# The mask on the weight is rows.T @ columns; ``superpose`` says what it means. Where there are fused kernels, they do
# the same in fewer passes.

_PIECE = 1 << 17
"""Entries of a weight that a CPU takes at a time, so that they stay in its cache from one operation to the next."""


def expected(
    weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The expected weight, laid out as the weight is, and bias, for products of this dtype."""
    fused = weight_kernels(weight, len(rows))
    turned = _is_turned(weight)
    with exactly(weight.device.type):
        if fused is not None and not turned:
            return fused.expected(weight, bias, rows, columns, dtype)  # type: ignore[no-any-return]
        likely = None if bias is None else bias * _inside(rows)
        if turned:
            return expected(weight.t(), None, columns, rows, dtype)[0].t(), likely
        pieces = _pieces(weight)
        if not pieces:
            return _mask(rows, columns).mul_(weight), likely
        out = torch.empty_like(weight)
        for piece in pieces:
            _mask(rows[:, piece], columns, out[piece]).mul_(weight[piece])
    return out, likely


def gradients(
    wants: tuple[bool, ...],
    raw: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    total: Tensor | None = None,
    reuse: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of weight, bias, rows and columns, as far as wanted, from those of the expected weight (raw, laid
    out as the weight is) and bias (total); with ``reuse`` raw may be written over."""
    fused = None if raw is None else weight_kernels(weight, len(rows))
    turned = _is_turned(weight)
    with exactly(weight.device.type):
        if fused is not None and not turned:
            return fused.gradients(wants, raw, weight, bias, rows, columns, total, reuse)  # type: ignore[no-any-return]
        direct = own = other = None
        if raw is not None and turned:
            swapped = (wants[0], False, wants[3], wants[2])
            direct, _, other, own = gradients(swapped, raw.t(), weight.t(), None, columns, rows, None, reuse)
            direct = None if direct is None else direct.t()
        elif raw is not None:
            raw, reuse = raw.to(weight.dtype), reuse or raw.dtype != weight.dtype
            direct = None if not wants[0] else raw if reuse else torch.empty_like(weight)
            own, other = _by_piece(wants[2:], raw, weight, rows, columns, direct)
        direct_bias = None
        if bias is not None and total is not None:
            total = total.to(bias.dtype)
            direct_bias = total * _inside(rows) if wants[1] else None
            own = None if own is None else torch.addcmul(own, total, bias)
    return direct, direct_bias, own, other


def exactly(kind: str) -> AbstractContextManager[Any]:
    """Without autocast on this kind of device."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _is_turned(weight: Tensor) -> bool:
    """Whether it is the transpose of what lies in memory."""
    return not weight.is_contiguous() and weight.t().is_contiguous()


def _inside(rows: Tensor) -> Tensor:
    """The probability that a row is within the pick: the first column always is, and its factor is 1."""
    return rows.sum(0) if len(rows) > 1 else rows[0]


def _mask(rows: Tensor, columns: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.mm(rows.t(), columns, out=out) if len(rows) > 1 else torch.mul(rows.t(), columns, out=out)


def _pieces(weight: Tensor) -> list[slice]:
    """Rows to take at a time; none where all go at once."""
    height = max(1, _PIECE // weight.shape[1])
    if weight.device.type != "cpu" or len(weight) <= height:
        return []
    return [slice(start, start + height) for start in range(0, len(weight), height)]


def _by_piece(
    wanted: tuple[bool, ...], raw: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, direct: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of rows and columns; the weight's goes into ``direct``, which may be raw itself."""
    pieces = _pieces(weight)
    if not pieces:
        return _of_factors(wanted, raw, weight, rows, columns, direct, None)
    owns, other = [], None
    buffer = torch.empty_like(weight[pieces[0]])
    for piece in pieces:
        part, into = raw[piece], None if direct is None else direct[piece]
        work = buffer[: len(part)]
        own, more = _of_factors(wanted, part, weight[piece], rows[:, piece], columns, into, work)
        owns.append(own)
        other = more if other is None or more is None else other.add_(more)
    return torch.cat(owns, dim=1) if wanted[0] else None, other  # type: ignore[arg-type]


def _of_factors(
    wanted: tuple[bool, ...],
    raw: Tensor,
    weight: Tensor,
    rows: Tensor,
    columns: Tensor,
    direct: Tensor | None,
    work: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    own = other = None
    if wanted[0] or wanted[1]:
        work = torch.mul(raw, weight, out=work)
        # In this order: columns @ work.t() takes up to thrice the time.
        own = torch.mm(work, columns.t()).t() if wanted[0] else None
        other = torch.mm(rows, work) if wanted[1] else None
    if direct is not None:
        torch.mul(raw, _mask(rows, columns, work), out=direct)
    return own, other
