"""Workspaces of cuDNN's convolutions, by the algorithm that it chooses.

On tensor cores a convolution of NCHW images first copies its operands to NHWC, so its workspace is as large as what it
reads and writes, with channels padded to a multiple of eight. Winograd's algorithm keeps 36 numbers for each tile of
4 x 4 pixels, Fourier's two planes of frequencies for each channel of each image. A gradient of weights is split along
the pixels (split-k), and the parts are summed at the end. Filters of one pixel are matrix products, and images of few
channels have kernels of their own: the rules for these two were read off recorded workspaces by hand.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from weft.hardware.gpus import Kernels
from weft.memory.timeline import TensorShape

KINDS = ("none", "image", "result", "plain", "both", "winograd", "fourier")
"""Kernels without a workspace, those that copy operands (one of them, or both, or both but without padding the image's
channels), Winograd's and Fourier's."""
FEW_CHANNELS = 4
"""Channels of images that have kernels of their own."""


def convolution(args: tuple[Any, ...], result: Any, kernels: Kernels) -> list[int]:
    """Of the forward."""
    image, weight, stride, transposed, groups = args[0], args[1], args[3], args[6], args[8]
    if _without_cudnn(image, groups):
        return []
    if transposed:
        return [_workspace(_shape(result, image, weight, stride), "images")]
    copied = _padded_bytes(image) + _padded_bytes(result)
    if _pixels(weight) == 1:
        return [] if math.prod(stride) == 1 and _aligned(image) else [copied]
    if image.shape[1] <= FEW_CHANNELS:
        wide = weight.shape[2] >= 7 and weight.shape[0] >= 32 * image.element_size() / 2
        return (
            [(image.bytes if image.element_size() == 4 else _padded_bytes(image)) + _padded_bytes(result)]
            if wide
            else []
        )
    return [_workspace(_shape(image, result, weight, stride), "forward")]


def convolution_backward(args: tuple[Any, ...], result: Any, kernels: Kernels) -> list[int]:
    """Of the backward: first the gradient of the images, then that of the weights, as far as they are wanted for."""
    grad, image, weight, stride, transposed, groups, wanted = (args[place] for place in (0, 1, 2, 4, 7, 9, 10))
    if _without_cudnn(image, groups):
        return []
    shape = _shape(grad, image, weight, stride) if transposed else _shape(image, grad, weight, stride)
    if not transposed and (_pixels(weight) == 1 or image.shape[1] <= FEW_CHANNELS):
        images, weights = _few(shape, _padded_bytes(image) + _padded_bytes(grad), image, grad, weight)
    else:
        images, weights = _workspace(shape, "forward" if transposed else "images"), _workspace(shape, "weights")
    return [images if wanted[0] else 0, weights if wanted[1] else 0]


def _few(shape: ConvShape, copied: int, image: TensorShape, grad: TensorShape, weight: TensorShape) -> tuple[int, int]:
    """Of the gradients of images and of weights, where a filter has one pixel or an image few channels."""
    half, sums = shape.element == 2, 4 * weight.numel()
    if shape.taps > 1:
        return copied + weight.bytes, round(1.1 * copied) if half else image.bytes + _padded_bytes(grad)
    if shape.steps > 1:
        return copied, copied + sums
    # A product for each image, and then their sum, but for many pixels of few images of few channels in float32.
    narrow = shape.channels <= 40 and shape.filters < 256 and shape.samples < 64 and shape.samples * shape.made >= 24000
    square = shape.channels == 64 and shape.filters <= 64 and shape.seen >= 80 * 80
    each = shape.samples * sums
    weights = (
        copied
        if (narrow or square) and not half
        else each
        if half and _aligned(image)
        else min(each, round(1.15 * copied))
    )
    return 0 if _aligned(image) else copied, weights


def workspace(shape: ConvShape, which: str, kind: str, pieces: float) -> int:
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
    copied = {
        "image": image,
        "result": result,
        "both": image + result,
        "plain": n * c * shape.seen * element + result,
    }
    return copied[kind] + weights * element + sums


def _workspace(shape: ConvShape, which: str) -> int:
    # Patches side by side the trees have not seen, and in 16 bits all but gradients of weights are as good without.
    plain = shape.taps == shape.steps or (shape.element == 2 and which != "weights")
    own = "both" if plain else algorithm(shape, which)
    return workspace(shape, which, own, split_k(shape) if which == "weights" else 0.0)


def _frequencies(shape: ConvShape, which: str) -> int:
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


def _shape(image: TensorShape, result: TensorShape, weight: TensorShape, stride: Any) -> ConvShape:
    return ConvShape(
        image.shape[0], image.shape[1], _pixels(image), result.shape[1], _pixels(result), _pixels(weight),
        math.prod(stride), image.element_size(),
    )  # fmt: skip


def _without_cudnn(image: TensorShape, groups: int) -> bool:
    """Whether PyTorch's own kernels do it: depthwise ones, or a product for single pixels."""
    return groups > 1 or image.dim() < 4 or _pixels(image) == 1


def _padded_bytes(tensor: TensorShape) -> int:
    """Bytes of a copy with the channels filled up."""
    return tensor.shape[0] * (-(-tensor.shape[1] // 8) * 8) * _pixels(tensor) * tensor.element_size()


def _pixels(tensor: TensorShape) -> int:
    return math.prod(tensor.shape[2:])


def _aligned(image: TensorShape) -> bool:
    return _pixels(image) * image.element_size() % 16 == 0


# Which algorithm cuDNN chooses, as decision trees that were fitted to what it chose on a device.
#
# The kernels and workspaces of thousands of random convolutions were recorded (`benchmarks/convolutions.py`, which
# also writes the file that is read here). A tree asks for one property of a convolution after the other, as
# `ConvShape.properties` names them, and ends with an algorithm, or with the split-k of a gradient of weights.

PASSES = ("forward", "images", "weights")
"""The three convolutions of a training step: the forward, the gradient of the images, that of the weights."""


@dataclass(frozen=True, slots=True)
class ConvShape:
    """A convolution. ``seen`` and ``made`` are the pixels of an image and of a result, ``taps`` those of a filter, and
    ``steps`` those of a stride; the trees know them by these names."""

    samples: int
    channels: int
    seen: int
    filters: int
    made: int
    taps: int
    steps: int
    element: int
    """Bytes of a number."""

    def properties(self) -> dict[str, int]:
        """What a tree may ask for."""
        n, c, o = self.samples, self.channels, self.filters
        return {
            "samples": n, "channels": c, "filters": o, "seen": self.seen, "made": self.made, "taps": self.taps,
            "steps": self.steps, "rows": n * self.made, "columns": c * self.taps, "weights": o * c * self.taps,
            "image": n * c * self.seen, "result": n * o * self.made, "work": n * self.made * o * c * self.taps,
            "channels % 8": c % 8, "channels % 32": c % 32, "filters % 8": o % 8, "filters % 32": o % 32,
            "narrow": min(c, o), "wide": max(c, o), "tiles": -(-o // 128) * -(-c * self.taps // 128),
        }  # fmt: skip


def algorithm(shape: ConvShape, which: str) -> str:
    """The algorithm of one of the `PASSES`, one of `KINDS`.

    >>> algorithm(ConvShape(64, 32, 1024, 32, 1024, 9, 1, 4), "weights")
    'fourier'
    """
    return str(_leaf(_trees()["kinds"][which][str(shape.element)], shape))


def split_k(shape: ConvShape) -> float:
    """How many partial sums, of the size of the weights in float32, a gradient of weights takes."""
    return float(_leaf(_trees()["pieces"][str(shape.element)], shape))


def _leaf(tree: Any, shape: ConvShape) -> Any:
    known = shape.properties()
    while isinstance(tree, list):
        name, limit, below, above = tree
        tree = below if known[name] <= limit else above
    return tree


@cache
def _trees() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files(__package__).joinpath("cudnn_conv_trees.json").read_text())
    return found
