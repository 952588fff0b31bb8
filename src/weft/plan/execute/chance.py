"""Random operators: every device draws for the whole tensor, as a single device would, and keeps its part.

The price is a draw of the whole tensor on every device; the gain is the same numbers on any mesh. All devices must
start from one state of torch's generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.plan.execute.passage import passage
from weft.plan.execute.site import Local, Operand, Run, Site, Unfit, operands
from weft.plan.execute.wire import Wire
from weft.plan.layout import REPLICATED, Layout


def draws(site: Site) -> bool:
    """Whether a call takes numbers from the generator, whatever its arguments."""
    if site.name in ("dropout", "native_dropout"):
        return bool(site.argument("p")) and site.argument("train") is not False
    if site.has("dropout_p"):
        return bool(site.argument("dropout_p"))
    if site.has("dropout"):
        return bool(site.argument("dropout")) and bool(site.argument("train"))
    return isinstance(site.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in site.target.tags


def keep(wire: Wire, whole: Tensor, laid: Layout) -> Tensor:
    """This device's part of a tensor that every device has."""
    for axis, place in enumerate(laid):
        if place >= 0 and wire.sizes[axis] > 1:
            whole = wire.cut(whole, axis, place)
    return whole


def shadow(site: Site) -> Run:
    """Takes from the generator what the call would, without computing it. Raises Unfit where that cannot be."""
    if site.name in ("dropout", "native_dropout"):
        first, probability = site.args[0], site.argument("p")
        return lambda wire, args, kwargs: torch.dropout(_like(first, wire).fill_(1), probability, True)
    if site.name == "scaled_dot_product_attention":
        query, keys, dropped = site.argument("query"), site.argument("key").tensor, site.argument("dropout_p")
        shape = (*query.tensor.shape[:-1], keys.shape[-2])
        return lambda wire, args, kwargs: torch.dropout(
            torch.ones(shape, dtype=query.dtype, device=wire.device), dropped, True
        )
    if site.name in _ALIKE:
        first = site.args[0]
        return lambda wire, args, kwargs: site.target(_like(first, wire).fill_(0), *site.args[1:], **site.kwargs)
    if any(True for _ in operands([site.args, site.kwargs])):
        raise Unfit("it draws at random, and how much depends on what it reads")
    return lambda wire, args, kwargs: site.target(*site.args, **site.kwargs)


def _dropout(site: Site) -> Local:
    if not draws(site):
        return site.local()
    first = site.args[0]
    probability, laid = site.argument("p"), site.wanted(first)

    def run(wire: Wire, args: list[Any], kwargs: dict[str, Any]) -> Any:
        factor = keep(wire, torch.dropout(_like(first, wire).fill_(1), probability, True), laid)
        out = args[0] * factor
        return (out, factor != 0) if site.name == "native_dropout" else out

    return site.local(run)


def _alike(site: Site) -> Local:
    first = site.args[0]
    laid = site.wanted(first)
    # Only here does a draw depend on what the operand holds; no gradient flows through it.
    given = site.name == "bernoulli" and site.target is not torch.ops.aten.bernoulli.p
    gathering = passage(laid, (REPLICATED,) * len(laid), site.mesh) if given else ()

    def run(wire: Wire, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        whole = _like(first, wire)
        if given:
            whole.copy_(wire.carry(args[0].detach(), gathering))
        return keep(wire, site.target(whole, *args[1:], **kwargs), laid)

    return site.local(run)


def _like(operand: Operand, wire: Wire) -> Tensor:
    """An empty tensor as torch makes one like the whole operand: numbers are drawn in the order of memory."""
    shape, strides = operand.tensor.shape, operand.strides
    if strides is None:
        return torch.empty(shape, dtype=operand.dtype, device=wire.device)
    whole = torch.empty_strided(shape, strides, dtype=operand.dtype, device="meta")
    return torch.empty_like(whole, device=wire.device)


_ALIKE = frozenset(
    ("rand_like", "randn_like", "randint_like", "bernoulli", "uniform", "normal_functional", "exponential")
    + ("log_normal", "cauchy", "geometric", "random")
)
RULES: dict[str, Callable[[Site], Local]] = {
    **dict.fromkeys(("dropout", "native_dropout"), _dropout),
    **dict.fromkeys(_ALIKE, _alike),
}
