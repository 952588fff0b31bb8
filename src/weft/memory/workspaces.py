"""Bytes that a GPU's kernels allocate beside their results, operator by operator.

Each rule follows what the kernel's launcher requests in PyTorch's sources, or, for cuDNN's convolutions, what was
recorded on the device (`benchmarks/memory.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from weft.hardware.gpus import Kernels
from weft.memory.cudnn_conv import convolution, convolution_backward
from weft.memory.timeline import TensorShape

Arguments = tuple[Any, ...]


SLOTS = 3
"""Workspaces of an operator that has a rule: copies of its operands, which it makes before its results and keeps to the
end, and two that follow the results, one after the other; those that it does not need have 0 bytes."""


def has_rule(name: str) -> bool:
    """Whether an operator, as ``aten.mm.default``, has a rule here."""
    return name.split(".")[1] in _RULES


def workspaces(name: str, args: Arguments, result: Any, kernels: Kernels) -> tuple[int, ...]:
    """The workspaces of an operator that has a rule, from the shapes of its arguments and results."""
    rule, operands = _RULES[name.split(".")[1]]
    given = [args[place] for place in operands if isinstance(args[place], TensorShape)]
    either = name.startswith("aten.convolution")  # takes channels first or last, if all lies the same way
    copies = sum(one.bytes for one in given if not one.is_contiguous() and not (either and one.has_channels_last()))
    found = rule(args, result, kernels)
    return (copies, *found, *(0,) * (SLOTS - 1 - len(found)))


def partial_sums(rows: int, columns: int, element: int, kernels: Kernels) -> int:
    """Of a sum over the rows of a matrix whose columns lie side by side (`setReduceConfig` in Reduce.cuh): blocks of
    threads that share a column leave a sum for each of their threads.

    >>> from weft.hardware.gpus import KERNELS
    >>> partial_sums(24576, 1024, 4, KERNELS["h200"]) // 2**20
    132
    """
    vector = 4 if columns % 4 == 0 else 2 if columns % 2 == 0 else 1
    outputs = columns // vector
    threads = 512 // vector
    width = min(_power(outputs), 32)
    height = min(_power(rows), threads // width)
    width = min(_power(outputs), threads // height)
    if rows < height * 16 and rows < 256:
        return 0
    values = -(-rows // height)
    grid = -(-outputs // width)
    room = kernels.processors * (kernels.threads // (width * height))
    if values < 256 or grid > room:
        return 0
    blocks = max(min(-(-room // grid), -(-values // 16)), -(-values // 256))
    return element * columns * blocks * width * vector if blocks > 1 else 0


def _sum(args: Arguments, result: Any, kernels: Kernels) -> list[int]:
    tensor = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], tuple) else list(range(tensor.dim()))
    reduced = {dim % max(1, tensor.dim()) for dim in dims} or set(range(tensor.dim()))
    sized = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    # Along the dimension that lies closest in memory no thread leaves a sum of its own.
    if not sized or min(sized, key=lambda dim: (tensor.stride(dim), -dim)) in reduced:
        return []
    rows = math.prod(tensor.shape[dim] for dim in reduced)
    if rows <= 1 or not tensor.numel():
        return []
    return [partial_sums(rows, tensor.numel() // rows, max(4, tensor.element_size()), kernels)]


def _none(args: Arguments, result: Any, kernels: Kernels) -> list[int]:
    return []


def _roll(args: Arguments, result: Any, kernels: Kernels) -> list[int]:
    return [args[0].bytes] if len(args) > 2 and len(args[2]) > 1 else []


def _embedding_backward(args: Arguments, result: Any, kernels: Kernels) -> list[int]:
    grad, indices, weights = args[0], args[1], args[2]
    count, width = indices.numel(), grad.shape[-1]
    if count <= 3072:
        return []
    segments = count // 10 + min(count, weights)
    return [segments * (-(-width // 32) * 32) * 4 + 48 * count]


def _efficient_backward(args: Arguments, result: Any, kernels: Kernels) -> list[int]:
    query = args[1]
    batch, heads, length, width = query.shape
    bias = result[3] if isinstance(result, tuple) and len(result) > 3 else None
    rows = batch * heads * length
    # The products of outputs and their gradients first, then the sums over blocks of keys.
    return [rows * width * 4, rows * (width * 4 + 8) + (bias.bytes if isinstance(bias, TensorShape) else 0)]


def _cudnn_attention_backward(args: Arguments, result: Any, kernels: Kernels) -> list[int]:
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    shared = 2 * batch * heads * key.shape[2] * width * query.element_size() if key.shape[1] != heads else 0
    return [batch * heads * length * (width * 4 + 4) + shared]


def _flash_backward(args: Arguments, result: Any, kernels: Kernels) -> list[int]:
    query = args[1]
    batch, heads, length, width = query.shape
    rows, columns = -(-length // 128) * 128, -(-width // 32) * 32
    return [batch * heads * rows * (columns * 4 + 4)]


def _safe_softmax(args: Arguments, result: Any, kernels: Kernels) -> list[int]:
    return [args[0].numel() + 2 * args[0].numel() // max(1, args[0].shape[-1])]


def _index_put(args: Arguments, result: Any, kernels: Kernels) -> list[int]:
    indices = [one for one in args[1] if isinstance(one, TensorShape)]
    return [sum(48 * one.numel() for one in indices) + args[2].bytes] if len(args) > 3 and args[3] else []


def _power(number: int) -> int:
    """The largest power of two that is not above it."""
    return 1 << (max(1, number).bit_length() - 1)


_RULES: dict[str, tuple[Callable[[Arguments, Any, Kernels], list[int]], tuple[int, ...]]] = {
    "sum": (_sum, ()),
    "mean": (_sum, ()),
    "native_layer_norm": (_none, (0,)),
    "native_layer_norm_backward": (_none, (0, 1)),
    "native_group_norm": (_none, (0,)),
    "native_group_norm_backward": (_none, (0, 1)),
    "_softmax": (_none, (0,)),
    "_log_softmax": (_none, (0,)),
    "_softmax_backward_data": (lambda args, result, kernels: [args[0].bytes], (0, 1)),  # of gradients and results
    "_log_softmax_backward_data": (_none, (0, 1)),
    "_safe_softmax": (_safe_softmax, ()),
    "roll": (_roll, ()),
    "embedding_dense_backward": (_embedding_backward, ()),
    "index_put": (_index_put, ()),
    "index_put_": (_index_put, ()),
    "_scaled_dot_product_efficient_attention_backward": (_efficient_backward, ()),
    "_scaled_dot_product_cudnn_attention_backward": (_cudnn_attention_backward, ()),
    "_scaled_dot_product_flash_attention_backward": (_flash_backward, ()),
    "convolution": (convolution, (0, 1)),
    "convolution_backward": (convolution_backward, (0, 1, 2)),
}
"""The rule of each operator, and the places of the operands that its kernel wants contiguous."""
