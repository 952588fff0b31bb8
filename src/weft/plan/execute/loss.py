"""Means over parts: each device gives its share of the mean over all, so that the shares add up to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.plan.execute.site import Local, Site, Unfit, called
from weft.plan.execute.wire import Wire

_MEAN, _SUM = 1, 2


def mean(site: Site) -> Local:
    """A mean over elements: parts are equal, so their means count alike."""
    if site.has("reduction") and site.argument("reduction") != _MEAN:
        return site.local()
    run, share = called(site.target), 1 / site.summands()
    if share == 1:
        return site.local()
    return site.local(lambda wire, args, kwargs: run(wire, args, kwargs) * share)


def _classified(site: Site) -> Local:
    """A mean over labels that count: a part may hold more of them than another, or weightier ones."""
    reduction, axes = site.argument("reduction"), site.summed()
    labels = site.argument("target")
    if reduction != _MEAN or not axes or labels.dtype.is_floating_point:
        return mean(site)
    if site.name.endswith("_forward") and 1 in site.used:
        raise Unfit("the total weight of its labels is read")
    at = {name: site.index(name) for name in ("target", "weight", "ignore_index")}
    run = called(site.target)

    def shared(wire: Wire, args: list[Any], kwargs: dict[str, Any]) -> Any:
        weight = _weight(args[at["target"]], args[at["weight"]], args[at["ignore_index"]])
        total = run(wire, args, kwargs)
        every = wire.total(weight, axes)
        first = total[0] if isinstance(total, tuple) else total
        share = (first / every).to(first.dtype)
        return (share, None) if isinstance(total, tuple) else share

    return site.local(shared, whole=frozenset({1}), reduction=_SUM)


def _weight(labels: Tensor, classes: Tensor | None, ignored: int) -> Tensor:
    """What the labels of this part count together."""
    counts = labels != ignored
    if classes is None:
        return counts.sum().float()
    return (classes[labels.where(counts, 0)] * counts).sum()


RULES: dict[str, Callable[[Site], Local]] = {
    "mean": mean,
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"), _classified),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _classified),
}
