"""Recurrent layers as cuDNN and oneDNN run them: all steps in one operator, which keeps what it needs in one block."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

MIB = 2**20
GATES = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""Values that cuDNN keeps for each cell and step: measured, exact."""
DROPOUT = 6488064
"""Bytes of the generators' states, allocated by the first dropout."""


def cudnn_reserve(kind: str, cells: int, layers: int, ways: int, element: int, dropout: bool) -> int:
    """Bytes kept for the backward; ``cells`` are steps x batch x width, ``ways`` 2 for both directions.

    >>> cudnn_reserve("lstm", 10 * 4 * 128, 3, 1, 4, False)
    348416
    """
    between = ways * (layers - 1) * cells
    return element * (GATES[kind] * layers * ways * cells + between) + 256 + (between // 8 if dropout else 0)


CUDNN_WORKSPACE = {
    ("lstm", 1, False): (3, 1, 2, 11), ("lstm", 1, True): (5, 2, 0, 5),
    ("lstm", 2, False): (0, 3, 6, 24), ("lstm", 2, True): (0, 1, 7, 24),
    ("gru", 1, False): (3, 2, 1, 5), ("gru", 1, True): (3, 1, 2, 5),
    ("gru", 2, False): (0, 1, 6, 14), ("gru", 2, True): (0, 2, 6, 14),
    ("rnn", 1, False): (3, 2, 1, 5), ("rnn", 1, True): (2, 2, 1, 11),
    ("rnn", 2, False): (0, 2, 5, 14), ("rnn", 2, True): (0, 2, 6, 14),
}  # fmt: skip
"""Numbers of a workspace by kind, directions and whether there are several layers: for each step of each sample so many
times the width, the features and the wider of what layers read and write, and for each sample and layer so many times
the width. From 402 layers seen on an H200: for one layer or both directions exact, for several in one direction within
1 % at the median, and widths of 128 in float32 take up to twice as much."""


def cudnn_workspace(
    kind: str, samples: int, steps: int, width: int, features: int, layers: int, ways: int, element: int, weights: int
) -> int:
    """Bytes taken meanwhile, of which ``weights`` are those of the layers."""
    factors = CUDNN_WORKSPACE[kind.split("_")[0], ways, layers > 1]
    each = factors[0] * width + factors[1] * features + factors[2] * max(features, ways * width)
    numbers = samples * (steps * each + factors[3] * layers * width)
    return 8 * MIB * layers * ways + weights + element * numbers


def operator(kind: str, kept: list[Tensor]) -> Any:
    """The kernel that replaces ``aten::lstm.input`` and its like; ``kept`` holds what outlives the call."""

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
        states = hx if kind == "lstm" else (hx,)
        low = torch.is_autocast_enabled("cpu")
        if low:  # cuDNN's autocast is of float16, whatever was asked
            params = _flatten(params)
            states = [state.to(torch.float16) for state in states]
            input = input.to(torch.float16)
        if dropout and train and not kept:
            kept.append(torch.empty(DROPOUT, dtype=torch.uint8))
        about = (kind, states[0].shape[-1], num_layers, 1 + bidirectional, bool(dropout and train), batch_first)
        outputs = _CudnnRnn.apply(about, input, *params)  # type: ignore[no-untyped-call]
        y = outputs[0].transpose(0, 1) if batch_first else outputs[0]
        return (y, outputs[1], outputs[2]) if kind == "lstm" else (y, outputs[1])

    return run


def _flatten(params: list[Tensor]) -> list[Tensor]:
    """The weights in 16 bits, in one block."""
    flat = torch.empty(sum(one.numel() for one in params), dtype=torch.float16)
    return [_Cast.apply(one, part) for one, part in zip(params, _parts(flat, params), strict=True)]  # type: ignore[no-untyped-call]


def _parts(flat: Tensor, params: list[Tensor]) -> list[Tensor]:
    """The block as views with the shapes of the weights, one after the other."""
    ends = accumulate(one.numel() for one in params)
    return [flat[end - one.numel() : end].view(one.shape) for end, one in zip(ends, params, strict=True)]


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, place: Tensor) -> Tensor:
        ctx.kind = weight.dtype
        return place.view_as(place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.kind), None


class _CudnnRnn(torch.autograd.Function):
    """With the batch first, cuDNN's operands are copies with the steps first, made for each of its three calls."""

    @staticmethod
    def forward(ctx: Any, about: tuple[Any, ...], x: Tensor, *params: Tensor) -> Any:
        kind, hidden, layers, ways, dropout, turned = about
        batch, steps = x.shape[:2] if turned else (x.shape[1], x.shape[0])
        count = sum(one.numel() for one in params)
        size = x.element_size()
        copied = torch.empty_like(x) if turned else None
        y = x.new_empty(steps, batch, ways * hidden)
        states = [x.new_empty(layers * ways, batch, hidden) for _ in range(2 if kind == "lstm" else 1)]
        ctx.size = cudnn_workspace(kind, batch, steps, hidden, x.shape[2], layers, ways, size, count * size)
        taken = x.new_empty(ctx.size, dtype=torch.uint8)
        held = x.new_empty(cudnn_reserve(kind, steps * batch * hidden, layers, ways, size, dropout), dtype=torch.uint8)
        del taken, copied
        ctx.save_for_backward(x, y, held, *params)
        ctx.params, ctx.turned = len(params), turned
        ctx.states = [state.shape for state in states]
        return (y, *states)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *rest = ctx.saved_tensors
        params = rest[len(rest) - ctx.params :]
        zeros = [x.new_empty(shape) for shape in ctx.states]  # gradients of the last states, if nobody read them
        copied = [torch.empty_like(x), torch.empty_like(grads[0])] if ctx.turned else []
        grad = torch.empty_like(x)
        states = [torch.empty_like(one) for one in zeros]
        x.new_empty(ctx.size, dtype=torch.uint8)
        copied.clear()
        copied = [torch.empty_like(x)] if ctx.turned else []
        flat = x.new_empty(sum(one.numel() for one in params))
        x.new_empty(ctx.size, dtype=torch.uint8)
        del copied, states, zeros
        return (None, grad, *_parts(flat, params))


# oneDNN's LSTM, which a CPU takes: its fake kernel leaves out what it keeps for the backward.

_SAMPLES = 64
"""Samples with which oneDNN's blocks of a recurrent layer end with a page, however wide they are."""


def onednn_kept(args: tuple[Any, ...]) -> Tensor:
    """The block that ``mkldnn_rnn_layer`` keeps for its backward in one direction, or a few pages more, when it is
    called with these arguments."""
    steps, samples, features = args[0].shape
    first, second = (_onednn_workspace(count, features, args[5].shape[-1], args[0].dtype) for count in (1, 2))
    size = -(-(first + (steps - 1) * (second - first)) * samples // _SAMPLES) + 5 * 4096
    return torch.empty(size, dtype=torch.uint8)


@lru_cache(maxsize=1024)
def _onednn_workspace(steps: int, features: int, width: int, dtype: torch.dtype) -> int:
    """As the library itself says, of a real layer with few samples."""
    with _disable_current_modes(), torch.enable_grad():
        x = torch.zeros(steps, _SAMPLES, features, dtype=dtype)
        weights = [torch.zeros(4 * width, size, dtype=dtype) for size in (features, width)]
        biases = [torch.zeros(4 * width, dtype=dtype)] * 2
        state = torch.zeros(_SAMPLES, width, dtype=dtype)
        lstm, training = 2, True
        flags: tuple[Any, ...] = (False, [], lstm, width, 1, True, False, False, training)
        return int(torch.ops.aten.mkldnn_rnn_layer(x, *weights, *biases, state, state, *flags)[3].nbytes)
