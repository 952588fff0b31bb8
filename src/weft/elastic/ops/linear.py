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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from weft.supernet.elastic import passes
from weft.supernet.elastic.fused import linear_kernels
from weft.supernet.elastic.mixture import Mixture
from weft.supernet.elastic.sizes import Chances, Sizes

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
        with passes.exactly(kind):
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
        with passes.exactly(x.device.type):
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
        passes.expected(weight, biases[index] if biases else None, *factors, dtype)
        for index, weight in enumerate(weights)
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
        direct, shift, more, others = passes.gradients(wants, raw[span], weight, bias, *factors, sums, reuse=True)
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
