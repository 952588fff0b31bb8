"""Normalisation: what is averaged over stays whole, except the images of a batch."""

from __future__ import annotations

import math

from weft.plan.capture.op_call import AxisNames, IterationSpace, OpCall, iteration_space, names, rule


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(call: OpCall) -> IterationSpace | None:
    """Leading axes are free; the normalised ones are whole, as are the weights over them."""
    shape = call.operands[0].shape
    inner = names("c", len(call.given["normalized_shape"]))
    labels = (*names("b", len(shape) - len(inner)), *inner)
    leading = labels[: len(shape) - len(inner)]
    results: list[AxisNames] = [labels]
    for value in call.results[1:]:  # mean and reciprocal deviation
        results.append((*leading, *(None,) * (value.rank - len(leading))))
    rows = call.operands[0].elements // max(1, math.prod(shape[len(leading) :]))
    return _normalized(call, labels, inner, results, inner, extra=4.0 * rows * (1 if "rms" in call.target else 2))


def _normalized(
    call: OpCall,
    labels: AxisNames,
    weight: AxisNames,
    results: list[AxisNames],
    inner: tuple[str, ...],
    *,
    kind: str = "normalize",
    extra: float = 0.0,
) -> IterationSpace:
    """Every operand after the first has the axes of a weight; the inner axes stay whole."""
    return iteration_space(
        call,
        kind,
        [labels, *[weight] * (len(call.operands) - 1)],
        results,
        unsplittable=inner,
        flops=8.0 * call.operands[0].elements,
        backward=2.0,
        saved_operands=[0],
        extra=extra,
    )


@rule("group_norm", "native_group_norm")
def group_norm(call: OpCall) -> IterationSpace | None:
    """Images are free (the native form is given their number, which is then that of the part)."""
    inner = names("c", call.operands[0].rank - 1)
    labels = ("n", *inner)
    groups: int = call.given["group" if call.target == "aten.native_group_norm" else "num_groups"]
    statistics: list[AxisNames] = [("n", None)] * (len(call.results) - 1)
    extra = 8.0 * call.operands[0].shape[0] * groups
    return _normalized(call, labels, inner[:1], [labels, *statistics], inner, extra=extra)


@rule(
    "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training native_batch_norm batch_norm "
    "_native_batch_norm_legit cudnn_batch_norm"
)
def batch_norm(call: OpCall) -> IterationSpace | None:
    """Channels are free, and images: in training (kind "batch_norm") the statistics are then sums over all parts, in
    evaluation (kind "normalize") nothing is shared. The results after the first are over channels."""
    inner = names("i", max(call.operands[0].rank - 2, 0))
    labels = ("n", "c", *inner)
    training = bool(call.given.get("training", call.given.get("train", False)))
    if call.target.endswith("no_training"):
        training = False
    results: list[AxisNames] = [labels]
    for value in call.results[1:]:
        results.append(("c",) if value.shape == call.operands[0].shape[1:2] else (None,) * value.rank)
    if not training:
        return _normalized(call, labels, ("c",), results, inner)
    extra = 8.0 * call.operands[0].shape[1]
    return _normalized(call, labels, ("c",), results, inner, kind="batch_norm", extra=extra)


@rule("instance_norm")
def instance_norm(call: OpCall) -> IterationSpace | None:
    """Images and channels are free where each image has statistics of its own."""
    if not call.given["use_input_stats"] or call.given["running_mean"] is not None:
        return None
    inner = names("i", call.operands[0].rank - 2)
    labels = ("n", "c", *inner)
    return _normalized(call, labels, ("c",), [labels], inner)


@rule("_weight_norm")
def weight_norm(call: OpCall) -> IterationSpace | None:
    """A direction and its length: the axis that has a length for each of its entries is free."""
    rank = call.operands[0].rank
    if call.operands[1].rank != rank:
        return None
    labels = names("a", rank)
    length: AxisNames = tuple(name if number == call.axis(rank) else None for number, name in enumerate(labels))
    return iteration_space(
        call,
        "normalize",
        [labels, length],
        [labels],
        unsplittable=[name for name in labels if name not in length],
        flops=4.0 * call.operands[0].elements,
        saved_operands=[0, 1],
    )
