"""Operators that work along an axis: that axis is whole, the others are free."""

from __future__ import annotations

from weft.plan.capture.call import Call, Labels, Space, names, rule, space

_RESULT = frozenset({"_safe_softmax", "softmax", "_softmax", "log_softmax", "_log_softmax"})
_INDICES = frozenset({"sort", "topk", "max", "min", "kthvalue", "median", "mode", "cummax", "cummin"})
_NOTHING = frozenset({"cumsum", "flip", "roll", "argmax", "argmin", "argsort", "any", "all", "diff"})


def along(call: Call, axes: frozenset[int], *, kind: str = "along", cost: float = 1.0) -> Space | None:
    """A result has the axes of the operand, or lacks those that the operator works along."""
    value = call.operands[0]
    labels = names("a", value.rank)
    results: list[Labels] = []
    for found in call.results:
        if found.rank == value.rank:
            results.append(tuple(None if axis in axes else name for axis, name in enumerate(labels)))
        elif found.rank == value.rank - len(axes):
            results.append(tuple(name for axis, name in enumerate(labels) if axis not in axes))
        else:
            return None
    name = call.target.split(".")[1]
    plain = name in _RESULT or name in _INDICES or name in _NOTHING
    return space(
        call,
        kind,
        [labels, *[(None,) * other.rank for other in call.operands[1:]]],
        results,
        whole=[labels[axis] for axis in axes],
        flops=cost * value.elements,
        keeps=() if plain else (0,),
        leaves=(0,) if name in _RESULT else (1,) if name in _INDICES and len(results) > 1 else (),
    )


@rule("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax")
def softmax(call: Call) -> Space | None:
    return along(call, call.axes(call.operands[0].rank), kind="softmax", cost=5.0)


@rule("cumsum cumprod logcumsumexp sort topk argsort glu cummax cummin kthvalue cosine_similarity")
def axis(call: Call) -> Space | None:
    value = call.operands[0]
    found = call.axes(value.rank)
    if call.target == "aten.cosine_similarity":
        if any(other.shape != value.shape for other in call.operands):
            return None
        labels = names("a", value.rank)
        result = tuple(name for number, name in enumerate(labels) if number not in found)
        return space(
            call, "along", [labels] * 2, [result], whole=[labels[number] for number in found],
            flops=6.0 * value.elements, keeps=[0, 1],
        )  # fmt: skip
    return along(call, found, cost=5.0 if "sort" in call.target or "topk" in call.target else 1.0)


@rule(
    "argmax argmin amax amin max.dim min.dim max.default min.default median.dim median.default mode prod logsumexp var "
    "std var_mean std_mean any all norm linalg_vector_norm nansum aminmax count_nonzero"
)
def reduced(call: Call) -> Space | None:
    """Reductions whose parts do not simply add up: what is reduced is whole."""
    if len(call.operands) != 1:
        return None
    return along(call, call.axes(call.operands[0].rank), cost=2.0)


@rule("flip", "roll", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_fft2", "fft_ifft2", "fft_fftn", "fft_ifftn")
def moved(call: Call) -> Space | None:
    """Entries trade places, or mix, along the axes that are named; a roll that names none is of all entries."""
    rank = call.operands[0].rank
    return along(call, call.axes(rank, "dims" if "dims" in call.given else "dim"))


@rule("tril", "triu", "diff", "unfold", "diagonal", "diag_embed")
def placed(call: Call) -> Space | None:
    """Where an entry stands along an axis, or two, decides; leading axes of triangles are free."""
    value = call.operands[0]
    if call.target in ("aten.tril", "aten.triu"):
        return along(call, frozenset({value.rank - 2, value.rank - 1}))
    if call.target == "aten.diff" and len(call.operands) == 1:
        return along(call, call.axes(value.rank))
    if call.target == "aten.unfold":  # (.., size, ..) -> (.., windows, .., window)
        labels = names("a", value.rank)
        number = call.axis(value.rank, "dimension")
        result = (*(None if place == number else name for place, name in enumerate(labels)), None)
        return space(call, "view", [labels], [result], whole=[labels[number]], moved=0.0)
    if call.target == "aten.diagonal":  # both axes leave; the diagonal comes last
        labels = names("a", value.rank)
        gone = {call.axis(value.rank, "dim1"), call.axis(value.rank, "dim2")}
        kept = tuple(name for place, name in enumerate(labels) if place not in gone)
        return space(call, "view", [labels], [(*kept, None)], whole=[labels[place] for place in gone], moved=0.0)
    return None
