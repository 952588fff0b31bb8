"""Convolutions: images and channels may be split; the spatial axes stay whole, since their parts would need each
other's borders."""

from __future__ import annotations

from weft.plan.capture.call import Call, Labels, Space, names, rule, space

_TRANSPOSED = frozenset({"aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d"})


@rule(
    "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d _convolution "
    "convolution_overrideable"
)
def convolution(call: Call) -> Space | None:
    """``(n, c, h, w), (k, c, r, s) -> (n, k, h, w)``; c is summed over. With groups, the channels of image, kernel and
    result are split together, by whole groups (argument ``groups`` is then divided by the parts)."""
    image, kernel = call.operands[:2]
    groups: int = call.given.get("groups", 1)
    transposed = call.target in _TRANSPOSED or bool(call.given.get("transposed", False))
    inner = kernel.rank - 2
    batch = names("n", image.rank - inner - 1)  # none where a single image is given
    space_in, space_out, window = names("i", inner), names("o", inner), names("r", inner)
    if groups == 1:
        weights: Labels = (("c", "k") if transposed else ("k", "c")) + window
        entered, left = "c", "k"
    else:
        weights = ("g", None, *window)
        entered = left = "g"
    reads: list[Labels] = [(*batch, entered, *space_in), weights, (left,)]
    elements = image.elements if transposed else call.results[0].elements
    trained = [image.gradient, kernel.gradient]
    return space(
        call,
        "conv",
        reads[: len(call.operands)],
        [(*batch, left, *space_out)],
        whole=(*space_in, *space_out, *window),
        most={"g": groups} if groups > 1 else None,
        flops=2.0 * elements * (kernel.elements // kernel.shape[0]),
        backward=float(sum(trained)),
        keeps=[number for number, other in zip((0, 1), reversed(trained), strict=True) if other],
    )
