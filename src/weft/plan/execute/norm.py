"""Batch normalisation over a batch that is cut: the statistics are those of all parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.plan.execute.flow import summed
from weft.plan.execute.site import Local, Site, Unfit
from weft.plan.execute.wire import Wire

SYNCHRONISED = ("_native_batch_norm_legit_functional", "_native_batch_norm_legit", "native_batch_norm")
_FIXED = ("_native_batch_norm_legit_no_training", "batch_norm")


def _batch_norm(site: Site) -> Local:
    image = site.argument("input").tensor
    axes = tuple(
        axis
        for axis, (place, size) in enumerate(zip(site.split, site.mesh.sizes, strict=True))
        if place >= 0 and size > 1 and place != image.dims[1]
    )
    training = not site.has("training") or site.argument("training")
    if not axes or not training:
        return site.local(whole=frozenset(range(1, len(site.operator.outputs))))
    parts = site.mesh.sizes
    at = {name: site.index(name) for name in ("input", "weight", "bias", "momentum", "eps")}
    running = [site.index(name) for name in ("running_mean", "running_var") if site.has(name)]

    def run(wire: Wire, args: list[Any], kwargs: dict[str, Any]) -> tuple[Tensor | None, ...]:
        x = args[at["input"]]
        count = x.numel() // x.shape[1]
        for axis in axes:
            count *= parts[axis]
        return _normalised(
            wire,
            axes,
            count,
            x,
            (args[at["weight"]], args[at["bias"]]),
            [args[place] for place in running],
            args[at["momentum"]],
            args[at["eps"]],
        )

    return site.local(run, whole=frozenset(range(1, len(site.operator.outputs))))


def _normalised(
    wire: Wire,
    axes: tuple[int, ...],
    count: int,
    x: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    running: list[Tensor],
    momentum: float,
    eps: float,
) -> tuple[Tensor | None, ...]:
    """Output, mean, 1 / deviation and new running statistics. Two passes, since a difference of large sums is noise."""
    others = [axis for axis in range(x.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
    wide = x if x.dtype == torch.float64 else x.float()
    mean = summed(wide.sum(others), wire, axes) / count
    centred = wide - mean.view(shape)
    variance = summed(centred.square().sum(others), wire, axes) / count
    scale = (variance + eps).rsqrt()
    out = centred * scale.view(shape)
    weight, bias = affine
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    unbiased = variance.detach() * (count / max(count - 1, 1))
    new = [
        old.lerp(fresh.to(old.dtype), momentum) for old, fresh in zip(running, (mean.detach(), unbiased), strict=False)
    ]
    return (out.to(x.dtype), mean, scale, *new)


def _fixed(site: Site) -> Local:
    if site.name == "batch_norm" and site.argument("training") and site.argument("running_mean") is not None:
        raise Unfit("it changes its running statistics in place, and parts of them are copies")
    return _batch_norm(site)


def _instance_norm(site: Site) -> Local:
    images = site.argument("input").tensor.dims[0]
    if site.parts(images) > 1 and site.argument("running_mean") is not None and site.argument("use_input_stats"):
        raise Unfit("it changes its running statistics in place, and parts of them are copies")
    return site.local()


RULES: dict[str, Callable[[Site], Local]] = {
    **dict.fromkeys(SYNCHRONISED, _batch_norm),
    **dict.fromkeys(_FIXED, _fixed),
    "instance_norm": _instance_norm,
}
