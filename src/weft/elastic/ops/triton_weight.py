"""The passes over a weight that a mixture costs, fused for GPUs with triton; ``ops.weight`` uses them.

Every program owns one tile and nothing is added by atomics: sums over tiles go through memory and are added in a fixed
order, so that the same inputs give the same bits every time.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.elastic.ops.dispatch import current_device

MOST_RANK = 16
_ROWS, _COLUMNS = 32, 64  # of a tile
_PLACES, _CHUNK = 32, 64  # of a program that adds up what the tiles left: places, and tiles at a time


def expected(
    weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The expected weight and bias, in this dtype, in one pass."""
    weight, rows, columns = weight.contiguous(), rows.contiguous(), columns.contiguous()
    height, width = rows.shape[1], columns.shape[1]
    out = torch.empty_like(weight, dtype=dtype)
    out_bias = None if bias is None else torch.empty_like(bias, dtype=dtype)
    grid = (-(-height // _ROWS), -(-width // _COLUMNS))
    with current_device(weight.device):
        _expected[grid](
            weight,
            weight if bias is None else bias,
            rows,
            columns,
            out,
            out if out_bias is None else out_bias,
            height,
            width,
            RANK=len(rows),
            BIAS=bias is not None,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )
    return out, out_bias


def gradients(
    wants: tuple[bool, ...],
    raw: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    total: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of weight, bias, rows and columns, as far as wanted, from those of the expected weight (raw, which
    may be written over) and bias (total)."""
    raw, weight, rows, columns = raw.contiguous(), weight.contiguous(), rows.contiguous(), columns.contiguous()
    (rank, height), width = rows.shape, columns.shape[1]
    tall, wide = -(-height // _ROWS), -(-width // _COLUMNS)
    direct = None if not wants[0] else raw if raw.dtype == weight.dtype else torch.empty_like(weight)
    by_row = rows.new_empty(wide, rank, height) if wants[2] else None
    by_column = rows.new_empty(tall, rank, width) if wants[3] else None
    own = torch.empty_like(rows) if wants[2] else None
    other = torch.empty_like(columns) if wants[3] else None
    bias_wanted = wants[1] and total is not None
    direct_bias = torch.empty_like(bias) if bias is not None and bias_wanted else None
    spare = raw  # stands where a pointer is not used
    with current_device(weight.device):
        _gradients[(tall, wide)](
            raw,
            weight,
            rows,
            columns,
            spare if direct is None else direct,
            spare if by_row is None else by_row,
            spare if by_column is None else by_column,
            height,
            width,
            RANK=rank,
            DIRECT=wants[0],
            OWN=wants[2],
            OTHER=wants[3],
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )
        if wants[2] or wants[3] or bias_wanted:
            places = max(height, width) if wants[3] else height
            _finish[(-(-places // _PLACES), 2 if wants[3] else 1)](
                spare if by_row is None else by_row,
                spare if by_column is None else by_column,
                rows,
                spare if bias is None else bias,
                spare if total is None else total,
                spare if own is None else own,
                spare if other is None else other,
                spare if direct_bias is None else direct_bias,
                height,
                width,
                tall,
                wide,
                RANK=rank,
                OWN=wants[2],
                OTHER=wants[3],
                BIAS=total is not None,
                DIRECT_BIAS=bias_wanted,
                PLACES=_PLACES,
                CHUNK=_CHUNK,
            )
    return direct, direct_bias, own, other


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _expected(  # type: ignore[no-untyped-def]  # annotations of pointers would be read as globals
    weight,
    bias,
    rows,
    columns,
    out,
    out_bias,
    height,
    width,
    RANK: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = row < height
    in_columns = column < width
    mask = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    inside = tl.zeros((ROWS,), dtype=tl.float32)
    for s in tl.static_range(RANK):
        a = tl.load(rows + s * height + row, mask=in_rows, other=0.0)
        b = tl.load(columns + s * width + column, mask=in_columns, other=0.0)
        mask += a[:, None] * b[None, :]
        inside += a
    at = row[:, None].to(tl.int64) * width + column[None, :]
    within = in_rows[:, None] & in_columns[None, :]
    w = tl.load(weight + at, mask=within, other=0.0).to(tl.float32)
    tl.store(out + at, (w * mask).to(out.dtype.element_ty), mask=within)
    if BIAS:
        once = in_rows & (tl.program_id(1) == 0)
        value = tl.load(bias + row, mask=once, other=0.0).to(tl.float32)
        tl.store(out_bias + row, (value * inside).to(out_bias.dtype.element_ty), mask=once)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gradients(  # type: ignore[no-untyped-def]  # annotations of pointers would be read as globals
    raw,
    weight,
    rows,
    columns,
    direct,
    by_row,
    by_column,
    height,
    width,
    RANK: tl.constexpr,
    DIRECT: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    tile_row = tl.program_id(0)
    tile_column = tl.program_id(1)
    row = tile_row * ROWS + tl.arange(0, ROWS)
    column = tile_column * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = row < height
    in_columns = column < width
    at = row[:, None].to(tl.int64) * width + column[None, :]
    within = in_rows[:, None] & in_columns[None, :]
    gradient = tl.load(raw + at, mask=within, other=0.0).to(tl.float32)
    product = gradient * tl.load(weight + at, mask=within, other=0.0).to(tl.float32)
    mask = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for s in tl.static_range(RANK):
        a = tl.load(rows + s * height + row, mask=in_rows, other=0.0)
        b = tl.load(columns + s * width + column, mask=in_columns, other=0.0)
        if DIRECT:
            mask += a[:, None] * b[None, :]
        if OWN:
            part = tl.sum(product * b[None, :], axis=1)
            tl.store(by_row + (tile_column * RANK + s) * height + row, part, mask=in_rows)
        if OTHER:
            part_c = tl.sum(product * a[:, None], axis=0)
            tl.store(by_column + (tile_row * RANK + s) * width + column, part_c, mask=in_columns)
    if DIRECT:
        tl.store(direct + at, gradient * mask, mask=within)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _finish(  # type: ignore[no-untyped-def]  # annotations of pointers would be read as globals
    by_row,
    by_column,
    rows,
    bias,
    total,
    own,
    other,
    direct_bias,
    height,
    width,
    tall,
    wide,
    RANK: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    BIAS: tl.constexpr,
    DIRECT_BIAS: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    tile = tl.arange(0, CHUNK)
    if tl.program_id(1) == 0:
        in_rows = at < height
        shift = tl.zeros((PLACES,), dtype=tl.float32)  # what the bias adds to the gradient of its row's factor
        inside = tl.zeros((PLACES,), dtype=tl.float32)
        summed = tl.zeros((PLACES,), dtype=tl.float32)
        if BIAS:
            summed = tl.load(total + at, mask=in_rows, other=0.0).to(tl.float32)
            shift = summed * tl.load(bias + at, mask=in_rows, other=0.0).to(tl.float32)
        for s in tl.static_range(RANK):
            if OWN:
                row_sum = tl.zeros((CHUNK, PLACES), dtype=tl.float32)
                for start in range(0, wide, CHUNK):
                    k = start + tile
                    within = (k < wide)[:, None] & in_rows[None, :]
                    row_sum += tl.load(by_row + (k[:, None] * RANK + s) * height + at[None, :], mask=within, other=0.0)
                tl.store(own + s * height + at, tl.sum(row_sum, axis=0) + shift, mask=in_rows)
            if DIRECT_BIAS:
                inside += tl.load(rows + s * height + at, mask=in_rows, other=0.0)
        if DIRECT_BIAS:
            tl.store(direct_bias + at, (summed * inside).to(direct_bias.dtype.element_ty), mask=in_rows)
    else:
        if OTHER:
            in_columns = at < width
            for s in tl.static_range(RANK):
                column_sum = tl.zeros((CHUNK, PLACES), dtype=tl.float32)
                for start in range(0, tall, CHUNK):
                    k = start + tile
                    within = (k < tall)[:, None] & in_columns[None, :]
                    column_sum += tl.load(
                        by_column + (k[:, None] * RANK + s) * width + at[None, :], mask=within, other=0.0
                    )
                tl.store(other + s * width + at, tl.sum(column_sum, axis=0), mask=in_columns)
