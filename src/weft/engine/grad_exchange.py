"""What the stages of a pipeline exchange about an update: norms over all layers, and gradients of tied weights.

**Clipping by the norm over all layers.** The sum of squares goes up the stages and the total comes back down:

    stage 0   [+ own] ----total---->      Each stage adds the squares of its layers' gradients to the sum of the stages
    stage 1   [+ own] <---norm---- ...    behind it, last layer first, one after the other: the same sum at every cut.

**Tied weights.** Every layer has its own copy, and both copies get the sum of the two gradients:

    stage 0   [tokens]  ----first---->    The mean gradient of a finished slot goes to the stage of the other copy, from
    stage 1   [ ... ]                     stage to stage, and both stages add up first + second: the same sum, so the
    stage 2   [ head ]  <---second----    copies stay equal to the bit.

Update u uses the norm and the sums of update u - delay, so the pipeline never stops for them. The delay is 0 where an
update sees all earlier ones (``exact``: the stages wait for each other then), and ceil(depth / K) in a virtual
pipeline, which is the time that a sum needs on its way.

A delayed norm cannot know of a sudden jump, so a layer's own norm limits its update too; alone in the first updates.
In the first ``delay`` updates tied parameters are not touched (no decay, momentum or count), and the sums of a run's
last ones are dropped. A tied parameter is clipped, and skipped where its sum is not finite, as a layer of its own; a
norm over all layers counts the gradients of both copies, as if they were not tied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from weft.engine.consistency import Consistency, Exact, VirtualPipeline
from weft.engine.layer_state import CheckpointPart
from weft.engine.optimizer import GlobalNorm
from weft.engine.weight_versions import VersionedLayer
from weft.errors import TrainError
from weft.supernet import Chain, Tie
from weft.utils import foreach

SMALL = 1e-6
"""Added to a norm that something is divided by."""

MARK = "~"
"""In a checkpoint, before the slot of a sum."""


def delay_of(
    consistencies: Iterable[Consistency],
    what: str = "clip='global:...'",
    remedy: str = "clip each layer by its own norm, with a number",
) -> int:
    """After how many updates all stages know the sums of one. Raises TrainError where layers are not updated together:
    it names ``what`` needs that, and a ``remedy``."""
    distinct = set(consistencies)
    one = next(iter(distinct)) if len(distinct) == 1 else None
    if isinstance(one, VirtualPipeline):
        return -(-one.depth // one.every)
    if not isinstance(one, Exact):
        raise TrainError(
            f"{what} needs one consistency for all layers, exact, bounded(K, depth) or stashed, since all stages share "
            "sums of one update; here layers are updated at different times "
            f"({', '.join(sorted(map(str, distinct))[:3])}): {remedy}"
        )
    return 0


def span_of(consistency: Consistency, m: int) -> int:
    """How many micro-batches an update has where all layers are updated together."""
    return consistency.every if isinstance(consistency, VirtualPipeline) else m


class SharedSum(NamedTuple):
    """What a stage sends to another one: ``kind`` and ``number`` are those of its message."""

    to: int
    kind: Literal["norm", "total", "tie"]
    number: int
    value: Tensor | None


def used_after(at: int, delay: int, span: int) -> range:
    """The updates whose sums are used by updates from micro-batch ``at`` on."""
    until = at // span
    return range(max(until - delay, 0), until)


class GlobalNormClipper:
    """The norms on one stage: the part of its layers in each update, and the totals that have come back.

    This and ``Ties`` have one interface. A layer's finished slot is recorded before it is clipped, ``advance`` and
    ``received`` give what goes to other stages, and operations wait for the ``counter`` of the updates whose sums are
    ``known``, where this stage uses them.
    """

    counter, kinds, awaited = "norms", ("norm", "total"), True

    def __init__(
        self, clip: GlobalNorm, delay: int, span: int, order: Iterable[str], index: int, is_last: bool
    ) -> None:
        self._limit, self.delay, self.span, self._index = clip.limit, delay, span, index
        self._order = list(order)[::-1]
        self._is_last = is_last
        self._local: dict[int, dict[str, Tensor]] = {}
        self._from_behind: dict[int, Tensor] = {}
        self._totals: dict[int, Tensor] = {}
        self._next = 0
        self.count = 0
        """The totals of all updates below this are known."""

    def complete(self, at: int) -> bool:
        """Whether all sums of updates before a micro-batch are known here and passed on."""
        return self.count >= at // self.span

    def record(self, weights: VersionedLayer) -> None:
        local = self._local.setdefault(weights.slot, {})
        if weights.layer.name not in local:
            square = foreach.norm(weights.mean_gradients()).double().square()
            # A layer whose norm is not finite is not updated.
            local[weights.layer.name] = torch.where(torch.isfinite(square), square, torch.zeros_like(square))

    def known(self, weights: VersionedLayer) -> bool:
        """Whether the sum that the update of a layer's finished slot uses is there."""
        return weights.slot - self.delay < self.count

    def factor(self, slot: int, gradients: list[Tensor]) -> Tensor:
        """What a layer's gradient of this update is multiplied by."""
        local = self._limit / (foreach.norm(gradients).double() + SMALL)
        factor = local.clamp(max=1.0)
        if slot >= self.delay:
            factor = torch.minimum(factor, self._limit / (self._totals[slot - self.delay].sqrt() + SMALL))
        return factor.to(gradients[0].dtype)

    def received(self, kind: str, number: int, value: Tensor | None) -> list[SharedSum]:
        assert value is not None
        if kind == "norm":
            self._from_behind[number] = value
            return []
        return self._add_total(number, value)

    def advance(self, through: int) -> list[SharedSum]:
        """What to send, now that all micro-batches below ``through`` are done here."""
        sent = []
        while (self._next + 1) * self.span <= through and (self._is_last or self._next in self._from_behind):
            slot, local = self._next, self._local.pop(self._next, {})
            total = self._from_behind.pop(slot, None)
            for layer in self._order:
                if layer in local:
                    total = local[layer] if total is None else total + local[layer]
            if total is None:
                total = torch.zeros((), dtype=torch.float64)
            self._next += 1
            sent += [SharedSum(self._index - 1, "norm", slot, total)] if self._index else self._add_total(slot, total)
        return sent

    def save(self, part: CheckpointPart) -> None:
        part.norms = {str(slot): float(self._totals[slot]) for slot in used_after(part.at, self.delay, self.span)}

    def restore(self, part: CheckpointPart, device: torch.device) -> None:
        self._local.clear()
        self._from_behind.clear()
        self._next = self.count = part.at // self.span
        self._totals = {int(k): torch.tensor(v, dtype=torch.float64, device=device) for k, v in part.norms.items()}

    def forget(self, before: int) -> None:
        """Drops the sums that no update from micro-batch ``before`` on uses."""
        for slot in [slot for slot in self._totals if slot + self.delay < before // self.span - 1]:
            del self._totals[slot]

    def _add_total(self, slot: int, total: Tensor) -> list[SharedSum]:
        self._totals[slot] = total
        self.count = slot + 1
        return [] if self._is_last else [SharedSum(self._index + 1, "total", slot, total)]


def check_ties(chain: Chain, consistencies: Iterable[Consistency]) -> int:
    """The delay of a chain's tied weights; raises TrainError where their layers are not updated together."""
    if not chain.ties:
        return 0
    first, second = chain.ties[0]
    tied = f"'{first}' and '{second}' are tied, which"
    return delay_of(consistencies, tied, "untie them, or give all layers one of these")


def ties_of(
    chain: Chain, consistencies: Iterable[Consistency], m: int, of: Sequence[int] = (), index: int = 0
) -> Ties | None:
    """The ties of a chain that concern a stage; None where none does. ``of`` gives the stage of every block."""
    if not chain.ties:
        return None
    consistencies = list(consistencies)
    stage = {name: of[layer.block] if of else 0 for name, layer in chain.layers.items()}
    ties = Ties(chain.ties, check_ties(chain, consistencies), span_of(consistencies[0], m), stage, index)
    return ties if ties.concerned else None


class Ties:
    """Tied parameters on one stage: their gradients in each update, and the sums of both copies."""

    counter, kinds = "ties", ("tie",)

    def __init__(self, ties: Sequence[Tie], delay: int, span: int, stage: Mapping[str, int], index: int) -> None:
        self._ties, self.delay, self.span, self._index = ties, delay, span, index
        self._stages = [(stage[tie.first.layer], stage[tie.second.layer]) for tie in ties]
        ends = product(range(len(ties)), range(2))
        self._ends = [(tie, end) for tie, end in ends if self._stages[tie][end] == index]
        """The copies that are here, as (number of the tie, 0 for its first and 1 for its second)."""
        self.awaited = bool(self._ends)
        self.layers = {ties[tie][end].layer for tie, end in self._ends}
        self._local: dict[tuple[int, int, int], Tensor] = {}
        self._halves: dict[tuple[int, int], dict[int, Tensor | None]] = {}
        self._sums: dict[tuple[int, int], Tensor | None] = {}
        self._next = 0
        self._counts = {tie: 0 for tie, _ in self._ends}
        between = [tie for tie, pair in enumerate(self._stages) if min(pair) < index < max(pair)]
        self._passed = {(tie, end): 0 for tie in between for end in range(2)}

    @property
    def concerned(self) -> bool:
        """Whether the stage has a copy, or passes gradients on."""
        return bool(self._ends or self._passed)

    @property
    def count(self) -> int:
        """The sums of all updates below this are known here."""
        return min(self._counts.values(), default=0)

    def complete(self, at: int) -> bool:
        return all(count >= at // self.span for count in (*self._counts.values(), *self._passed.values()))

    def record(self, weights: VersionedLayer) -> None:
        for tie, end, place in self._of(weights):
            key = (tie, end, weights.slot)
            if key not in self._local and weights.slot >= self._next:
                self._local[key] = weights.mean_gradients()[place].clone()

    def known(self, weights: VersionedLayer) -> bool:
        return all(weights.slot - self.delay < self._counts[tie] for tie, _, _ in self._of(weights))

    def sums(self, weights: VersionedLayer) -> dict[int, Tensor | None]:
        """For the update of a layer's finished slot, by the place of a tied parameter among the layer's: the sum that
        it uses; None where the parameter is not to be touched."""
        at = weights.slot - self.delay
        return {place: self._sums[tie, at] if at >= 0 else None for tie, _, place in self._of(weights)}

    def advance(self, through: int) -> list[SharedSum]:
        sent: list[SharedSum] = []
        while self._ends and (self._next + 1) * self.span <= through:
            for tie, end in self._ends:
                local = self._local.pop((tie, end, self._next), None)
                self._put(tie, end, self._next, local)
                sent += self._towards(tie, end, self._next, local)
            self._next += 1
        return sent

    def received(self, kind: str, number: int, value: Tensor | None) -> list[SharedSum]:
        slot, rest = divmod(number, 2 * len(self._ties))
        tie, end = divmod(rest, 2)
        if self._stages[tie][1 - end] == self._index:
            self._put(tie, end, slot, value)
            return []
        self._passed[tie, end] = slot + 1
        return self._towards(tie, end, slot, value)

    def save(self, part: CheckpointPart) -> None:
        for (tie, end), slot in product(self._ends, used_after(part.at, self.delay, self.span)):
            total = self._sums[tie, slot]
            if total is not None:
                part.tensors[self._name(tie, end, slot)] = total.detach().clone()

    def restore(self, part: CheckpointPart, device: torch.device) -> None:
        self._local.clear()
        self._halves.clear()
        self._next = part.at // self.span
        self._counts = dict.fromkeys(self._counts, self._next)
        self._passed = dict.fromkeys(self._passed, self._next)
        self._sums = {}
        for (tie, end), slot in product(self._ends, used_after(part.at, self.delay, self.span)):
            total = part.tensors.get(self._name(tie, end, slot))
            self._sums[tie, slot] = None if total is None else total.to(device, copy=True)

    def forget(self, before: int) -> None:
        for key in [key for key in self._sums if key[1] + self.delay < before // self.span - 1]:
            del self._sums[key]

    def _name(self, tie: int, end: int, slot: int) -> str:
        """In a checkpoint, within the part of the copy's layer."""
        return f"{self._ties[tie][end]}{MARK}{slot}"

    def _of(self, weights: VersionedLayer) -> list[tuple[int, int, int]]:
        """The tied parameters of a layer: tie, end, and place among the layer's parameters."""
        name = weights.layer.name
        if name not in self.layers:
            return []
        places = []
        for tie, end in self._ends:
            layer, path = self._ties[tie][end]
            if layer == name:
                if path not in weights.names:
                    raise TrainError(
                        f"'{layer}.{path}' is tied, but not trained: tie parameters that require gradients"
                    )
                places.append((tie, end, weights.names.index(path)))
        return places

    def _put(self, tie: int, end: int, slot: int, gradient: Tensor | None) -> None:
        halves = self._halves.setdefault((tie, slot), {})
        halves[end] = gradient
        if len(halves) == 2:
            del self._halves[tie, slot]
            first, second = halves[0], halves[1]
            # A slot in which no micro-batch counted is one on every stage.
            self._sums[tie, slot] = None if first is None or second is None else first + second
            self._counts[tie] = slot + 1

    def _towards(self, tie: int, end: int, slot: int, gradient: Tensor | None) -> list[SharedSum]:
        target = self._stages[tie][1 - end]
        if target == self._index:
            return []
        to = self._index + (1 if target > self._index else -1)
        return [SharedSum(to, "tie", (slot * len(self._ties) + tie) * 2 + end, gradient)]


Sums = GlobalNormClipper | Ties
