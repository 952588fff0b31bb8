"""Element-wise operators, broadcasting included: every axis of the result is free."""

from __future__ import annotations

from weft.plan.capture.op_call import AxisNames, IterationSpace, OpCall, broadcast, iteration_space, names, rule

# What autograd keeps: nothing, the result, or (by default) the floating-point operands.
_NOTHING_KEPT = (
    "add sub rsub neg _to_copy to clone copy contiguous lift_fresh lift_fresh_copy type_as zeros_like ones_like "
    "empty_like full_like positive floor ceil round trunc sign sgn fill real imag complex conj detach_copy bernoulli "
    "rand_like randn_like floor_divide resolve_conj resolve_neg"
)
_NOTHING = frozenset(_NOTHING_KEPT.split())
_ALSO = {"multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "negative": "neg"}
_RESULT = frozenset(["exp", "expm1", "sigmoid", "tanh", "sqrt", "rsqrt", "reciprocal", "relu", "tan"])


def elementwise(call: OpCall, kind: str = "elementwise") -> IterationSpace | None:
    """Every result has the shape that the operands broadcast to."""
    shape = call.results[0].shape
    labels = names("a", len(shape))
    reads = [broadcast(value.shape, shape, labels) for value in call.operands]
    if any(value.shape != shape for value in call.results):
        return None
    keeps, leaves = _kept(call)
    return iteration_space(
        call,
        kind,
        reads,
        [labels] * len(call.results),
        flops=0.0 if _name(call) in _NOTHING - {"add", "sub", "rsub", "neg"} else call.results[0].elements,
        saved_operands=keeps,
        saved_results=leaves,
    )


def _name(call: OpCall) -> str:
    name = call.target.split(".")[1]
    return _ALSO.get(name, name)


def _kept(call: OpCall) -> tuple[list[int], list[int]]:
    name = _name(call)
    if name in _NOTHING:
        return [], []
    if name in _RESULT:
        return [], [0]
    trained = [number for number, value in enumerate(call.operands) if value.gradient]
    if name in ("mul", "div"):
        if len(call.operands) < 2:
            return [], []  # by a number
        keeps = [1 - number for number in trained]
        return sorted({*keeps, *([1] if name == "div" and 1 in trained else [])}), []
    if name in ("where", "masked_fill"):
        return [number for number, value in enumerate(call.operands) if not value.floating], []
    return [number for number, value in enumerate(call.operands) if value.floating], []


@rule(
    "_to_copy to clone copy contiguous lift_fresh lift_fresh_copy zeros_like ones_like empty_like full_like where "
    "masked_fill hardswish floor_divide __and__ __or__ __xor__ fill log_sigmoid polar complex resolve_conj resolve_neg "
    "isin.Tensor_Scalar rsub special_expit detach_copy relu6 selu celu clip "
    "multiply divide true_divide subtract negative absolute fix greater greater_equal less less_equal not_equal arccos "
    "arccosh arcsin arcsinh arctan arctan2 arctanh"
)
def untagged(call: OpCall) -> IterationSpace | None:
    """Those that torch does not tag as point-wise."""
    return elementwise(call)


@rule("bernoulli rand_like randn_like randint_like")
def drawn(call: OpCall) -> IterationSpace | None:
    """Kind "random": the parts would have to draw what the whole would."""
    return elementwise(call, "random")


@rule("native_dropout dropout")
def dropout(call: OpCall) -> IterationSpace | None:
    """Kind "random". The second result, where there is one, is the mask; it is what the backward keeps."""
    labels = names("a", call.results[0].rank)
    found = [labels] * len(call.results)
    elements = float(call.results[0].elements)
    masked = len(call.results) > 1
    return iteration_space(
        call,
        "random",
        [labels],
        found,
        flops=elements,
        saved_results=[1] if masked else [],
        extra=0.0 if masked else elements,
    )


@rule("prelu", "_prelu_kernel")
def prelu(call: OpCall) -> IterationSpace | None:
    """A slope for each channel, which is the second axis."""
    labels = names("a", call.results[0].rank)
    slope: AxisNames = labels[1:2] if call.operands[1].elements > 1 else (None,) * call.operands[1].rank
    if call.operands[1].rank != len(slope):
        return None
    return iteration_space(
        call, "elementwise", [labels, slope], [labels], flops=call.results[0].elements, saved_operands=[0, 1]
    )
