"""Expected weights of linear layers and gradients down to the probabilities, fused for GPUs with triton.

``ops.linear`` says what they mean. The factors of the mask never touch memory: a program computes those of its tile
from the probabilities. Each tile writes its part of the gradients of the probabilities into a column; the columns are
added in a fixed order, so that the same inputs give the same bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.elastic.ops.dispatch import current_device
from weft.elastic.sizes import Probabilities, Sizes

MOST_LAYERS, MOST_COMBINATIONS = 3, 32
_ROWS, _COLUMNS = 32, 64  # of a tile
_ANYWHERE = ("shared", "own", "other")  # parts of a vector: no kernel of its own for each way they may lie in memory
_KNOWN = ("IS_SHARED", "HAS_OWN", "HAS_OTHER")


def expected(
    weights: Sequence[Tensor], biases: Sequence[Tensor], probabilities: Probabilities, sizes: Sizes, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The expected weights one below the other and biases one behind the other, in this dtype, in one pass."""
    first, count = weights[0], len(weights)
    plan = _plan(sizes, first.device, probabilities, count)
    height, width = sizes.largest
    out = first.new_empty((count * height, width), dtype=dtype)
    out_bias = first.new_empty(count * height, dtype=dtype) if biases else None
    with current_device(first.device):
        _expected[plan.grid](
            *_three(weights, first),
            *_three(biases, first),
            *_given(probabilities, first),
            *plan.sizes,
            out,
            out if out_bias is None else out_bias,
            height,
            width,
            **plan.constants,
            BIAS=out_bias is not None,
        )
    return out, out_bias


def gradients(
    asked: tuple[bool, ...],
    raw: Tensor,
    total: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    probabilities: Probabilities,
    sizes: Sizes,
) -> tuple[Tensor | None, ...]:
    """As ``ops.linear`` has it; raw may be written over."""
    first, count = weights[0], len(weights)
    plan = _plan(sizes, first.device, probabilities, count)
    height, width = sizes.largest
    direct = raw if raw.dtype == first.dtype else torch.empty_like(raw, dtype=first.dtype)
    direct_bias = None if total is None else torch.empty_like(total)
    likely = any(asked[2:])
    parts = first.new_empty(plan.parts) if likely else raw
    with current_device(first.device):
        _gradients[plan.grid](
            raw,
            *_three(weights, first),
            *_three(biases, first),
            raw if total is None else total,
            *_given(probabilities, first),
            *plan.sizes,
            direct,
            raw if direct_bias is None else direct_bias,
            parts,
            height,
            width,
            **plan.constants,
            BIAS=total is not None,
            DIRECT=asked[0],
            LIKELY=likely,
            SLOTS=plan.slots,
        )
    found = parts.sum(1).split_with_sizes(plan.lengths) if likely else (None,) * 3
    by_chance = [value if want else None for value, want in zip(found, asked[2:], strict=True)]
    by_weight = direct.chunk(count) if asked[0] else (None,) * count
    by_bias = () if direct_bias is None else direct_bias.chunk(count)
    return *by_chance, *by_weight, *by_bias


class _Plan(NamedTuple):
    """What every launch for layers of these sizes needs."""

    grid: tuple[int, int, int]
    sizes: tuple[Tensor, ...]
    constants: dict[str, Any]
    lengths: list[int]
    parts: tuple[int, int]
    slots: int


def _plan(sizes: Sizes, device: torch.device, probabilities: Probabilities, count: int) -> _Plan:
    def make() -> _Plan:
        numbers = tuple(table.to(device, torch.int32) for table in sizes.tables)  # once: a copy makes a GPU wait
        rank, own, other = *numbers[0].shape, numbers[1].shape[1]
        tall, wide = (-(-size // tile) for size, tile in zip(sizes.largest, (_ROWS, _COLUMNS), strict=True))
        constants = {"RANK": rank, "OWN": own, "OTHER": other, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
        known = {name: held is not None for name, held in zip(_KNOWN, probabilities, strict=True)}
        places = rank + own + other
        slots = 1 << (places - 1).bit_length()
        lengths, parts = [rank, own, other], (places, tall * wide * count)
        return _Plan((tall, wide, count), numbers, constants | known, lengths, parts, slots)

    found: _Plan = sizes.cached(("linear kernels", device, count), make)
    return found


def _three(tensors: Sequence[Tensor], spare: Tensor) -> list[Tensor]:
    """Three pointers; the spare one stands where none is used."""
    return [tensor.contiguous() for tensor in tensors] + [spare] * (3 - len(tensors))


def _given(probabilities: Probabilities, spare: Tensor) -> list[Tensor]:
    return [spare if held is None else held.contiguous() for held in probabilities]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _one_of(first, second, third, which):  # type: ignore[no-untyped-def]
    found = first
    if which == 1:
        found = second
    if which == 2:
        found = third
    return found


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _chance(probabilities, index, KNOWN: tl.constexpr):  # type: ignore[no-untyped-def]
    """One probability; 1 where there is no choice."""
    found = 1.0
    if KNOWN:
        found = tl.load(probabilities + index)
    return found


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _inside(place, sizes, probabilities, s, COUNT: tl.constexpr, KNOWN: tl.constexpr, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """How likely each place is within the pick, given the shared combination s."""
    total = tl.zeros((LENGTH,), dtype=tl.float32)
    for n in tl.static_range(COUNT):
        total += tl.where(place < tl.load(sizes + s * COUNT + n), _chance(probabilities, n, KNOWN), 0.0)
    return total


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)  # type: ignore[untyped-decorator,unused-ignore]
def _expected(  # type: ignore[no-untyped-def]  # annotations of pointers would be read as globals
    weight0,
    weight1,
    weight2,
    bias0,
    bias1,
    bias2,
    shared,
    own,
    other,
    row_sizes,
    column_sizes,
    out,
    out_bias,
    height,
    width,
    RANK: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    IS_SHARED: tl.constexpr,
    HAS_OWN: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    which = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = row < height
    in_columns = column < width
    mask = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    inside = tl.zeros((ROWS,), dtype=tl.float32)
    for s in tl.static_range(RANK):
        a = _inside(row, row_sizes, own, s, OWN, HAS_OWN, ROWS) * _chance(shared, s, IS_SHARED)
        b = _inside(column, column_sizes, other, s, OTHER, HAS_OTHER, COLUMNS)
        mask += a[:, None] * b[None, :]
        inside += a
    weight = _one_of(weight0, weight1, weight2, which)
    at = row[:, None].to(tl.int64) * width + column[None, :]
    within = in_rows[:, None] & in_columns[None, :]
    w = tl.load(weight + at, mask=within, other=0.0)
    base = which.to(tl.int64) * height
    tl.store(out + base * width + at, (w * mask).to(out.dtype.element_ty), mask=within)
    if BIAS:
        once = row < tl.where(tl.program_id(1) == 0, height, 0)
        bias = _one_of(bias0, bias1, bias2, which)
        value = tl.load(bias + row, mask=once, other=0.0)
        tl.store(out_bias + base + row, (value * inside).to(out_bias.dtype.element_ty), mask=once)


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)  # type: ignore[untyped-decorator,unused-ignore]
def _gradients(  # type: ignore[no-untyped-def]  # annotations of pointers would be read as globals
    raw,
    weight0,
    weight1,
    weight2,
    bias0,
    bias1,
    bias2,
    total,
    shared,
    own,
    other,
    row_sizes,
    column_sizes,
    direct,
    direct_bias,
    parts,
    height,
    width,
    RANK: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    IS_SHARED: tl.constexpr,
    HAS_OWN: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    BIAS: tl.constexpr,
    DIRECT: tl.constexpr,
    LIKELY: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    which = tl.program_id(2)
    tile_row = tl.program_id(0)
    tile_column = tl.program_id(1)
    row = tile_row * ROWS + tl.arange(0, ROWS)
    column = tile_column * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = row < height
    at = row[:, None].to(tl.int64) * width + column[None, :]
    within = in_rows[:, None] & (column < width)[None, :]
    base = which.to(tl.int64) * height
    gradient = tl.load(raw + base * width + at, mask=within, other=0.0).to(tl.float32)
    weight = _one_of(weight0, weight1, weight2, which)
    product = gradient * tl.load(weight + at, mask=within, other=0.0)
    once = row < tl.where(tile_column == 0, height, 0)
    summed = tl.zeros((ROWS,), dtype=tl.float32)
    shift = tl.zeros((ROWS,), dtype=tl.float32)  # what the bias adds to the gradient of its row's factor
    if BIAS:
        summed = tl.load(total + base + row, mask=once, other=0.0)
        bias = _one_of(bias0, bias1, bias2, which)
        shift = summed * tl.load(bias + row, mask=once, other=0.0)
    mask = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    inside = tl.zeros((ROWS,), dtype=tl.float32)
    slot = tl.arange(0, SLOTS)  # one for each shared combination, each of the rows, each of the columns
    sums = tl.zeros((SLOTS,), dtype=tl.float32)
    for s in tl.static_range(RANK):
        p = _chance(shared, s, IS_SHARED)
        given = _inside(row, row_sizes, own, s, OWN, HAS_OWN, ROWS)
        b = _inside(column, column_sizes, other, s, OTHER, HAS_OTHER, COLUMNS)
        mask += (given * p)[:, None] * b[None, :]
        inside += given * p
        if LIKELY:
            by_row = tl.sum(product * b[None, :], axis=1) + shift
            of_own = (slot >= RANK) & (slot < RANK + OWN)
            end = tl.load(row_sizes + s * OWN + slot - RANK, mask=of_own, other=0)
            weighed = tl.where(row[:, None] < end[None, :], p, 0.0)
            weighed = tl.where((slot == s)[None, :], given[:, None], weighed)
            sums += tl.sum(by_row[:, None] * weighed, axis=0)
            if HAS_OTHER:
                by_column = tl.sum(product * given[:, None], axis=0)
                of_other = (slot >= RANK + OWN) & (slot < RANK + OWN + OTHER)
                last = tl.load(column_sizes + s * OTHER + slot - RANK - OWN, mask=of_other, other=0)
                sums += tl.sum(by_column[:, None] * tl.where(column[:, None] < last[None, :], p, 0.0), axis=0)
    if DIRECT:
        tl.store(direct + base * width + at, gradient * mask, mask=within)
    if BIAS:
        tl.store(direct_bias + base + row, summed * inside, mask=once)
    if LIKELY:
        programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        program = (which * tl.num_programs(0) + tile_row) * tl.num_programs(1) + tile_column
        tl.store(parts + slot * programs + program, sums, mask=slot < RANK + OWN + OTHER)
