"""Batch normalisation over a batch that is split: the statistics are those of all parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.plan.runtime.program import CannotShard, LocalKernel, ShardedCall
from weft.plan.runtime.redistribute import MeshCollectives, all_reduce

SYNCHRONISED = ("_native_batch_norm_legit_functional", "_native_batch_norm_legit", "native_batch_norm")
_FIXED = ("_native_batch_norm_legit_no_training", "batch_norm")


def _batch_norm(call: ShardedCall) -> LocalKernel:
    image = call.argument("input").tensor
    axes = tuple(
        axis
        for axis, (dim, size) in enumerate(zip(call.split, call.mesh.sizes, strict=True))
        if dim >= 0 and size > 1 and dim != image.dims[1]
    )
    training = call.argument("training") if call.has("training") else not call.name.endswith("_no_training")
    if not axes or not training:
        return call.kernel(whole=frozenset(range(1, len(call.operator.outputs))))
    at = {name: call.index(name) for name in ("input", "weight", "bias", "momentum", "eps")}
    running = [call.index(name) for name in ("running_mean", "running_var") if call.has(name)]

    def run(collectives: MeshCollectives, args: list[Any], kwargs: dict[str, Any]) -> tuple[Tensor | None, ...]:
        """Output, mean, 1 / deviation and new running statistics. Two passes, since a difference of large sums is
        noise."""
        x, weight, bias = (args[at[name]] for name in ("input", "weight", "bias"))
        count = x.numel() // x.shape[1] * math.prod(collectives.sizes[axis] for axis in axes)
        others = [axis for axis in range(x.dim()) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
        wide = x if x.dtype == torch.float64 else x.float()
        mean = all_reduce(wide.sum(others), collectives, axes) / count
        centred = wide - mean.view(shape)
        variance = all_reduce(centred.square().sum(others), collectives, axes) / count
        scale = (variance + args[at["eps"]]).rsqrt()
        out = centred * scale.view(shape)
        if weight is not None:
            out = out * weight.view(shape)
        if bias is not None:
            out = out + bias.view(shape)
        unbiased = variance.detach() * (count / max(count - 1, 1))
        new = [
            args[index].lerp(fresh.to(args[index].dtype), args[at["momentum"]])
            for index, fresh in zip(running, (mean.detach(), unbiased), strict=False)
        ]
        return (out.to(x.dtype), mean, scale, *new)

    return call.kernel(run, whole=frozenset(range(1, len(call.operator.outputs))))


def _fixed(call: ShardedCall) -> LocalKernel:
    if call.name == "batch_norm" and call.argument("training") and call.argument("running_mean") is not None:
        raise CannotShard("it changes its running statistics in place, and parts of them are copies")
    return _batch_norm(call)


def _instance_norm(call: ShardedCall) -> LocalKernel:
    images = call.argument("input").tensor.dims[0]
    if call.parts(images) > 1 and call.argument("running_mean") is not None and call.argument("use_input_stats"):
        raise CannotShard("it changes its running statistics in place, and parts of them are copies")
    return call.kernel()


BATCH_NORM_RULES: dict[str, Callable[[ShardedCall], LocalKernel]] = {
    **dict.fromkeys(SYNCHRONISED, _batch_norm),
    **dict.fromkeys(_FIXED, _fixed),
    "instance_norm": _instance_norm,
}
