"""Convolutions, pooling and resizing: images and channels may be split. The spatial axes stay whole, since their parts
would need each other's borders."""

from __future__ import annotations

from weft.plan.capture.op_call import AxisNames, IterationSpace, OpCall, iteration_space, names, rule
from weft.plan.capture.rules.matmul import factor_gradients

_TRANSPOSED = frozenset({"aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d"})


@rule(
    "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d _convolution "
    "convolution_overrideable"
)
def convolution(call: OpCall) -> IterationSpace | None:
    """``(n, c, h, w), (k, c, r, s) -> (n, k, h, w)``; c is summed over. With groups, the channels of image, kernel and
    result are split together, by whole groups (argument ``groups`` is then divided by the parts)."""
    image, kernel = call.operands[:2]
    groups: int = call.given.get("groups", 1)
    transposed = call.target in _TRANSPOSED or bool(call.given.get("transposed", False))
    inner = kernel.rank - 2
    batch = names("n", image.rank - inner - 1)  # none where a single image is given
    space_in, space_out, window = names("i", inner), names("o", inner), names("r", inner)
    if groups == 1:
        weights: AxisNames = (("c", "k") if transposed else ("k", "c")) + window
        entered, left = "c", "k"
    else:
        weights = ("g", None, *window)
        entered = left = "g"
    reads: list[AxisNames] = [(*batch, entered, *space_in), weights, (left,)]
    elements = image.elements if transposed else call.results[0].elements
    backward, keeps = factor_gradients(call)
    return iteration_space(
        call,
        "conv",
        reads[: len(call.operands)],
        [(*batch, left, *space_out)],
        unsplittable=(*space_in, *space_out, *window),
        max_parts={"g": groups} if groups > 1 else None,
        flops=2.0 * elements * (kernel.elements // kernel.shape[0]),
        backward=backward,
        saved_operands=keeps,
    )


def spatial(
    call: OpCall, inner: int, *, saved: tuple[int, ...] = (0,), extra: float = 0.0, cost: float = 1.0
) -> IterationSpace:
    """The last ``inner`` axes are whole, all before them free."""
    leading = names("n", call.operands[0].rank - inner)
    results: list[AxisNames] = [(*leading, *names("o", value.rank - len(leading))) for value in call.results]
    return iteration_space(
        call,
        "pool",
        [(*leading, *names("i", inner))],
        results,
        unsplittable=(*names("i", inner), *names("o", inner)),
        flops=cost * max(call.operands[0].elements, call.results[0].elements),
        saved_operands=saved,
        extra=extra,
    )


@rule(
    *(
        f"{name}{inner}d{ending}"
        for inner in (1, 2, 3)
        for name in ("avg_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "max_pool", "adaptive_max_pool")
        for ending in ("", "_with_indices")
    )
)
def pool(call: OpCall) -> IterationSpace | None:
    inner = int(next(letter for letter in call.target if letter.isdigit()))
    largest = "max" in call.target
    indices = 8.0 * call.results[0].elements if largest and len(call.results) == 1 else 0.0
    return spatial(call, inner, extra=indices)


@rule(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)
def resize(call: OpCall) -> IterationSpace | None:
    return spatial(call, call.operands[0].rank - 2, saved=(), cost=8.0)


@rule("im2col", "col2im")
def patches(call: OpCall) -> IterationSpace | None:
    """Images are free."""
    leading = names("n", call.operands[0].rank - (3 if call.target == "aten.im2col" else 2))
    read, result = ((*leading, *(None,) * (each.rank - len(leading))) for each in (call.operands[0], call.results[0]))
    return iteration_space(call, "copy", [read], [result])


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def sample(call: OpCall) -> IterationSpace | None:
    """Images and channels are free; where to look is given for each image."""
    inner = names("i", call.operands[0].rank - 2)
    unnamed: AxisNames = (None,) * len(inner)
    return iteration_space(
        call, "pool", [("n", "c", *inner), ("n", *unnamed, None)], [("n", "c", *unnamed)], unsplittable=inner,
        flops=8.0 * call.results[0].elements, saved_operands=[0, 1],
    )  # fmt: skip
