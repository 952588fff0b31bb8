"""Attention as one operator: sequences and heads may be split, and queries where no order among them matters."""

from __future__ import annotations

from weft.plan.capture.op_call import AxisNames, IterationSpace, OpCall, broadcast, iteration_space, names, rule


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
        if mask is None or len(call.operands) > 4:
            return None
        reads.append(mask)
    others = [_kept(found.shape, (*labels, "q"), query.shape[:-1]) for found in call.results[1:]]
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


def _kept(shape: tuple[int, ...], labels: tuple[str, ...], sizes: tuple[int, ...]) -> AxisNames:
    if shape[: len(sizes)] == sizes:
        return (*labels, *(None,) * (len(shape) - len(sizes)))
    return (None,) * len(shape)
