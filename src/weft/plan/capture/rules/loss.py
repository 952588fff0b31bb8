"""Losses: rows may be split, and the loss is then a sum over the parts."""

from __future__ import annotations

from weft.plan.capture.op_call import AxisNames, IterationSpace, OpCall, broadcast, iteration_space, names, rule
from weft.plan.capture.rules.elementwise import elementwise

_NONE, _MEAN, _SUM = 0, 1, 2


@rule("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss_forward", "nll_loss2d", "nll_loss2d_forward")
def cross_entropy(call: OpCall) -> IterationSpace | None:
    """Rows n are free, classes whole. A mean over the rows is kind "mean_loss": a part's mean counts by its rows that
    are not ignored. With weights for the classes, the rows stay whole."""
    scores, target = call.operands[:2]
    weighted = len(call.operands) > 2
    reduction: int = call.given["reduction"]
    batch = names("n", 1 if scores.rank > 1 else 0)
    spatial = names("i", max(scores.rank - 2, 0))
    labels: AxisNames = (*batch, "c", *spatial)
    aim: AxisNames = labels if target.floating else (*batch, *spatial)
    result: AxisNames = (*batch, *spatial) if reduction == _NONE else ()
    whole = {"c", *spatial, *(batch if weighted and reduction == _MEAN else ())}
    results: list[AxisNames] = [result, *[(None,) * value.rank for value in call.results[1:]]]
    return iteration_space(
        call,
        {_NONE: "loss", _MEAN: "mean_loss", _SUM: "loss"}[reduction],
        [labels, aim, *[("c",)] * (len(call.operands) - 2)],
        results,
        unsplittable=whole,
        flops=6.0 * scores.elements,
        saved_operands=[1] if "cross" in call.target else [0, 1],
        extra=scores.bytes if "cross" in call.target else 0.0,
    )


@rule(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "soft_margin_loss"
)
def distance(call: OpCall) -> IterationSpace | None:
    """A loss of each element; kinds "sum" and "mean" where they are reduced."""
    reduction: int = call.given.get("reduction", _MEAN)
    if reduction == _NONE:
        return elementwise(call)
    value = call.operands[0]
    labels = names("a", value.rank)
    found = [broadcast(other.shape, value.shape, labels) for other in call.operands]
    reads: list[AxisNames] = [axes for axes in found if axes is not None]
    if len(reads) < len(found):
        return None
    return iteration_space(
        call,
        "mean" if reduction == _MEAN else "sum",
        reads,
        [(None,) * value.rank for value in call.results],
        flops=3.0 * value.elements,
        saved_operands=range(len(reads)),
    )
