"""Matrix products, attention and recurrent layers.

The dimension that a product contracts is summed over, and no result has it. Attention may be split by sequences and
heads, and by queries where no order among them matters. Of recurrent layers the sequences of a batch may be split.
"""

from __future__ import annotations

import math

from weft.plan.capture.op_call import (
    AxisNames,
    IterationSpace,
    OpCall,
    TensorArgument,
    TensorValue,
    broadcast,
    iteration_space,
    names,
    rule,
)


def product(call: OpCall, reads: list[AxisNames], result: AxisNames, *, factors: tuple[int, int]) -> IterationSpace:
    """The space of a contraction. ``factors`` are the operands that are multiplied (any other is added); the backward
    is one such product for each factor that has a gradient, and needs the other."""
    sizes: dict[str, int] = {}
    for number in factors:
        for size, name in zip(call.operands[number].shape, reads[number], strict=True):
            if name is not None:
                sizes[name] = max(sizes.get(name, 1), size)
    backward, keeps = factor_gradients(call, factors)
    flops = 2.0 * math.prod(sizes.values())
    return iteration_space(call, "matmul", reads, [result], flops=flops, backward=backward, saved_operands=keeps)


def factor_gradients(call: OpCall, factors: tuple[int, int] = (0, 1)) -> tuple[float, list[int]]:
    """How many of the factors of a product have a gradient, and the factors that these gradients need: the others."""
    trained = [call.operands[number].gradient for number in factors]
    return float(sum(trained)), [number for number, other in zip(factors, reversed(trained), strict=True) if other]


@rule("linear")
def linear(call: OpCall) -> IterationSpace | None:
    """``(m..., k), (n, k) -> (m..., n)``, with a bias over n."""
    weight = call.operands[1]
    if weight.rank != 2:
        return None
    rows = names("m", call.operands[0].rank - 1)
    reads: list[AxisNames] = [(*rows, "k"), ("n", "k"), ("n",)]
    return product(call, reads[: len(call.operands)], (*rows, "n"), factors=(0, 1))


def _labels(left: TensorValue, right: TensorValue, result: TensorValue) -> tuple[AxisNames, AxisNames, AxisNames]:
    """The names of the axes of ``left @ right`` as torch.matmul understands it."""
    core = (("m",) if left.rank > 1 else ()) + (("n",) if right.rank > 1 else ())
    batch = names("b", result.rank - len(core))
    leading = result.shape[: len(batch)]
    first = broadcast(left.shape[:-2], leading, batch)
    second = broadcast(right.shape[:-2], leading, batch)
    rows: AxisNames = ("m", "k") if left.rank > 1 else ("k",)
    columns: AxisNames = ("k", "n") if right.rank > 1 else ("k",)
    return (*first, *rows), (*second, *columns), (*batch, *core)


@rule("matmul", "mm", "bmm", "mv", "dot")
def matmul(call: OpCall) -> IterationSpace | None:
    """``(b..., m, k), (b..., k, n) -> (b..., m, n)``, batch axes broadcasting, vectors without m or n."""
    left, right, result = _labels(call.operands[0], call.operands[1], call.results[0])
    return product(call, [left, right], result, factors=(0, 1)) if len(call.operands) == 2 else None


@rule("addmm", "baddbmm", "addmv")
def added(call: OpCall) -> IterationSpace | None:
    """A product onto which the first operand, broadcast, is added: a bias."""
    left, right, result = _labels(call.operands[1], call.operands[2], call.results[0])
    bias = broadcast(call.operands[0].shape, call.results[0].shape, result)
    return product(call, [bias, left, right], result, factors=(1, 2))


@rule("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped(call: OpCall) -> IterationSpace | None:
    """Rows sorted by group, each group with a matrix of its own: ``(s, k), (g, k, n) -> (s, n)``. Where the groups
    begin is counted over all rows, so these stay whole; n and k are free, as tensor parallelism within each expert
    needs."""
    rows, weights = call.operands[:2]
    if rows.rank != 2 or weights.rank != 3 or len(call.operands) != 3:
        return None
    backward, keeps = factor_gradients(call)
    return iteration_space(
        call,
        "matmul",
        [("s", "k"), ("g", "k", "n"), (None,)],
        [("s", "n")],
        unsplittable=("s", "g"),
        flops=2.0 * rows.elements * weights.shape[2],
        backward=backward,
        saved_operands=keeps,
    )


@rule("einsum")
def einsum(call: OpCall) -> IterationSpace | None:
    """The equation names the dimensions; "..." stands for axes that broadcast."""
    equation: str = call.given["equation"].replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not all(isinstance(operand, TensorArgument) for operand in call.given["tensors"]):
        return None
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        right = "..." * ("..." in left) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    dots = max(value.rank - len(term.replace("...", "")) for term, value in zip(terms, call.operands, strict=True))
    named = [_axes(term, value.rank, dots) for term, value in zip(terms, call.operands, strict=True)]
    result = _axes(right, call.results[0].rank, dots)
    sizes: dict[str, int] = {}
    for value, axes in zip(call.operands, named, strict=True):
        if len(set(axes)) < len(axes):
            return None  # a diagonal
        for size, name in zip(value.shape, axes, strict=True):
            sizes[name] = max(sizes.get(name, 1), size)
    reads: list[AxisNames] = [
        tuple(name if size == sizes[name] else None for size, name in zip(value.shape, axes, strict=True))
        for value, axes in zip(call.operands, named, strict=True)
    ]
    if len(reads) == 2:
        return product(call, reads, result, factors=(0, 1))
    return iteration_space(
        call,
        "matmul",
        reads,
        [result],
        flops=2.0 * math.prod(sizes.values()) * max(len(reads) - 1, 0),
        backward=float(sum(value.gradient for value in call.operands)) / max(len(reads) - 1, 1),
        saved_operands=range(len(reads)) if len(reads) > 1 else (),
    )


def _axes(term: str, rank: int, dots: int) -> tuple[str, ...]:
    before, found, after = term.partition("...")
    count = rank - len(before) - len(after)
    return (*before, *(names("dot", dots)[dots - count :] if found else ()), *after)


@rule("outer")
def outer(call: OpCall) -> IterationSpace | None:
    """``(m), (n) -> (m, n)``."""
    return product(call, [("m",), ("n",)], ("m", "n"), factors=(0, 1))


@rule(
    "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention"
)
def attention(call: OpCall) -> IterationSpace | None:
    """``(b..., h, q, e), (b..., h, k, e), (b..., h, k, v) -> (b..., h, q, v)``. Where several query heads share a key,
    the heads split by keys. The causal mask depends on where a query stands, so q is then whole; a mask that is given
    is cut along. Other results than the first (what a kernel keeps for its backward) have the axes that they share
    with it."""
    query, key, value = call.operands[:3]
    leading = query.rank - 2
    if leading < 1:
        return None
    labels = (*names("b", leading - 1), "h") if leading > 1 else ("b0",)
    shared = []
    for found in (key, value):
        if found.rank != query.rank:
            return None
        shared.append(
            tuple(
                None if size == 1 and whole > 1 else name
                for size, whole, name in zip(found.shape[:-2], query.shape[:-2], labels, strict=True)
            )
        )
    result: AxisNames = (*labels, "q", "v")
    reads: list[AxisNames] = [(*labels, "q", "e"), (*shared[0], "k", "e"), (*shared[1], "k", "v")]
    if len(call.operands) > 3:
        mask = broadcast(call.operands[3].shape, (*query.shape[:-1], key.shape[-2]), (*labels, "q", "k"))
        if len(call.operands) > 4:
            return None
        reads.append(mask)
    others: list[AxisNames] = []
    for found in call.results[1:]:
        shared_axes = (*labels, "q") if found.shape[: query.rank - 1] == query.shape[:-1] else ()
        others.append((*shared_axes, *(None,) * (found.rank - len(shared_axes))))
    rows = query.elements // query.shape[-1]
    return iteration_space(
        call,
        "attention",
        reads,
        [result, *others],
        unsplittable=("k", "e", "v", *(("q",) if call.given.get("is_causal") else ())),
        flops=2.0 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]),
        backward=2.5,
        saved_operands=range(len(call.operands)),
        saved_results=[0],
        extra=4.0 * rows,
    )


_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@rule("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def recurrent(call: OpCall) -> IterationSpace | None:
    """``input`` and result ``(b, s, h)`` or ``(s, b, h)`` by ``batch_first``, states ``(layers, b, h)``."""
    if call.operands[0].rank != 3:
        return None
    order: AxisNames = ("b", None, None) if call.given["batch_first"] else (None, "b", None)
    return _recurrent(call, order, (None, "b", None), call.given["num_layers"])


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(call: OpCall) -> IterationSpace | None:
    """One step of such a layer: ``input`` ``(b, i)``, states and results ``(b, h)``."""
    return _recurrent(call, ("b", None), ("b", None), 1) if call.operands[0].rank == 2 else None


def _recurrent(call: OpCall, order: AxisNames, state: AxisNames, layers: int) -> IterationSpace:
    value, hidden = call.operands[0], call.given["hx"]
    states = len(hidden) if isinstance(hidden, (list, tuple)) else 1
    weights = call.operands[1 + states :]
    steps = value.elements // value.shape[-1]
    products = sum(weight.elements for weight in weights if weight.rank == 2)
    gates = _GATES[call.target.split(".")[1].removesuffix("_cell")]
    return iteration_space(
        call,
        "recurrent",
        [order, *[state] * states, *[(None,) * weight.rank for weight in weights]],
        [order, *[state] * (len(call.results) - 1)],
        flops=2.0 * steps * products,
        backward=2.0,
        saved_operands=[0],
        saved_results=[0],
        extra=float(steps * call.results[0].shape[-1] * (gates + 1) * value.dtype.itemsize * layers),
    )
