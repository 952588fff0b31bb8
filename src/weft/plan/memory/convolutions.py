"""Workspaces of cuDNN's convolutions, as seen on the device: cuDNN chooses its algorithms by rules of its own.

On tensor cores a convolution of images that lie channel by channel (NCHW) first turns its operands round, so that its
workspace is as large as what it reads and writes, with channels filled up to a multiple of eight. The factors are
medians over 24,000 random convolutions; single ones differ, most of all in gradients of weights in float32.
"""

from __future__ import annotations

import math
from typing import Any

from weft.plan.memory.kernels import Kernels
from weft.plan.memory.sketch import Sketch


def convolution(args: tuple[Any, ...], result: Any, kernels: Kernels) -> list[int]:
    """Of the forward."""
    image, weight, stride, transposed, groups = args[0], args[1], args[3], args[6], args[8]
    if _own(image, groups):
        return []
    turned = _turned(image) + _turned(result)
    if transposed:
        return [turned + weight.bytes]
    if _points(weight) == 1:
        return [] if _steps(stride) == 1 and _aligned(image) else [turned]
    if image.shape[1] <= 4:
        wide = weight.shape[2] >= 7 and weight.shape[0] >= 32 * image.element_size() / 2
        return [(image.bytes if image.element_size() == 4 else _turned(image)) + _turned(result)] if wide else []
    return [turned + weight.bytes]


def convolution_backward(args: tuple[Any, ...], result: Any, kernels: Kernels) -> list[int]:
    """Of the backward: first the gradient of the images, then that of the weights, as far as they are asked for."""
    grad, image, weight, stride, transposed, groups, asked = (args[place] for place in (0, 1, 2, 4, 7, 9, 10))
    if _own(image, groups):
        return []
    turned, half = _turned(image) + _turned(grad), image.element_size() == 2
    sums = 4 * weight.numel()  # partial sums of a gradient of weights are of float32
    images = turned + weight.bytes
    pieces = kernels.processors // _tiles(weight) if half else -(-kernels.processors * 11 // (10 * _tiles(weight)))
    weights = turned + weight.bytes + pieces * sums
    if not half and _points(image) <= 256:
        weights = max(weights, 2 * turned)  # Winograd's algorithm, more often than not
    if not transposed and _points(weight) == 1:
        if _steps(stride) > 1:
            images, weights = turned, turned + sums
        else:
            images = 0 if _aligned(image) else turned
            # A product for each image, and then their sum.
            narrow = image.shape[1] <= 32 and _points(image) >= 56 * 56 and not half
            each = image.shape[0] * sums
            weights = turned if narrow else each if half and _aligned(image) else min(each, round(1.15 * turned))
    elif not transposed and image.shape[1] <= 4:
        weights = round(1.1 * turned) if half else image.bytes + _turned(grad)
    return [images if asked[0] else 0, weights if asked[1] else 0]


def _own(image: Sketch, groups: int) -> bool:
    """Whether PyTorch's own kernels do it: depthwise ones, or a product for single pixels."""
    return groups > 1 or image.dim() < 4 or _points(image) == 1


def _turned(tensor: Sketch) -> int:
    """Bytes of a copy with the channels filled up."""
    return tensor.shape[0] * (-(-tensor.shape[1] // 8) * 8) * _points(tensor) * tensor.element_size()


def _points(tensor: Sketch) -> int:
    return math.prod(tensor.shape[2:])


def _tiles(weight: Sketch) -> int:
    """Blocks of threads that a product with the weight's gradient as its result is cut into."""
    return -(-weight.shape[0] // 128) * -(-weight.shape[1] * _points(weight) // 128)


def _steps(stride: Any) -> int:
    return math.prod(stride)


def _aligned(image: Sketch) -> bool:
    return _points(image) * image.element_size() % 16 == 0
