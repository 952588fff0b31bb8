"""The kernel of each operator on one device's part, where need be with changed arguments.

Products with a bias: each summand adds its share of the bias. Views name the shape of the part. Means give their share
of the mean over all, so that the shares add up to it. Batch normalisation takes the statistics of all parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.plan.runtime.program import CannotShard, LocalKernel, Operand, ShardedCall, leaves
from weft.plan.runtime.random_ops import DRAW_RULES, RANDOM_RULES, is_random
from weft.plan.runtime.redistribute import MeshCollectives, all_reduce

Rule = Callable[[ShardedCall], LocalKernel]


def _biased(bias: str) -> Rule:
    def rule(call: ShardedCall) -> LocalKernel:
        return _with_share(call, bias, call.kernel())

    return rule


def _convolution(call: ShardedCall) -> LocalKernel:
    groups = call.argument("groups")
    image, kernel = call.argument("input"), call.argument("weight")
    channels = image.tensor.dims[len(image.tensor.dims) - (len(kernel.tensor.dims) - 1)]
    if groups > 1 and channels is not None and channels == kernel.tensor.dims[0]:
        groups //= call.parts(channels)
    return _with_share(call, "bias", call.kernel(groups=groups))


def _with_share(call: ShardedCall, bias: str, made: LocalKernel) -> LocalKernel:
    """Every summand would add the whole bias: each adds a part of it instead, so that the sum has it once."""
    if call.partial_count() == 1 or not isinstance(call.argument(bias), Operand):
        return made
    index, share = call.index(bias), 1 / call.partial_count()

    def shared(collectives: MeshCollectives, args: list[Any], kwargs: dict[str, Any]) -> Any:
        args[index] = args[index] * share
        return call.target(*args, **kwargs)

    return LocalKernel(shared, made.args, made.kwargs)


_CONVOLUTIONS = (
    *("convolution", "_convolution", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)

PRODUCT_RULES: dict[str, Rule] = {
    "linear": _biased("bias"),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _biased("self")),
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot", "einsum"), ShardedCall.kernel),
    **dict.fromkeys(("_grouped_mm", "transformers::grouped_mm_fallback"), ShardedCall.kernel),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
}


def _sized(name: str) -> Rule:
    def rule(call: ShardedCall) -> LocalKernel:
        sizes: Any = {name: list(call.shape())}
        return call.kernel(**sizes)

    return rule


def _reshaped(call: ShardedCall) -> LocalKernel:
    if call.target is torch.ops.aten.view.dtype:
        return _contiguous(call)
    shape = call.shape()

    def run(collectives: MeshCollectives, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        # What is a view of the whole need not be one of a part: its strides are others after a cut.
        return torch.reshape(args[0], shape)

    return call.kernel(run)


def _contiguous(call: ShardedCall) -> LocalKernel:
    strides, expected = call.args[0].strides, 1
    for size, stride in zip(reversed(call.args[0].tensor.shape), reversed(strides or ()), strict=False):
        if size > 1 and stride != expected:
            raise CannotShard("it depends on how its operand lies in memory, which is not kept")
        expected *= size

    def run(collectives: MeshCollectives, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return call.target(args[0].contiguous(), *args[1:], **kwargs)

    return call.kernel(run)


def _rows_counted(call: ShardedCall) -> LocalKernel:
    """native_group_norm is told how many images there are."""
    images = call.argument("input").tensor.dims[0]
    return call.kernel(N=call.argument("N") // call.parts(images))


def _interleaved(call: ShardedCall) -> LocalKernel:
    return call.kernel() if "output_size" not in call.kwargs else LocalKernel(call.kernel().run, call.args, {})


# Strides need not be those of the captured values, even where nothing is cut: a tensor that was moved is contiguous.
STRIDE_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "view_copy", "_reshape_alias", "view_as", "reshape_as"), _reshaped
    ),
    # A part may have an axis of one where the whole has more: it must not be squeezed.
    **dict.fromkeys(("flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped),
    **dict.fromkeys(("as_strided", "view_as_complex"), _contiguous),
}

SHAPE_RULES: dict[str, Rule] = {
    **STRIDE_RULES,
    **dict.fromkeys(("expand", "expand_copy", "broadcast_to"), _sized("size")),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), _sized("size")),
    "native_group_norm": _rows_counted,
    "repeat_interleave": _interleaved,
}


_MEAN, _SUM = 1, 2


def mean_kernel(call: ShardedCall) -> LocalKernel:
    """A mean over elements: parts are equal, so their means count alike."""
    if call.has("reduction") and call.argument("reduction") != _MEAN:
        return call.kernel()
    share = 1 / call.partial_count()
    if share == 1:
        return call.kernel()
    return call.kernel(lambda collectives, args, kwargs: call.target(*args, **kwargs) * share)


def _classified(call: ShardedCall) -> LocalKernel:
    """A mean over labels that count: a part may hold more of them than another, or weightier ones."""
    reduction, axes = call.argument("reduction"), call.partial_axes()
    labels = call.argument("target")
    if reduction != _MEAN or not axes or labels.dtype.is_floating_point:
        return mean_kernel(call)
    if call.name.endswith("_forward") and 1 in call.used_outputs:
        raise CannotShard("the total weight of its labels is read")
    at = {name: call.index(name) for name in ("target", "weight", "ignore_index")}

    def shared(collectives: MeshCollectives, args: list[Any], kwargs: dict[str, Any]) -> Any:
        weight = _weight(args[at["target"]], args[at["weight"]], args[at["ignore_index"]])
        total = call.target(*args, **kwargs)
        every = collectives.all_reduce(weight, axes)
        first = total[0] if isinstance(total, tuple) else total
        share = (first / every).to(first.dtype)
        return (share, None) if isinstance(total, tuple) else share

    return call.kernel(shared, whole=frozenset({1}), reduction=_SUM)


def _weight(labels: Tensor, classes: Tensor | None, ignored: int) -> Tensor:
    """What the labels of this part count together."""
    counts = labels != ignored
    if classes is None:
        return counts.sum().float()
    return (classes[labels.where(counts, 0)] * counts).sum()


LOSS_RULES: dict[str, Rule] = {
    "mean": mean_kernel,
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"), _classified),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _classified),
}


SYNCHRONISED = ("_native_batch_norm_legit_functional", "_native_batch_norm_legit", "native_batch_norm")
_CHANGES_STATISTICS = "it changes its running statistics in place, and parts of them are copies"
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
        raise CannotShard(_CHANGES_STATISTICS)
    return _batch_norm(call)


def _instance_norm(call: ShardedCall) -> LocalKernel:
    images = call.argument("input").tensor.dims[0]
    if call.parts(images) > 1 and call.argument("running_mean") is not None and call.argument("use_input_stats"):
        raise CannotShard(_CHANGES_STATISTICS)
    return call.kernel()


_RULES: dict[str, Rule] = {
    **SHAPE_RULES,
    **PRODUCT_RULES,
    **LOSS_RULES,
    **dict.fromkeys(SYNCHRONISED, _batch_norm),
    **dict.fromkeys(_FIXED, _fixed),
    "instance_norm": _instance_norm,
    **RANDOM_RULES,
}

# Their results over parts add up to the result over all, as they are or as the rules above make them.
_ADDS_UP = frozenset({"sum", "histc", *PRODUCT_RULES, *LOSS_RULES, *SYNCHRONISED})


def local_kernel(call: ShardedCall) -> LocalKernel:
    """How the operator computes its part. Raises CannotShard with the reason where it cannot."""
    if isinstance(call.target, torch._ops.OpOverload) and call.target._schema.is_mutable:
        raise CannotShard("it changes its operands in place, and parts of them are copies")
    if not call.is_split:
        return (STRIDE_RULES.get(call.name) or DRAW_RULES.get(call.name, ShardedCall.kernel))(call)
    _refuse_torn_operands(call)
    sums = [output for output in sorted(call.used_outputs) if call.partial_axes(output)]
    rule = _RULES.get(call.name) or (mean_kernel if call.has("reduction") else None)
    if sums and call.name not in _ADDS_UP and rule is not mean_kernel:
        dims = sorted({call.operator.dims[call.split[axis]].name for axis in call.partial_axes(sums[0])})
        raise CannotShard(f"the results of parts of '{', '.join(dims)}' do not add up to the whole")
    if rule is None and is_random(call):
        raise CannotShard("it draws at random, and its draw cannot be cut")
    return rule(call) if rule is not None else call.kernel()


def _refuse_torn_operands(call: ShardedCall) -> None:
    """A split cuts an operand along one axis for each dimension; a tensor that has it twice cannot be cut so."""
    for tensor in (*(found.tensor for found in leaves([call.args, call.kwargs], Operand)), *call.operator.outputs):
        for dim in set(call.split):
            if dim >= 0 and tensor.dims.count(dim) > 1 and call.parts(dim) > 1:
                raise CannotShard(f"'{call.operator.dims[dim].name}' cuts two axes of one tensor")
