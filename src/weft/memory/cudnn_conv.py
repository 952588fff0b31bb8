"""Workspaces of cuDNN's convolutions, by the kind of kernel that it takes (`choices`).

On tensor cores a convolution of images that lie channel by channel (NCHW) first turns its operands round, so that its
workspace is as large as what it reads and writes, with channels filled up to a multiple of eight. Winograd's algorithm
keeps 36 numbers for each tile of 4 x 4 pixels, Fourier's two planes of frequencies for each channel of each image. A
gradient of weights is cut into pieces along the pixels, which are summed at the end. Filters of one pixel are products,
and images of few channels have kernels of their own: these two have rules, read from recorded ones by eye.
"""

from __future__ import annotations

import math
from typing import Any

from weft.plan.memory.choices import Shape, kind, pieces
from weft.plan.memory.kernels import Kernels
from weft.plan.memory.sketch import Sketch

KINDS = ("none", "image", "result", "plain", "both", "winograd", "fourier")
"""Kernels that take nothing, that turn operands round (one of them, or both, or both but without filling up the image's
channels), and those of the two algorithms."""
FEW = 4
"""Channels of images that have kernels of their own."""


def convolution(args: tuple[Any, ...], result: Any, kernels: Kernels) -> list[int]:
    """Of the forward."""
    image, weight, stride, transposed, groups = args[0], args[1], args[3], args[6], args[8]
    if _own(image, groups):
        return []
    if transposed:
        return [_workspace(_shape(result, image, weight, stride), "images")]
    turned = _turned(image) + _turned(result)
    if _points(weight) == 1:
        return [] if math.prod(stride) == 1 and _aligned(image) else [turned]
    if image.shape[1] <= FEW:
        wide = weight.shape[2] >= 7 and weight.shape[0] >= 32 * image.element_size() / 2
        return [(image.bytes if image.element_size() == 4 else _turned(image)) + _turned(result)] if wide else []
    return [_workspace(_shape(image, result, weight, stride), "forward")]


def convolution_backward(args: tuple[Any, ...], result: Any, kernels: Kernels) -> list[int]:
    """Of the backward: first the gradient of the images, then that of the weights, as far as they are asked for."""
    grad, image, weight, stride, transposed, groups, asked = (args[place] for place in (0, 1, 2, 4, 7, 9, 10))
    if _own(image, groups):
        return []
    shape = _shape(grad, image, weight, stride) if transposed else _shape(image, grad, weight, stride)
    if not transposed and (_points(weight) == 1 or image.shape[1] <= FEW):
        images, weights = _few(shape, _turned(image) + _turned(grad), image, grad, weight)
    else:
        images, weights = _workspace(shape, "forward" if transposed else "images"), _workspace(shape, "weights")
    return [images if asked[0] else 0, weights if asked[1] else 0]


def _few(shape: Shape, turned: int, image: Sketch, grad: Sketch, weight: Sketch) -> tuple[int, int]:
    """Of the gradients of images and of weights, where a filter has one pixel or an image few channels."""
    half, sums = shape.element == 2, 4 * weight.numel()
    if shape.taps > 1:
        return turned + weight.bytes, round(1.1 * turned) if half else image.bytes + _turned(grad)
    if shape.steps > 1:
        return turned, turned + sums
    # A product for each image, and then their sum, but for many pixels of few images of few channels in float32.
    narrow = shape.channels <= 40 and shape.filters < 256 and shape.samples < 64 and shape.samples * shape.made >= 24000
    square = shape.channels == 64 and shape.filters <= 64 and shape.seen >= 80 * 80
    each = shape.samples * sums
    weights = (
        turned
        if (narrow or square) and not half
        else each
        if half and _aligned(image)
        else min(each, round(1.15 * turned))
    )
    return 0 if _aligned(image) else turned, weights


def workspace(shape: Shape, which: str, kind: str, pieces: float) -> int:
    """Bytes of a pass with such a kernel; ``pieces`` are the partial sums of a gradient of weights."""
    n, c, o, element = shape.samples, shape.channels, shape.filters, shape.element
    weights = o * c * shape.taps
    if kind == "winograd":
        side, points = (4, 36) if shape.taps <= 9 else (9, 169)
        tiles = n * (-(-math.isqrt(shape.made) // side)) ** 2
        return 4 * points * (tiles * (c + o) + c * o)
    if kind == "fourier":
        return 4 * _frequencies(shape, which)
    sums = round(4 * weights * pieces) if which == "weights" else 0
    if kind == "none":
        return sums
    image, result = (n * -(-channels // 8) * 8 * element for channels in (c, o))
    image, result = image * shape.seen, result * shape.made
    turned = {"image": image, "result": result, "both": image + result, "plain": n * c * shape.seen * element + result}
    return turned[kind] + weights * element + sums


def _workspace(shape: Shape, which: str) -> int:
    # Patches side by side the trees have not seen, and in 16 bits all but gradients of weights are as good without.
    plain = shape.taps == shape.steps or (shape.element == 2 and which != "weights")
    own = "both" if plain else kind(shape, which)
    return workspace(shape, which, own, pieces(shape) if which == "weights" else 0.0)


def _frequencies(shape: Shape, which: str) -> int:
    """Numbers of Fourier's algorithm: images are filled up to a side of 16, 32 or 64, or cut into tiles of 32."""
    n, c, o = shape.samples, shape.channels, shape.filters
    need = math.isqrt(shape.seen) + math.isqrt(shape.taps) - 1
    if which == "images":
        plane = _plane(32)
        return plane * ((1 if need <= 32 else 2) * n * (c + o) + c * o)
    plane = _plane(next((side for side in (16, 32) if need <= side), 64))
    if which == "weights":
        return 2 * plane * n * c + (2 * plane + shape.made) * n * o
    return 2 * plane * n * c + (2 * plane + shape.taps) * c * o


def _plane(side: int) -> int:
    """Real numbers of the frequencies of a real image."""
    return side * (side // 2 + 1) * 2


def _shape(image: Sketch, result: Sketch, weight: Sketch, stride: Any) -> Shape:
    return Shape(
        image.shape[0], image.shape[1], _points(image), result.shape[1], _points(result), _points(weight),
        math.prod(stride), image.element_size(),
    )  # fmt: skip


def _own(image: Sketch, groups: int) -> bool:
    """Whether PyTorch's own kernels do it: depthwise ones, or a product for single pixels."""
    return groups > 1 or image.dim() < 4 or _points(image) == 1


def _turned(tensor: Sketch) -> int:
    """Bytes of a copy with the channels filled up."""
    return tensor.shape[0] * (-(-tensor.shape[1] // 8) * 8) * _points(tensor) * tensor.element_size()


def _points(tensor: Sketch) -> int:
    return math.prod(tensor.shape[2:])


def _aligned(image: Sketch) -> bool:
    return _points(image) * image.element_size() % 16 == 0
