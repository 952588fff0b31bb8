"""Clipping by the norm over all layers, without a stop of the pipeline: the sum goes up the stages and comes back down.

    stage 0   [+ own] ----total---->      Each stage adds the squares of its layers' gradients to what the stages behind
    stage 1   [+ own] <---norm---- ...    it have, last layer first, one after the other: the same sum at every cut.

Update u is scaled by the norm of update u - delay. The delay is 0 where an update sees all earlier ones (``exact``: the
stages wait for each other then), and ceil(depth / K) in a virtual pipeline: by then the sum has made its way. Since a
delayed norm cannot know of a sudden jump, a layer's own norm limits its update too; it alone does for the first ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.engine.consistency import Consistency, Exact, VirtualPipeline
from weft.errors import TrainError
from weft.utils import foreach

NORMS = "norms"
"""The gate that counts the updates, from the first on, whose norm over all layers is known."""

SMALL = 1e-6
"""Added to a norm that something is divided by."""


@dataclass(frozen=True, slots=True)
class GlobalNorm:
    """Clip by the norm of the gradient of all layers together, as ``torch.nn.utils.clip_grad_norm_`` does."""

    limit: float

    def __str__(self) -> str:
        return f"global:{self.limit:g}"


def make_clip(given: float | str | GlobalNorm | None) -> float | GlobalNorm | None:
    """What ``clip`` means: a number for the norm of each layer, ``global:1.0`` for that of all together."""
    found: float | GlobalNorm | None = None if isinstance(given, str) else given
    if isinstance(given, str):
        word, _, number = given.partition(":")
        try:
            found = GlobalNorm(float(number)) if word == "global" else float(given)
        except ValueError:
            raise TrainError(
                f"clip='{given}': write a number for the largest norm of a layer's gradient, or global:1.0 for that of "
                "all layers together"
            ) from None
    limit = found.limit if isinstance(found, GlobalNorm) else found
    if limit is not None and not limit > 0:
        raise TrainError(f"clip={given}: the largest norm of a gradient is above 0")
    return found


def delay_of(promises: Iterable[Consistency]) -> int:
    """How many updates old the norm is that scales one; raises TrainError where layers are not updated together."""
    found = set(promises)
    delay = delay_together(found)
    if delay is None:
        raise TrainError(
            "clip='global:...' needs one consistency for all layers, exact, bounded(K, depth) or stashed: the norm is "
            f"that of one update, and here layers are updated at different times ({few(found)}). Clip each layer by "
            "its own norm, with a number"
        )
    return delay


def delay_together(promises: Iterable[Consistency]) -> int | None:
    """After how many updates all stages can know of one, without a stop of the pipeline; None where layers are not
    updated together."""
    found = set(promises)
    one = next(iter(found)) if len(found) == 1 else None
    if isinstance(one, VirtualPipeline):
        return -(-one.depth // one.every)
    return 0 if isinstance(one, Exact) else None


def span_of(promise: Consistency, m: int) -> int:
    """How many micro-batches an update has where all layers are updated together."""
    return promise.every if isinstance(promise, VirtualPipeline) else m


def few(found: set[Consistency]) -> str:
    """Some of the consistencies, for a message."""
    return ", ".join(sorted(map(str, found))[:3])


def squared(gradients: list[Tensor]) -> Tensor:
    """The square of a layer's norm, in double precision; 0 for one that is not finite, which is not applied."""
    square = foreach.norm(gradients).double().square()
    return torch.where(torch.isfinite(square), square, torch.zeros_like(square))


class GlobalNormClipper:
    """What one stage knows of the norms: its own layers' part of each update, and the totals that have come back."""

    def __init__(self, clip: GlobalNorm, delay: int, span: int, order: Iterable[str], first: bool, last: bool) -> None:
        self._limit, self.delay, self.span = clip.limit, delay, span
        self._order = list(order)[::-1]
        self._first, self._last = first, last
        self._own: dict[int, dict[str, Tensor]] = {}
        self._behind: dict[int, Tensor] = {}
        self._totals: dict[int, Tensor] = {}
        self._next = 0
        self.count = 0
        """The totals of all updates below this are known."""

    def record(self, slot: int, layer: str, gradients: list[Tensor]) -> None:
        """A layer's gradient of an update, before it is clipped."""
        own = self._own.setdefault(slot, {})
        if layer not in own:
            own[layer] = squared(gradients)

    def known(self, slot: int) -> bool:
        """Whether what scales this update is there."""
        return slot - self.delay < self.count

    def factor(self, slot: int, gradients: list[Tensor]) -> Tensor:
        """What a layer's gradient of this update is multiplied by."""
        own = self._limit / (foreach.norm(gradients).double() + SMALL)
        factor = own.clamp(max=1.0)
        if slot >= self.delay:
            factor = torch.minimum(factor, self._limit / (self._totals[slot - self.delay].sqrt() + SMALL))
        return factor.to(gradients[0].dtype)

    def received(self, kind: str, slot: int, value: Tensor) -> list[tuple[str, int, Tensor]]:
        """What the stage behind has summed up (``norm``), or a total from the stage before; what to pass on."""
        if kind == "norm":
            self._behind[slot] = value
            return []
        self._learn(slot, value)
        return [] if self._last else [("total", slot, value)]

    def advance(self, through: int) -> list[tuple[str, int, Tensor]]:
        """What goes to the stage before (``norm``) or behind (``total``), now that all micro-batches below ``through``
        are through here."""
        sent = []
        while (self._next + 1) * self.span <= through and (self._last or self._next in self._behind):
            slot, own = self._next, self._own.pop(self._next, {})
            total = self._behind.pop(slot, None)
            for layer in self._order:
                if layer in own:
                    total = own[layer] if total is None else total + own[layer]
            if total is None:
                total = torch.zeros((), dtype=torch.float64)
            self._next += 1
            if self._first:
                self._learn(slot, total)
            if not (self._first and self._last):
                sent.append(("total" if self._first else "norm", slot, total))
        return sent

    def saved(self, at: int) -> dict[str, float]:
        """For a checkpoint before micro-batch ``at``: the totals that later updates are scaled by."""
        until = at // self.span
        slots = range(max(until - self.delay, 0), until)
        return {str(slot): float(self._totals[slot]) for slot in slots}

    def restore(self, saved: Mapping[str, Any], at: int, device: torch.device) -> None:
        """Goes on from a checkpoint before micro-batch ``at``."""
        self._own.clear()
        self._behind.clear()
        self._next = self.count = at // self.span
        self._totals = {int(k): torch.tensor(v, dtype=torch.float64, device=device) for k, v in saved.items()}

    def forget(self, before: int) -> None:
        """All gradients of updates below this are there, and only the last of these may still wait to be applied."""
        for slot in [slot for slot in self._totals if slot + self.delay < before - 1]:
            del self._totals[slot]

    def _learn(self, slot: int, total: Tensor) -> None:
        self._totals[slot] = total
        self.count = slot + 1
