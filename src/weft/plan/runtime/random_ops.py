"""Random operators on parts: every device draws for the whole tensor, as a single device would, and keeps its part.

The price is a draw of the whole tensor on every device. The gain is the same numbers on any mesh. All devices must
start from one state of torch's generator.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.plan.runtime.program import CannotShard, Kernel, LocalKernel, Operand, ShardedCall, leaves
from weft.plan.runtime.redistribute import MeshCollectives, redistribution_steps
from weft.plan.sharding import REPLICATED, Placements


def is_random(call: ShardedCall) -> bool:
    """Whether a call takes numbers from the generator, whatever its arguments."""
    if call.name in ("dropout", "native_dropout"):
        return bool(call.argument("p")) and call.argument("train") is not False
    if call.has("dropout_p"):
        return bool(call.argument("dropout_p"))
    if call.has("dropout"):
        return bool(call.argument("dropout")) and bool(call.argument("train"))
    return isinstance(call.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in call.target.tags


def take_shard(collectives: MeshCollectives, whole: Tensor, placements: Placements) -> Tensor:
    """This device's part of a tensor that every device has."""
    for axis, placement in enumerate(placements):
        if placement >= 0 and collectives.sizes[axis] > 1:
            whole = collectives.shard(whole, axis, placement)
    return whole


def whole_draw(call: ShardedCall) -> Kernel:
    """Takes from the generator what the call would, without computing it, and gives what was drawn for the whole
    tensor. Raises CannotShard where that cannot be."""
    if call.name in ("dropout", "native_dropout"):
        first, probability = call.args[0], call.argument("p")
        return lambda collectives, args, kwargs: torch.dropout(
            _empty_like_whole(first, collectives).fill_(1), probability, True
        )
    if call.name == "scaled_dot_product_attention":
        query, keys, dropped = call.argument("query"), call.argument("key").tensor, call.argument("dropout_p")
        shape = (*query.tensor.shape[:-1], keys.shape[-2])
        return lambda collectives, args, kwargs: torch.dropout(
            torch.ones(shape, dtype=query.dtype, device=collectives.device), dropped, True
        )
    if call.name in _RANDOM_LIKE:
        first = call.args[0]
        return lambda collectives, args, kwargs: call.target(
            _empty_like_whole(first, collectives).fill_(0), *call.args[1:], **call.kwargs
        )
    if any(True for _ in leaves([call.args, call.kwargs], Operand)):
        raise CannotShard("it draws at random, and how much depends on what it reads")
    return lambda collectives, args, kwargs: call.target(*call.args, **call.kwargs)


def _dropout(call: ShardedCall) -> LocalKernel:
    if not is_random(call):
        return call.kernel()
    draw, placements = whole_draw(call), call.operand_placements(call.args[0])

    def run(collectives: MeshCollectives, args: list[Any], kwargs: dict[str, Any]) -> Any:
        factor = take_shard(collectives, draw(collectives, [], {}), placements)
        out = args[0] * factor
        return (out, factor != 0) if call.name == "native_dropout" else out

    return call.kernel(run)


def _random_like(call: ShardedCall) -> LocalKernel:
    first = call.args[0]
    placements = call.operand_placements(first)
    # Only here does a draw depend on what the operand holds; no gradient flows through it.
    given = call.name == "bernoulli" and call.target is not torch.ops.aten.bernoulli.p
    gathering = redistribution_steps(placements, (REPLICATED,) * len(placements), call.mesh) if given else ()

    def run(collectives: MeshCollectives, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        whole = _empty_like_whole(first, collectives)
        if given:
            whole.copy_(collectives.move(args[0].detach(), gathering))
        return take_shard(collectives, call.target(whole, *args[1:], **kwargs), placements)

    return call.kernel(run)


def _empty_like_whole(operand: Operand, collectives: MeshCollectives) -> Tensor:
    """An empty tensor as torch makes one like the whole operand: numbers are drawn in the order of memory."""
    shape, strides = operand.tensor.shape, operand.strides
    if strides is None:
        return torch.empty(shape, dtype=operand.dtype, device=collectives.device)
    whole = torch.empty_strided(shape, strides, dtype=operand.dtype, device="meta")
    return torch.empty_like(whole, device=collectives.device)


def _attention(call: ShardedCall) -> LocalKernel:
    query = call.argument("query").tensor
    if call.argument("is_causal") and call.parts(query.dims[-2]) > 1:
        raise CannotShard("a part of the queries does not know which of them it is, and the mask is causal")
    if not call.argument("dropout_p"):
        return call.kernel()
    draw, last = whole_draw(call), len(query.shape) - 1
    # The weights have the axes of the queries; the keys' length is whole.
    placements = tuple(each if each < last else REPLICATED for each in call.operand_placements(call.argument("query")))
    at = {name: call.index(name) for name in ("attn_mask", "is_causal")}

    def run(collectives: MeshCollectives, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        q, k, v = args[:3]
        kept = take_shard(collectives, draw(collectives, [], {}), placements)
        if kwargs.get("enable_gqa"):
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        scale = kwargs.get("scale")
        scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        mask = args[at["attn_mask"]]
        if args[at["is_causal"]]:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        # A query that may see no key at all gives zeros, as torch's own attention does.
        weights: Tensor = torch.ops.aten._safe_softmax(scores, -1)
        return torch.matmul(weights * kept, v)

    return call.kernel(run)


_RANDOM_LIKE = frozenset(
    ("rand_like", "randn_like", "randint_like", "bernoulli", "uniform", "normal_functional", "exponential")
    + ("log_normal", "cauchy", "geometric", "random")
)
# These draw in the order of the whole tensor's memory also where nothing is split.
DRAW_RULES: dict[str, Callable[[ShardedCall], LocalKernel]] = {
    **dict.fromkeys(("dropout", "native_dropout"), _dropout),
    **dict.fromkeys(_RANDOM_LIKE, _random_like),
}
RANDOM_RULES = {**DRAW_RULES, "scaled_dot_product_attention": _attention}


def rng_digest(device: torch.device) -> int:
    """A number that tells states of the device's generator apart."""
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest(), "little")
