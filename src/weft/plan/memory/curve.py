"""How a tape goes with the batch size: polynomials through the tapes of a few batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.errors import PlanError
from weft.plan.memory.kernels import Kernels
from weft.plan.memory.sketch import combined
from weft.plan.memory.tape import Tape
from weft.plan.memory.workspaces import SLOTS, workspaces


@dataclass(frozen=True, slots=True)
class Curve:
    """Blocks of tapes with the same blocks in the same order, by batch: through two each size is a straight line in the
    batch size, through three a parabola. Workspaces follow their rules from shapes that are such curves."""

    tapes: Mapping[int, Tape]
    kernels: Kernels

    def __post_init__(self) -> None:
        (batch, first), *others = self.tapes.items()
        for other, tape in others:
            alike = [call.name for call in first.calls] == [call.name for call in tape.calls]
            if first.order != tape.order or not alike:
                raise PlanError(
                    f"steps with batches of {batch} and {other} allocate in a different order "
                    f"({len(first)} and {len(tape)} blocks): estimate each batch by itself"
                )

    def at(self, batch: int) -> Tape:
        given, tapes = shares(tuple(self.tapes), batch), list(self.tapes.values())
        sizes = [combined(each, *given) for each in zip(*(tape.sizes for tape in tapes), strict=True)]
        for calls in zip(*(tape.calls for tape in tapes), strict=True):
            args, result = combined([(call.args, call.result) for call in calls], *given)
            begin = calls[0].block
            sizes[begin : begin + SLOTS] = workspaces(calls[0].name, args, result, self.kernels)
        return replace(tapes[0], sizes=tuple(sizes))

    def meets(self, batch: int, traced: Tape) -> bool:
        """Whether a trace with this batch, which may have the first step alone, gives the blocks that lie on it."""
        here = self.at(batch)
        made = max(place for place, event in enumerate(traced.order) if event >= 0) + 1
        return here.order[:made] == traced.order[:made] and here.sizes[: len(traced)] == traced.sizes


def shares(batches: Sequence[int], batch: int) -> tuple[list[int], int]:
    """By how much each of some values at these batches counts at another, and what that is a share of: whole numbers,
    so that a polynomial through the values has no error.

    >>> shares((2, 4), 7)
    ([-3, 5], 2)
    """
    above = [math.prod(batch - other for other in batches if other != one) for one in batches]
    below = [math.prod(one - other for other in batches if other != one) for one in batches]
    whole = math.lcm(*below)
    return [up * (whole // down) for up, down in zip(above, below, strict=True)], whole
