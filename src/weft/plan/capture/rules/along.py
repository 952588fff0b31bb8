"""Operators that work along axes, and losses: such an axis is whole, or summed over, and the others are free."""

from __future__ import annotations

from weft.plan.capture.op_call import AxisNames, IterationSpace, OpCall, broadcast, iteration_space, names, rule
from weft.plan.capture.rules.elementwise import elementwise

_KEEPS_RESULT = frozenset({"_safe_softmax", "softmax", "_softmax", "log_softmax", "_log_softmax"})
_KEEPS_INDICES = frozenset({"sort", "topk", "max", "min", "kthvalue", "median", "mode", "cummax", "cummin"})
_KEEPS_NOTHING = frozenset({"cumsum", "flip", "roll", "argmax", "argmin", "argsort", "any", "all"})


def along(call: OpCall, axes: frozenset[int], *, kind: str = "along", cost: float = 1.0) -> IterationSpace | None:
    """A result has the axes of the operand, or lacks those that the operator works along."""
    value = call.operands[0]
    labels = names("a", value.rank)
    if any(found.rank not in (value.rank, value.rank - len(axes)) for found in call.results):
        return None
    results = [_without(labels, axes, found.rank) for found in call.results]
    name = call.target.split(".")[1]
    plain = name in _KEEPS_RESULT or name in _KEEPS_INDICES or name in _KEEPS_NOTHING
    return iteration_space(
        call,
        kind,
        [labels, *[(None,) * other.rank for other in call.operands[1:]]],
        results,
        unsplittable=[labels[axis] for axis in axes],
        flops=cost * value.elements,
        saved_operands=() if plain else (0,),
        saved_results=(0,) if name in _KEEPS_RESULT else (1,) if name in _KEEPS_INDICES and len(results) > 1 else (),
    )


def _without(labels: AxisNames, axes: frozenset[int], rank: int) -> AxisNames:
    """The axes of a result of this rank: without names for some of them, or without these."""
    if rank == len(labels):
        return tuple(None if axis in axes else name for axis, name in enumerate(labels))
    return tuple(name for axis, name in enumerate(labels) if axis not in axes)


@rule(
    "softmax _softmax log_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp sort topk argsort glu cummax "
    "cummin kthvalue"
)
def axis(call: OpCall) -> IterationSpace | None:
    soft = "softmax" in call.target
    cost = 5.0 if soft or "sort" in call.target or "topk" in call.target else 1.0
    return along(call, call.axes(call.operands[0].rank), kind="softmax" if soft else "along", cost=cost)


@rule(
    "argmax argmin amax amin max.dim min.dim max.default min.default median.dim median.default mode prod logsumexp var "
    "std var_mean std_mean any all norm linalg_vector_norm nansum aminmax count_nonzero"
)
def reduced(call: OpCall) -> IterationSpace | None:
    """Reductions whose parts do not simply add up: what is reduced is whole."""
    if len(call.operands) != 1:
        return None
    return along(call, call.axes(call.operands[0].rank), cost=2.0)


@rule("flip", "roll", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_fft2", "fft_ifft2", "fft_fftn", "fft_ifftn")
def moved(call: OpCall) -> IterationSpace | None:
    """Entries trade places, or mix, along the axes that are named; a roll that names none is of all entries."""
    rank = call.operands[0].rank
    return along(call, call.axes(rank, "dims" if "dims" in call.given else "dim"))


@rule("tril", "triu")
def triangle(call: OpCall) -> IterationSpace | None:
    """Where an entry stands along the last two axes decides; leading axes are free."""
    rank = call.operands[0].rank
    return along(call, frozenset({rank - 2, rank - 1}))


_PLACED: dict[str, tuple[str, tuple[str, ...], float]] = {  # kind, arguments that name axes, operations per element
    "diff": ("along", ("dim",), 1.0),
    "unfold": ("view", ("dimension",), 0.0),
    "diagonal": ("view", ("dim1", "dim2"), 0.0),
    "cosine_similarity": ("along", ("dim",), 6.0),
    "one_hot": ("copy", (), 0.0),
}


@rule(*_PLACED)
def placed(call: OpCall) -> IterationSpace | None:
    """The axes that are named are whole. A result has them, or lacks them; axes that are new come last."""
    value, rank = call.operands[0], call.results[0].rank
    pair = call.target == "aten.cosine_similarity"
    if len(call.operands) != 1 + pair or any(other.shape != value.shape for other in call.operands):
        return None
    kind, arguments, cost = _PLACED[call.target.split(".")[1]]
    axes = frozenset(call.axis(value.rank, name) for name in arguments)
    labels = names("a", value.rank)
    kept = _without(labels, axes, value.rank if rank >= value.rank else value.rank - len(axes))
    return iteration_space(
        call,
        kind,
        [labels] * len(call.operands),
        [(*kept, *(None,) * (rank - len(kept)))],
        unsplittable=[labels[axis] for axis in axes],
        flops=cost * value.elements,
        saved_operands=(0, 1) if pair else (),
    )


@rule("sum", "mean")
def total(call: OpCall) -> IterationSpace | None:
    """Kind "sum", or "mean": the mean of a part must be divided by the number of parts before parts are added."""
    value = call.operands[0]
    labels = names("a", value.rank)
    result = _without(labels, call.axes(value.rank), call.results[0].rank)
    # A sum of truth values or of integers that are counted in another type adds up just the same.
    return iteration_space(call, call.target.split(".")[1], [labels], [result], flops=value.elements)


@rule("histc")
def histogram(call: OpCall) -> IterationSpace | None:
    """Counts of the parts add up where the range is given, not taken from the data."""
    if call.given["min"] == call.given["max"]:
        return None
    labels = names("a", call.operands[0].rank)
    return iteration_space(call, "sum", [labels], [(None,)], flops=call.operands[0].elements)


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
    reads = [broadcast(other.shape, value.shape, labels) for other in call.operands]
    return iteration_space(
        call,
        "mean" if reduction == _MEAN else "sum",
        reads,
        [(None,) * value.rank for value in call.results],
        flops=3.0 * value.elements,
        saved_operands=range(len(reads)),
    )
