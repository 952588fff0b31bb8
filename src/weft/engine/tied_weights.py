"""Tied weights in training: every layer has its own copy, and both copies get the sum of the two gradients.

    stage 0   [tokens]  ----first---->            The mean gradient of a finished slot goes to the stage of the other
    stage 1   [ ... ]                             copy, from stage to stage, and both stages add up first + second: the
    stage 2   [ head ]  <---second----            same sum, so the copies stay equal to the bit.

Update u uses the sum of update u - delay. The delay is that of a norm over all layers: 0 where an update sees all
earlier ones (``exact``: the stages wait for each other then), and ceil(depth / K) in a virtual pipeline. In the first
``delay`` updates the tied parameters are not touched, without decay, momentum or count, and the sums of a run's last
ones are dropped. A tied parameter is clipped, and skipped where its sum is not finite, as a layer of its own; a norm
over all layers counts the gradients of both copies, as if they were not tied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from weft.engine.consistency import Consistency
from weft.engine.grad_clip import delay_together, few, span_of
from weft.engine.weight_versions import VersionedLayer
from weft.errors import TrainError
from weft.supernet import Chain, Tie

TIES = "ties"
"""The gate that counts the updates, from the first on, whose sums are known on a stage."""

MARK = "~"
"""In a checkpoint, before the slot of a sum."""

Sent = list[tuple[int, int, Tensor | None]]
"""What goes to which stage: (stage, number, gradient), where no gradient says that the slot has none."""


def check_ties(chain: Chain, promises: Iterable[Consistency]) -> None:
    """Raises TrainError where the layers of a chain with tied weights are not updated together."""
    if chain.ties:
        _delay(chain.ties, promises)


def ties_of(
    chain: Chain, promises: Iterable[Consistency], m: int, of: Sequence[int] = (), index: int = 0
) -> Ties | None:
    """What a stage needs for the ties of a chain, if it has to do with any; ``of`` gives the stage of every block."""
    if not chain.ties:
        return None
    promises = list(promises)
    stage = {name: of[layer.block] if of else 0 for name, layer in chain.layers.items()}
    found = Ties(chain.ties, _delay(chain.ties, promises), span_of(promises[0], m), stage, index)
    return found if found.concerned else None


class Ties:
    """What one stage knows of tied parameters: its own gradients of each update, and the sums with the others'."""

    def __init__(self, ties: Sequence[Tie], delay: int, span: int, stage: Mapping[str, int], index: int) -> None:
        self._ties, self.delay, self.span, self._index = ties, delay, span, index
        self._stages = [(stage[tie.first.layer], stage[tie.second.layer]) for tie in ties]
        ends = product(range(len(ties)), range(2))
        self._ends = [(tie, end) for tie, end in ends if self._stages[tie][end] == index]
        """The copies that are here, as (number of the tie, 0 for its first and 1 for its second)."""
        self.layers = {ties[tie][end].layer for tie, end in self._ends}
        self._own: dict[tuple[int, int, int], Tensor] = {}
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
        """Whether all that goes to or through this stage for updates before a micro-batch has been here."""
        return all(count >= at // self.span for count in (*self._counts.values(), *self._passed.values()))

    def record(self, weights: VersionedLayer) -> None:
        """The gradient of a layer's finished slot, before it is clipped."""
        for tie, end, place in self._of(weights):
            key = (tie, end, weights.slot)
            if key not in self._own and weights.slot >= self._next:
                self._own[key] = weights.mean()[place].clone()

    def known(self, weights: VersionedLayer) -> bool:
        """Whether the sums that the update of a layer's finished slot uses are there."""
        return all(weights.slot - self.delay < self._counts[tie] for tie, _, _ in self._of(weights))

    def sums(self, weights: VersionedLayer) -> dict[int, Tensor | None]:
        """For the update of a layer's finished slot, by the place of a tied parameter among the layer's: the sum that
        it uses; None where the parameter is not to be touched."""
        at = weights.slot - self.delay
        return {place: self._sums[tie, at] if at >= 0 else None for tie, _, place in self._of(weights)}

    def advance(self, through: int) -> Sent:
        """What goes to other stages, now that all micro-batches below ``through`` are through here."""
        sent: Sent = []
        while self._ends and (self._next + 1) * self.span <= through:
            for tie, end in self._ends:
                own = self._own.pop((tie, end, self._next), None)
                self._put(tie, end, self._next, own)
                sent += self._towards(tie, end, self._next, own)
            self._next += 1
        return sent

    def received(self, number: int, gradient: Tensor | None) -> Sent:
        """A gradient from another stage; what to pass on."""
        slot, rest = divmod(number, 2 * len(self._ties))
        tie, end = divmod(rest, 2)
        if self._stages[tie][1 - end] == self._index:
            self._put(tie, end, slot, gradient)
            return []
        self._passed[tie, end] = slot + 1
        return self._towards(tie, end, slot, gradient)

    def saved(self, at: int) -> dict[str, Tensor]:
        """For a checkpoint before micro-batch ``at``: the sums that later updates use, in the part of every layer."""
        until = at // self.span
        found = {}
        for (tie, end), slot in product(self._ends, range(max(until - self.delay, 0), until)):
            total = self._sums[tie, slot]
            if total is not None:
                found[f"{self._ties[tie][end]}{MARK}{slot}"] = total
        return found

    def restore(self, tensors: Mapping[str, Tensor], at: int, device: torch.device) -> None:
        """Goes on from a checkpoint before micro-batch ``at``."""
        until = at // self.span
        self._own.clear()
        self._halves.clear()
        self._sums.clear()
        self._next = until
        self._counts = dict.fromkeys(self._counts, until)
        self._passed = dict.fromkeys(self._passed, until)
        for (tie, end), slot in product(self._ends, range(max(until - self.delay, 0), until)):
            total = tensors.get(f"{self._ties[tie][end]}{MARK}{slot}")
            self._sums[tie, slot] = None if total is None else total.to(device, copy=True)

    def forget(self, before: int) -> None:
        """All gradients of updates below this are there, and only the last of these may still wait to be applied."""
        for key in [key for key in self._sums if key[1] + self.delay < before - 1]:
            del self._sums[key]

    def _of(self, weights: VersionedLayer) -> list[tuple[int, int, int]]:
        """The tied parameters of a layer: tie, end, and place among the layer's parameters."""
        name = weights.layer.name
        if name not in self.layers:
            return []
        found = []
        for tie, end in self._ends:
            layer, path = self._ties[tie][end]
            if layer == name:
                if path not in weights.names:
                    raise TrainError(
                        f"'{layer}.{path}' is tied, but not trained: tie parameters that require gradients"
                    )
                found.append((tie, end, weights.names.index(path)))
        return found

    def _put(self, tie: int, end: int, slot: int, gradient: Tensor | None) -> None:
        halves = self._halves.setdefault((tie, slot), {})
        halves[end] = gradient
        if len(halves) == 2:
            del self._halves[tie, slot]
            first, second = halves[0], halves[1]
            # A slot in which no micro-batch counted is one on every stage.
            self._sums[tie, slot] = None if first is None or second is None else first + second
            self._counts[tie] = slot + 1

    def _towards(self, tie: int, end: int, slot: int, gradient: Tensor | None) -> Sent:
        target = self._stages[tie][1 - end]
        if target == self._index:
            return []
        return [(self._index + (1 if target > self._index else -1), (slot * len(self._ties) + tie) * 2 + end, gradient)]


def _delay(ties: Sequence[Tie], promises: Iterable[Consistency]) -> int:
    found = set(promises)
    delay = delay_together(found)
    if delay is None:
        raise TrainError(
            f"'{ties[0].first}' and '{ties[0].second}' are tied, which needs one consistency for all layers, exact, "
            "bounded(K, depth) or stashed: their gradients are those of one update, and here layers are "
            f"updated at different times ({few(found)}). Untie them, or give all layers one of these"
        )
    return delay
