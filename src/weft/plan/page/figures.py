"""Bars of a plan: the memory of each stage's devices against the limit, and the seconds of each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.page.bars import Bar, Part, bars, key
from weft.plan.page.boxes import Boxes
from weft.plan.page.groups import Group
from weft.plan.page.prices import Prices
from weft.plan.page.words import devices_of, seconds
from weft.plan.plan import Plan
from weft.units import size

_LITTLE = 0.005  # layers that take a smaller part of a step are told together


def memory(plan: Plan, prices: Prices | None) -> str:
    """A bar for the devices of each stage; for the fullest alone where no more is known."""
    rows = stage_memory(plan, prices)
    totals = {label: sum(parts.values()) for label, parts in rows.items()}
    limit = plan.limit if math.isfinite(plan.limit) else None
    found = [
        Bar(
            label,
            [Part(name, value, size(value)) for name, value in parts.items()],
            size(totals[label]) + (f" of {size(limit)}, {totals[label] / limit:.0%}" if limit else ""),
        )
        for label, parts in rows.items()
    ]
    more = "" if limit else "<p>There is no limit.</p>"
    names = list(next(iter(rows.values())))
    return key(names) + bars(found, max(*totals.values(), limit or 0.0), limit) + more


def stage_memory(plan: Plan, prices: Prices | None) -> dict[str, dict[str, float]]:
    """Bytes of each device by what they are for: by the devices of each stage, or of the fullest alone where no more is
    known."""
    if prices is None:
        known = {"parameters with gradients and states": plan.cost.parameters, "activations": plan.cost.activations}
        return {"fullest device": known}
    names = ("weights", "gradients and states", "activations")
    return {
        devices_of(plan, stage): dict(zip(names, prices.stage_memory(plan, stage), strict=True))
        for stage in range(plan.stages)
    }


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of a step, of so many layers together."""

    title: str
    times: int
    compute: float
    communication: float

    @property
    def total(self) -> float:
        return self.compute + self.communication


def costs(plan: Plan, boxes: Boxes, groups: Sequence[Group], prices: Prices) -> str:
    """A bar for each layer, with all that are folded into it, in the order they run in."""
    large = large_costs(layer_costs(plan, boxes, groups, prices))
    total = math.fsum(row.total for row in large)
    found = []
    for row in large:
        parts = [
            Part("computing", row.compute, seconds(row.compute)),
            Part("communicating", row.communication, seconds(row.communication)),
        ]
        each = f"{row.times} x {seconds(row.total / row.times)} = " if row.times > 1 else ""
        share = row.total / total if total else 0.0
        found.append(Bar(row.title, parts, f"{each}{seconds(row.total)}, {share:.0%}"))
    longest = max((row.total for row in large), default=0.0)
    return key(("computing", "communicating")) + bars(found, longest)


def large_costs(rows: Sequence[LayerCost]) -> list[LayerCost]:
    """The same, with those that take little of a step told together."""
    total = math.fsum(row.total for row in rows)
    large = [row for row in rows if row.total >= _LITTLE * total]
    if little := [row for row in rows if row.total < _LITTLE * total]:
        sums = math.fsum(row.compute for row in little), math.fsum(row.communication for row in little)
        large.append(LayerCost(f"{len(little)} more", 1, *sums))
    return large


def layer_costs(plan: Plan, boxes: Boxes, groups: Sequence[Group], prices: Prices) -> list[LayerCost]:
    """The seconds of each group, and of what belongs to none: together those of all stages."""
    of = {place: number for number, group in enumerate(groups) for copy in group.copies for place in copy}
    compute, moving = [0.0] * len(groups), [0.0] * len(groups)
    rest = 0.0  # parameters that nothing reads are updated all the same
    for place, owner in enumerate(boxes.owner):
        if owner is None:
            rest += prices.compute[place]
            continue
        compute[of[owner]] += prices.compute[place]
        moving[of[owner]] += prices.communication[place]
    rows = []
    for number, group in enumerate(groups):
        title = group.title + (f", stage {group.stage + 1}" if plan.stages > 1 else "")
        rows.append(LayerCost(title, group.times, compute[number], moving[number]))
    # Where kernels are short, devices wait for the host that starts them.
    waiting = plan.cost.compute * plan.stages - math.fsum(compute) - rest
    if waiting > 1e-9 * plan.cost.compute:
        rows.append(LayerCost("waiting for the host", 1, waiting, 0.0))
    sent = plan.cost.communication * plan.stages - math.fsum(moving)
    if plan.stages > 1 and sent > 0:
        rows.append(LayerCost("sent between stages", 1, 0.0, sent))
    if rest > 0:
        rows.append(LayerCost("read by nothing", 1, rest, 0.0))
    return rows
