"""Recurrent layers as cuDNN runs them: all steps in one operator, which keeps what it needs in one block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MIB = 2**20
GATES = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""Values that cuDNN keeps of each cell and step: measured, exact."""
DROPOUT = 6488064
"""Bytes of the generators' states, made with the first dropout."""


def reserve(kind: str, cells: int, layers: int, ways: int, element: int, dropout: bool) -> int:
    """Bytes kept for the backward; ``cells`` are steps x batch x width, ``ways`` 2 for both directions.

    >>> reserve("lstm", 10 * 4 * 128, 3, 1, 4, False)
    348416
    """
    between = ways * (layers - 1) * cells
    return element * (GATES[kind] * layers * ways * cells + between) + 256 + (between // 8 if dropout else 0)


def workspace(kind: str, cells: int, inputs: int, layers: int, ways: int, element: int, weights: int) -> int:
    """Bytes taken meanwhile; ``inputs`` are steps x batch x features. Fitted to what was seen, and for single shapes
    wrong by up to 70 %."""
    fixed = 8 * MIB if layers * ways == 1 else 24 * MIB
    if kind == "lstm":
        return fixed + weights + element * (cells * (5 * ways + (ways if ways > 1 else 0)) + inputs)
    return fixed + weights + round(element * (cells * ways * (1.1 + 1.2 * layers) + 4.7 * inputs))


def operator(kind: str, kept: list[Tensor]) -> Any:
    """What takes the place of ``aten::lstm.input`` and its like; ``kept`` holds what outlives the call."""

    def run(
        input: Tensor,
        hx: Any,
        params: list[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        low = torch.is_autocast_enabled("cpu")
        if low:
            input = input.to(torch.float16)  # cuDNN's autocast is of float16, whatever was asked
        if batch_first:
            input = input.transpose(0, 1).contiguous()
        if dropout and train and not kept:
            kept.append(torch.empty(DROPOUT, dtype=torch.uint8))
        hidden = hx[0].shape[-1] if kind == "lstm" else hx.shape[-1]
        about = (kind, hidden, num_layers, 1 + bidirectional, bool(dropout and train), low)
        outputs = _Cells.apply(about, input, *params)  # type: ignore[no-untyped-call]
        y = outputs[0].transpose(0, 1) if batch_first else outputs[0]
        return (y, outputs[1], outputs[2]) if kind == "lstm" else (y, outputs[1])

    return run


class _Cells(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, about: tuple[Any, ...], x: Tensor, *params: Tensor) -> Any:
        kind, hidden, layers, ways, dropout, low = about
        steps, batch, features = x.shape
        cells, count = steps * batch * hidden, sum(one.numel() for one in params)
        flat = x.new_empty(count) if low else None
        y = x.new_empty(steps, batch, ways * hidden)
        states = [x.new_empty(layers * ways, batch, hidden) for _ in range(2 if kind == "lstm" else 1)]
        held = x.new_empty(reserve(kind, cells, layers, ways, x.element_size(), dropout), dtype=torch.uint8)
        ctx.size = workspace(
            kind, cells, steps * batch * features, layers, ways, x.element_size(), count * x.element_size()
        )
        x.new_empty(ctx.size, dtype=torch.uint8)
        ctx.save_for_backward(x, y, held, *([flat] if flat is not None else []), *params)
        ctx.params = len(params)
        return (y, *states)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *rest = ctx.saved_tensors
        params = rest[len(rest) - ctx.params :]
        grad = torch.empty_like(x)
        x.new_empty(ctx.size, dtype=torch.uint8)
        flat = x.new_empty(sum(one.numel() for one in params))
        parts, start = [], 0
        for one in params:
            part = flat[start : start + one.numel()].view(one.shape)
            parts.append(part.to(one.dtype))
            start += one.numel()
        return (None, grad, *parts)
