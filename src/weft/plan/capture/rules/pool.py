"""Pooling and resizing: images and channels are free, the spatial axes whole."""

from __future__ import annotations

from weft.plan.capture.call import Call, Labels, Space, names, rule, space


def spatial(call: Call, inner: int, *, keeps: tuple[int, ...] = (0,), extra: float = 0.0, cost: float = 1.0) -> Space:
    """The last ``inner`` axes are whole, all before them free."""
    leading = names("n", call.operands[0].rank - inner)
    results: list[Labels] = [(*leading, *names("o", value.rank - len(leading))) for value in call.results]
    return space(
        call,
        "pool",
        [(*leading, *names("i", inner))],
        results,
        whole=(*names("i", inner), *names("o", inner)),
        flops=cost * max(call.operands[0].elements, call.results[0].elements),
        keeps=keeps,
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
def pool(call: Call) -> Space | None:
    inner = int(next(letter for letter in call.target if letter.isdigit()))
    largest = "max" in call.target
    indices = 8.0 * call.results[0].elements if largest and len(call.results) == 1 else 0.0
    return spatial(call, inner, extra=indices, cost=1.0)


@rule(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)
def resize(call: Call) -> Space | None:
    return spatial(call, call.operands[0].rank - 2, keeps=(), cost=8.0)


@rule("im2col", "col2im")
def patches(call: Call) -> Space | None:
    """Images are free."""
    value, result = call.operands[0], call.results[0]
    inner = 3 if call.target == "aten.im2col" else 2
    leading = names("n", value.rank - inner)
    return space(
        call,
        "copy",
        [(*leading, *(None,) * inner)],
        [(*leading, *(None,) * (result.rank - len(leading)))],
    )


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def sample(call: Call) -> Space | None:
    """Images and channels are free; where to look is given for each image."""
    value, grid = call.operands
    inner = names("i", value.rank - 2)
    return space(
        call,
        "pool",
        [("n", "c", *inner), ("n", *(None,) * (grid.rank - 1))],
        [("n", "c", *(None,) * (call.results[0].rank - 2))],
        whole=inner,
        flops=8.0 * call.results[0].elements,
        keeps=[0, 1],
    )
