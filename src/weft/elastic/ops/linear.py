"""Linear layers with expected weights, and gradients down to the probabilities, in few operations.

``ops.weight`` takes the factors A and B of a mask as they are. Here they belong to the sizes of a matrix under a
mixture. Its ``probabilities`` p are those of the combinations s of choices that rows and columns share, of the
combinations a of the rows alone, and of the combinations b of the columns alone:

    A[s, r] = p(s) * sum over a of p(a) [r < rows(s, a)]      B[s, c] = sum over b of p(b) [c < columns(s, b)]

So autograd sees one node from the probabilities to the output, and layers of the same sizes that read the same input
(q, k and v) are one product. A and B are large beside the activations of few tokens, so the backward computes them
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from weft.elastic.mixture import Mixture
from weft.elastic.ops.dispatch import linear_kernels, weight_kernels
from weft.elastic.ops.weight import exactly, expected, gradients
from weft.elastic.sizes import Probabilities, Sizes

Factors = tuple[Tensor, Tensor]


def mixed_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], sizes: Sizes, mixture: Mixture
) -> Tensor:
    """``F.linear`` with the expected weights and biases (as many, or none) of layers of these sizes, side by side."""
    probabilities = sizes.probabilities(mixture)
    fused = linear_kernels(weights, probabilities, sizes)
    out: Tensor = _MixedLinears.apply(x, *probabilities, fused, sizes, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return out


class _MixedLinears(torch.autograd.Function):
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
        probabilities = (shared, first, second)
        ctx.save_for_backward(x, *probabilities, *held)
        with exactly(kind):
            factors = _factors(ctx, probabilities, held[0].dtype)
            return F.linear(x, *_expected(ctx, held[:count], held[count:], probabilities, factors, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x, *saved), count, wants = ctx.saved_tensors, ctx.count, ctx.needs_input_grad
        probabilities, weights, biases = tuple(saved[:3]), saved[3 : 3 + count], saved[3 + count :]
        asked = (any(wants[7 : 7 + count]), any(wants[7 + count :]), *wants[1:4])
        dx = None
        results: tuple[Tensor | None, ...] = (None,) * (3 + len(weights) + len(biases))
        with exactly(x.device.type):
            factors = _factors(ctx, probabilities, weights[0].dtype)
            if wants[0]:
                expected, _ = _expected(ctx, weights, (), probabilities, factors, gradient.dtype)
                dx = torch.matmul(gradient, expected).to(ctx.dtype)
            if any(asked):
                inputs, outputs = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
                raw = torch.mm(outputs.t(), inputs)
                total = outputs.sum(0, dtype=weights[0].dtype) if biases else None
                of = ctx.fused.gradients if factors is None else partial(_gradients, factors)
                results = of(asked, raw, total, weights, biases, probabilities, ctx.sizes)
        return dx, *results[:3], None, None, None, *results[3:]


def _factors(ctx: Any, probabilities: Probabilities, dtype: torch.dtype) -> Factors | None:
    """A and B; None where fused kernels work them out as they go."""
    if ctx.fused is not None:
        return None
    rows, columns = ctx.sizes.make_mask_factors(*probabilities)
    return rows.to(dtype), columns.to(dtype)


def _expected(
    ctx: Any,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    probabilities: Probabilities,
    factors: Factors | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """The expected weights one below the other, and biases one behind the other, in this dtype."""
    if factors is None:
        return ctx.fused.expected(weights, biases, probabilities, ctx.sizes, dtype)  # type: ignore[no-any-return]
    pairs = [
        expected(weight, biases[index] if biases else None, *factors, dtype) for index, weight in enumerate(weights)
    ]
    weight, bias = pairs[0] if len(pairs) == 1 else (_join([w for w, _ in pairs]), _join([b for _, b in pairs]))
    assert weight is not None
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _join(tensors: Sequence[Tensor | None]) -> Tensor | None:
    return None if tensors[0] is None else torch.cat(tensors)  # type: ignore[arg-type]


def _gradients(
    factors: Factors,
    asked: tuple[bool, ...],
    raw: Tensor,
    total: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    probabilities: Probabilities,
    sizes: Sizes,
) -> tuple[Tensor | None, ...]:
    """Gradients of probabilities, weights and biases, from those of the expected weights (raw) and biases (total)."""
    weighs, shifts, *of_probabilities = asked
    wants = (weighs, shifts, of_probabilities[0] or of_probabilities[1], of_probabilities[2])
    of_rows: Tensor | None = None
    of_columns: Tensor | None = None
    results: list[list[Tensor | None]] = [[], []]
    height = len(weights[0])
    for index, weight in enumerate(weights):
        span = slice(index * height, (index + 1) * height)
        bias, sums = (None, None) if total is None else (biases[index], total[span])
        direct, shift, row_part, column_part = gradients(wants, raw[span], weight, bias, *factors, sums)
        of_rows = row_part if of_rows is None or row_part is None else of_rows.add_(row_part)
        of_columns = column_part if of_columns is None or column_part is None else of_columns.add_(column_part)
        results[0].append(direct)
        results[1] += [] if total is None else [shift]
    return *_of_probabilities(of_probabilities, of_rows, of_columns, probabilities, sizes), *results[0], *results[1]


def _of_probabilities(
    asked: Sequence[bool], of_rows: Tensor | None, of_columns: Tensor | None, probabilities: Probabilities, sizes: Sizes
) -> tuple[Tensor | None, ...]:
    """The gradients of the probabilities, from those of both factors."""
    shared, first, second = probabilities
    of_shared = of_first = of_second = None
    if of_rows is not None:
        table = sizes.table(0, first if shared is None else shared)  # type: ignore[arg-type]
        of_rows = torch.bmm(of_rows.to(table.dtype)[:, None], table)[:, 0]  # by combinations s and a
        if asked[0]:
            of_shared = of_rows[:, 0] if first is None else torch.mv(of_rows, first)
        if asked[1]:
            of_first = of_rows[0] if shared is None else torch.mv(of_rows.t(), shared)
    if of_columns is not None and second is not None:
        table = sizes.table(1, second)
        of_second = torch.mv(table.flatten(0, 1).t(), of_columns.to(table.dtype).flatten())
    return of_shared, of_first, of_second


# One linear layer, from the factors of the mask on its weight; ``ops.weight`` says what the factors are.


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
        return dx, *gradients(wants[1:], raw, weight, bias, rows, columns, total)


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
        dx = dw = db = of_rows = of_columns = total = None
        with _autocast(ctx):
            behind = torch.mm(outputs * rows[0], weight) if wants[0] or wants[4] else None
            raw = torch.mm(outputs.t(), inputs * columns[0]).to(weight.dtype) if wants[1] or wants[3] else None
            if bias is not None and (wants[2] or wants[3]):
                total = outputs.sum(0)
        with exactly(x.device.type):
            if behind is not None:
                if wants[4]:
                    of_columns = (inputs * behind.to(columns.dtype)).sum(0, keepdim=True)
                dx = behind.mul_(columns[0]).view_as(x).to(ctx.dtype)
            if raw is not None:
                of_rows = torch.linalg.vecdot(raw, weight)[None] if wants[3] else None
                dw = raw.mul_(rows[0][:, None])
            if total is not None:
                total = total.to(bias.dtype)
                db = total * rows[0] if wants[2] else None
                of_rows = None if of_rows is None else torch.addcmul(of_rows, total, bias)
        return dx, dw, db, of_rows, of_columns


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
