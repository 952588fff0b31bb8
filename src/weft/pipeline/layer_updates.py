"""The layers of one stage through their updates: gradients join their slots in order, a full slot becomes an update
when nothing stands against it, and a checkpoint reads each layer before it changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.engine.batch_stats import BatchStatsRecord
from weft.engine.grad_clip import GlobalNormClipper
from weft.engine.layer_state import capture
from weft.engine.optimizer import LayerOptimizer
from weft.engine.tied_weights import Ties
from weft.engine.train_step import TrainStep
from weft.engine.weight_versions import Offload, VersionedLayer
from weft.errors import NonFiniteError
from weft.pipeline.scheduler import LayerDependency, Scheduler
from weft.utils import foreach

LESSON = ("lesson",)
"""What the scheduler knows the outputs of a step's first micro-batch by, where the others follow them."""


@dataclass(slots=True)
class Snapshot:
    """The layers of a stage as they are before micro-batch ``at``, each taken when it is there; see rule 8."""

    at: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)


class LayerUpdates:
    """Applies the updates of some layers; ``one_copy`` says whether they must do without older versions."""

    def __init__(
        self,
        law: TrainStep,
        weights: Mapping[str, VersionedLayer],
        updater: LayerOptimizer,
        norms: GlobalNormClipper | None,
        ties: Ties | None,
        one_copy: bool,
    ) -> None:
        self.law, self.weights, self.updater, self.norms, self.ties = law, weights, updater, norms, ties
        self.one_copy = one_copy
        """Whether an update waits for the forwards that must not see it, so that no version need be kept."""
        self.memory: Offload | None = None
        """What brings layers to the device, where they do not all stay there."""
        self.forwarded = 0
        """All micro-batches below this have done their forward here."""
        self.updates = 0
        self.snapshots: list[Snapshot] = []
        self._early: dict[tuple[str, int], tuple[list[Tensor | None], BatchStatsRecord | None]] = {}
        self._keeping: dict[str, VersionedLayer] = {}
        self._postponed: dict[str, VersionedLayer] = {}
        self._unfinished: dict[str, VersionedLayer] = {}

    def hold(self, name: str, n: int, gradients: list[Tensor | None], record: BatchStatsRecord | None) -> None:
        """The gradients of micro-batch n for a layer, and its statistics, wait for their turn."""
        self._early[name, n] = (gradients, record)

    def prepare(self, needs: Iterable[LayerDependency], kind: str, oldest: int) -> None:
        """Updates that the next operation must see are applied, if they have waited so far."""
        late = []
        for need in needs:
            pending = None if need.layer is LESSON else self.weights[str(need.layer)].pending
            if pending is not None and pending.slot < (need.backward if kind == "B" else need.forward):
                late.append(self.weights[str(need.layer)])
        self._update(late, oldest)

    def settle(self, turns: Sequence[tuple[Hashable, int]], scheduler: Scheduler) -> None:
        """Gradients whose turn has come join their slots, and every slot that is full becomes an update."""
        touched: dict[str, VersionedLayer] = {}
        for layer, n in turns:
            name = str(layer)
            if layer is LESSON:
                continue
            weights = self.weights[name]
            self._capture_before(weights, n, scheduler.oldest)
            if weights.pending is not None and weights.pending.slot < weights.clock.slot(n):
                self._update([weights], scheduler.oldest)
            own = self._early.pop((name, n), None)
            if own is not None:
                weights.add(n, *own)
            touched[name] = weights  # even if this one does not count: it may be the last of its slot
        if self.norms is not None or self.ties is not None:
            # What others need of a slot is told when its last micro-batch is through, whoever used the layer.
            touched = self._unfinished | touched
            self._unfinished = {
                name: w for name, w in touched.items() if w.pending and not self._is_full(scheduler, name, w)
            }
        full = [w for name, w in touched.items() if w.pending and self._is_full(scheduler, name, w)]
        self._postponed |= {w.layer.name: w for w in full}
        self.catch_up(scheduler.oldest)
        if self.norms is not None:
            self.norms.forget(min([scheduler.oldest, *(s.at for s in self.snapshots)]) // self.norms.span)
        if self.ties is not None:
            self.ties.forget(min([scheduler.oldest, *(s.at for s in self.snapshots)]) // self.ties.span)
        for name, weights in list(self._keeping.items()):
            weights.prune(self._first_reader(weights, scheduler.oldest))
            if not weights.kept:
                del self._keeping[name]

    def catch_up(self, oldest: int) -> None:
        """Updates that are due, and need not wait any longer, are applied."""
        if self._postponed:
            self._update([w for w in self._postponed.values() if not self._awaited(w)], oldest)

    def finish(self, until: int) -> None:
        """All micro-batches below ``until`` are through: the slots that end there are applied."""
        waiting = [w for w in self.weights.values() if w.pending is not None and w.completes() < until]
        self._update(waiting, until)

    def taken(self, oldest: int) -> list[Snapshot]:
        """The snapshots that are whole now, since every earlier micro-batch is through; in order."""
        ready = [snapshot for snapshot in self.snapshots if snapshot.at <= oldest and self.knows(snapshot.at)]
        for snapshot in ready:
            for name in self.weights:
                self._capture(snapshot, name, oldest)
            if self.norms is not None:
                snapshot.norms = self.norms.saved(snapshot.at)
            if self.ties is not None:
                found = self.ties.saved(snapshot.at)
                snapshot.tensors.update({key: tensor.detach().clone() for key, tensor in found.items()})
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot not in ready]
        return ready

    def knows(self, at: int) -> bool:
        """Whether all norms of updates before a micro-batch are known here, and all gradients of tied weights."""
        normed = self.norms is None or self.norms.count >= at // self.norms.span
        return normed and (self.ties is None or self.ties.complete(at))

    def resume(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """After the layers were restored: the optimizer's state comes back too."""
        self.updater.load(states)
        self._keeping = {name: w for name, w in self.weights.items() if w.kept}
        if self.memory is not None:
            self.memory.bind_restored()
        self._unfinished = {name: w for name, w in self.weights.items() if w.pending is not None}

    def _is_full(self, scheduler: Scheduler, name: str, weights: VersionedLayer) -> bool:
        assert weights.pending is not None
        return scheduler.complete(name, weights.pending.slot, weights.completes())

    def _update(self, group: Sequence[VersionedLayer], oldest: int) -> None:
        by_rate: dict[float, list[VersionedLayer]] = {}
        for weights in group:
            self._postponed.pop(weights.layer.name, None)
            self._capture_before(weights, weights.completes(), oldest)
            by_rate.setdefault(self.law.rate(weights.clock, weights.completes()), []).append(weights)
        for rate, members in by_rate.items():
            self._apply(members, rate, partial(self._first_reader, oldest=oldest))
            self._keeping |= {weights.layer.name: weights for weights in members if weights.kept}
            self.updates += len(members)

    def _apply(self, members: Sequence[VersionedLayer], rate: float, readers: Callable[[VersionedLayer], int]) -> None:
        def apply(some: Sequence[VersionedLayer]) -> None:
            self.law.apply(some, rate, readers, self.updater, self.norms, self.ties)

        if self.memory is None:
            apply(members)
        else:
            self.memory.apply_updates(members, apply)

    def _awaited(self, weights: VersionedLayer) -> bool:
        """Whether an update that is due must wait: for its norm, for the gradient of a tied parameter's other copy, or
        for a forward that must not see it."""
        if self.norms is not None:
            self.norms.record(weights.slot, weights.layer.name, weights.mean())
        if self.ties is not None:
            self.ties.record(weights)
        if self.norms is not None and not self.norms.known(weights.slot):
            return True
        if self.ties is not None and not self.ties.known(weights):
            return True
        return self.one_copy and self.forwarded <= weights.clock.last_reader(weights.slot)

    def _first_reader(self, weights: VersionedLayer, oldest: int) -> int:
        """The first micro-batch that may still read an older version: the oldest that is not through, or without its
        forward where backwards do not read any; or that with which a run would go on from a checkpoint that is not
        whole yet."""
        first = max(self.forwarded, oldest) if weights.clock.moves_on else oldest
        return min([first, *(snapshot.at for snapshot in self.snapshots)])

    def _capture_before(self, weights: VersionedLayer, n: int, oldest: int) -> None:
        """A checkpoint reads the layer before micro-batch n, or an update that holds it, changes anything."""
        for snapshot in self.snapshots:
            if snapshot.at <= n:
                self._capture(snapshot, weights.layer.name, oldest)

    def _capture(self, snapshot: Snapshot, name: str, oldest: int) -> None:
        if name in snapshot.layers:
            return
        weights = self.weights[name]
        if weights.pending is not None and weights.completes() < snapshot.at:
            self._update([weights], oldest)
        weights.readable()
        if weights.parameters and not bool(torch.isfinite(foreach.norm(list(weights.parameters)))):
            raise NonFiniteError(
                f"the weights of layer '{name}' are not finite before step {snapshot.at // self.law.microbatches}, "
                "so no checkpoint is written. Try a lower learning rate or clipping"
            )
        found, snapshot.layers[name] = capture(weights, self.updater, snapshot.at)
        snapshot.tensors.update({key: tensor.detach().clone() for key, tensor in found.items()})
