"""The updates of one stage's layers: gradients join their slots in order, a full slot becomes an update once nothing
has to wait for it, and a checkpoint reads each layer before it changes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from weft.engine.batch_stats import BatchStatsRecord
from weft.engine.layer_state import CheckpointPart
from weft.engine.train_step import TrainedLayers, TrainStep
from weft.engine.weight_versions import VersionedLayer
from weft.pipeline.scheduler import LayerDependency, Scheduler
from weft.pipeline.workload import single_copy
from weft.supernet import Chain
from weft.supernet.partition import Cut, stage_of

TEACHER = ("teacher",)
"""The name, for the scheduler, of the outputs of a step's first micro-batch, where the others learn from them."""


class LayerUpdates(TrainedLayers):
    """The layers of one stage, whose gradients come in any order."""

    def __init__(self, chain: Chain, config: TrainStep, device: torch.device, cut: Cut, index: int) -> None:
        blocks = len(chain.blocks)
        super().__init__(chain, config, device, stage_of(cut, blocks), index)
        self.one_copy = single_copy(config.consistency.values(), cut, blocks)
        """Whether an update waits for the forwards that must not read it, so that no older version is kept."""
        self.forwarded = 0
        """All micro-batches below this have done their forward here."""
        self.snapshots: list[CheckpointPart] = []
        """Parts of checkpoints that are not complete yet, in order."""
        self._stashed: dict[tuple[str, int], tuple[list[Tensor | None], BatchStatsRecord | None]] = {}
        self._ready: dict[str, VersionedLayer] = {}
        """Layers with a full slot that has to wait."""

    def stash(self, name: str, n: int, gradients: list[Tensor | None], record: BatchStatsRecord | None) -> None:
        """Keeps the gradients of micro-batch n for a layer, and its statistics, until their turn."""
        self._stashed[name, n] = (gradients, record)

    def apply_due(self, dependencies: Iterable[LayerDependency], kind: str, oldest: int) -> None:
        """Applies updates that have waited so far and that the next operation must read."""
        due = []
        for dependency in dependencies:
            pending = None if dependency.layer is TEACHER else self.weights[str(dependency.layer)].pending
            if pending is not None and pending.slot < (dependency.backward if kind == "B" else dependency.forward):
                due.append(self.weights[str(dependency.layer)])
        self._update(due, oldest)

    def commit(self, turns: Sequence[tuple[Hashable, int]], scheduler: Scheduler) -> None:
        """Adds gradients whose turn has come to their slots, and applies the updates of full slots."""
        touched: dict[str, VersionedLayer] = {}
        for layer, n in turns:
            name = str(layer)
            if layer is TEACHER:
                continue
            weights = self.weights[name]
            self._capture_before(weights, n, scheduler.oldest)
            if weights.pending is not None and weights.pending.slot < weights.schedule.slot(n):
                self._update([weights], scheduler.oldest)
            stashed = self._stashed.pop((name, n), None)
            if stashed is not None:
                weights.add(n, *stashed)
            touched[name] = weights  # even if this one does not count: it may be the last of its slot
        if self.sums:
            # Other stages get their share of a slot once its last micro-batch is done, even one without the layer.
            touched = self._unfinished | touched
            self._unfinished = {
                name: w for name, w in touched.items() if w.pending and not self._is_full(scheduler, name, w)
            }
        full = [w for name, w in touched.items() if w.pending and self._is_full(scheduler, name, w)]
        self._ready |= {w.layer.name: w for w in full}
        self.apply_ready(scheduler.oldest)
        for sums in self.sums:
            sums.forget(min([scheduler.oldest, *(snapshot.at for snapshot in self.snapshots)]))
        self.prune(lambda weights: self._first_reader(weights, scheduler.oldest))

    def apply_ready(self, oldest: int) -> None:
        """Applies updates that are due and need not wait any longer."""
        if self._ready:
            self._update([w for w in self._ready.values() if not self._must_wait(w)], oldest)

    def finish(self, until: int) -> None:
        """Applies the slots that end before ``until``: all micro-batches below are done."""
        self._update([w for w in self.weights.values() if w.pending is not None and w.last_microbatch() < until], until)

    def ready_snapshots(self, oldest: int) -> list[CheckpointPart]:
        """The parts of checkpoints that are complete now, since every earlier micro-batch is done; in order."""
        ready = [snapshot for snapshot in self.snapshots if snapshot.at <= oldest and self.has_sums(snapshot.at)]
        for snapshot in ready:
            for name in self.weights:
                self._capture(snapshot, name, oldest)
            for sums in self.sums:
                sums.save(snapshot)
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot not in ready]
        return ready

    def has_sums(self, at: int) -> bool:
        """Whether all sums of updates before a micro-batch are known here and passed on."""
        return all(sums.complete(at) for sums in self.sums)

    def _is_full(self, scheduler: Scheduler, name: str, weights: VersionedLayer) -> bool:
        return scheduler.complete(name, weights.slot, weights.last_microbatch())

    def _update(self, group: Sequence[VersionedLayer], oldest: int) -> None:
        for weights in group:
            self._ready.pop(weights.layer.name, None)
            self._capture_before(weights, weights.last_microbatch(), oldest)
        self.apply(group, lambda weights: self._first_reader(weights, oldest))

    def _must_wait(self, weights: VersionedLayer) -> bool:
        """Whether an update that is due must wait: for its norm, for the gradient of a tied parameter's other copy, or
        for a forward that must not read it."""
        for sums in self.sums:
            sums.record(weights)
        if not all(sums.known(weights) for sums in self.sums):
            return True
        return self.one_copy and self.forwarded <= weights.schedule.last_reader(weights.slot)

    def _first_reader(self, weights: VersionedLayer, oldest: int) -> int:
        """The first micro-batch that may still read an older version: the oldest that is not done, or has not done its
        forward where backwards read the newest; or the one at which a checkpoint that is not complete is resumed."""
        first = max(self.forwarded, oldest) if weights.schedule.backward_reads_newest else oldest
        return min([first, *(snapshot.at for snapshot in self.snapshots)])

    def _capture_before(self, weights: VersionedLayer, n: int, oldest: int) -> None:
        """Checkpoints read the layer before micro-batch n, or an update that holds it, changes anything."""
        for snapshot in self.snapshots:
            if snapshot.at <= n:
                self._capture(snapshot, weights.layer.name, oldest)

    def _capture(self, snapshot: CheckpointPart, name: str, oldest: int) -> None:
        if name in snapshot.layers:
            return
        weights = self.weights[name]
        if weights.pending is not None and weights.last_microbatch() < snapshot.at:
            self._update([weights], oldest)
        tensors = self.capture(weights, snapshot)
        snapshot.tensors.update({key: tensor.detach().clone() for key, tensor in tensors.items()})
