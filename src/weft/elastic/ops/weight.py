"""The expected weight of a layer under a mixture, and its gradients, in one pass over the weight each.

A weight W (rows x columns) of which a subnet uses a prefix of each has the expectation W * M, where M[r, c] is the
probability that the subnet uses (r, c). M is given by its factors, M = A.T @ B with A (rank x rows) and B (rank x
columns). Neither M nor W * M is kept for the backward: both are computed again from W, A and B. That costs one more
pass over the weight, which is small beside the memory of the activations that it spares.

Where there are fused kernels (``triton_weight``), they do the same in fewer passes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.elastic.ops.dispatch import weight_kernels

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
        expected_bias = None if bias is None else bias * _inside(rows)
        if turned:
            return expected(weight.t(), None, columns, rows, dtype)[0].t(), expected_bias
        pieces = _pieces(weight)
        if not pieces:
            return _mask(rows, columns).mul_(weight), expected_bias
        out = torch.empty_like(weight)
        for piece in pieces:
            _mask(rows[:, piece], columns, out[piece]).mul_(weight[piece])
    return out, expected_bias


def gradients(
    wants: tuple[bool, ...],
    raw: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    total: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of weight, bias, rows and columns, as far as wanted, from those of the expected weight (raw, laid
    out as the weight is, and may be written over) and bias (total)."""
    fused = None if raw is None else weight_kernels(weight, len(rows))
    turned = _is_turned(weight)
    with exactly(weight.device.type):
        if fused is not None and not turned:
            return fused.gradients(wants, raw, weight, bias, rows, columns, total)  # type: ignore[no-any-return]
        direct = of_rows = of_columns = None
        if raw is not None and turned:
            swapped = (wants[0], False, wants[3], wants[2])
            direct, _, of_columns, of_rows = gradients(swapped, raw.t(), weight.t(), None, columns, rows)
            direct = None if direct is None else direct.t()
        elif raw is not None:
            raw = raw.to(weight.dtype)
            direct = raw if wants[0] else None
            of_rows, of_columns = _by_piece(wants[2:], raw, weight, rows, columns, direct)
        direct_bias = None
        if bias is not None and total is not None:
            total = total.to(bias.dtype)
            direct_bias = total * _inside(rows) if wants[1] else None
            of_rows = None if of_rows is None else torch.addcmul(of_rows, total, bias)
    return direct, direct_bias, of_rows, of_columns


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
    """The gradients of rows and columns; the weight's goes into ``direct``, which is raw itself."""
    pieces = _pieces(weight)
    if not pieces:
        return _of_factors(wanted, raw, weight, rows, columns, direct, None)
    row_parts, of_columns = [], None
    buffer = torch.empty_like(weight[pieces[0]])
    for piece in pieces:
        part, into = raw[piece], None if direct is None else direct[piece]
        work = buffer[: len(part)]
        of_rows, column_part = _of_factors(wanted, part, weight[piece], rows[:, piece], columns, into, work)
        row_parts.append(of_rows)
        of_columns = column_part if of_columns is None or column_part is None else of_columns.add_(column_part)
    return torch.cat(row_parts, dim=1) if wanted[0] else None, of_columns  # type: ignore[arg-type]


def _of_factors(
    wanted: tuple[bool, ...],
    raw: Tensor,
    weight: Tensor,
    rows: Tensor,
    columns: Tensor,
    direct: Tensor | None,
    work: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    of_rows = of_columns = None
    if wanted[0] or wanted[1]:
        work = torch.mul(raw, weight, out=work)
        # In this order: columns @ work.t() takes up to thrice the time.
        of_rows = torch.mm(work, columns.t()).t() if wanted[0] else None
        of_columns = torch.mm(rows, work) if wanted[1] else None
    if direct is not None:
        torch.mul(raw, _mask(rows, columns, work), out=direct)
    return of_rows, of_columns
