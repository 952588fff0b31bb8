"""One stage: its layers, the micro-batches in flight on it, and the updates that fall due. No processes here.

A forward keeps a tape until the gradient of its outputs comes back. Gradients, which come in any order, join their
slots in micro-batch order (the scheduler says whose turn it is). A full slot becomes an update once nothing has to wait
for it, and a checkpoint reads each layer before it changes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.data import Batch
from weft.engine.batch_stats import BatchStatsRecord
from weft.engine.bilevel import check_unrolled
from weft.engine.cuda_graphs import CudaGraphCache, Gradients
from weft.engine.layer_state import CheckpointPart
from weft.engine.tape import Tape
from weft.engine.train_step import TrainedLayers, TrainStep
from weft.engine.weight_versions import VersionedLayer
from weft.pipeline.scheduler import Kind, LayerDependency, Scheduler
from weft.pipeline.workload import forwards_to_await, single_copy
from weft.space import Subnet
from weft.supernet import Activations, Chain, Layer
from weft.supernet.partition import Cut, stage_of

TEACHER = ("teacher",)
"""The name, for the scheduler, of the outputs of a step's first micro-batch, where the others learn from them."""


@dataclass(slots=True)
class _InFlight:
    tape: Tape
    inputs: Activations
    batch: Batch
    outputs: Activations
    records: dict[str, BatchStatsRecord]
    counts: bool = True


class Stage(TrainedLayers):
    """Trains the blocks of one stage of a cut; only their layers need to be built."""

    def __init__(
        self,
        chain: Chain,
        config: TrainStep,
        device: torch.device,
        cut: Cut,
        index: int,
        graphs: CudaGraphCache | None = None,
        split_backward: bool = False,
    ) -> None:
        check_unrolled(config, len(cut) + 1)
        super().__init__(chain, config, device, stage_of(cut, len(chain.blocks)), index)
        self.index, self.stages = index, len(cut) + 1
        self.ordered = {name for name, w in self.weights.items() if w.parameters or w.batch_stats.norms}
        """Layers whose micro-batches must keep to an order; the others hold nothing that training changes."""
        for name, weights in self.weights.items():
            if name not in self.ordered and self.stages > 1:
                weights.may_read_buffers = False
        self._schedules = {self.weights[name].schedule for name in self.ordered}
        self._graphs = graphs
        self._split_backward = split_backward
        self.one_copy = single_copy(config.consistency.values(), cut, len(chain.blocks))
        """Whether an update waits for the forwards that must not read it, so that no older version is kept."""
        self.forwarded = 0
        """All micro-batches below this have done their forward here."""
        self.snapshots: list[CheckpointPart] = []
        """Parts of checkpoints that are not complete yet, in order."""
        self._in_flight: dict[int, _InFlight] = {}
        self._routes: dict[int, tuple[Subnet, list[Layer]]] = {}
        self._stashed: dict[tuple[str, int], tuple[list[Tensor | None], BatchStatsRecord | None]] = {}
        """Gradients of micro-batches for layers, and their statistics, until their turn."""
        self._ready: dict[str, VersionedLayer] = {}
        """Layers with a full slot that has to wait."""

    def reads_batch(self) -> bool:
        """Whether this stage needs batches: for the chain's input, the loss, or a layer's extra inputs."""
        return self.is_first or self.is_last or any(w.layer.extra_inputs for w in self.weights.values())

    def dependencies(self, n: int) -> list[LayerDependency]:
        """The layers that micro-batch n uses here, for the scheduler."""
        used: list[LayerDependency] = []
        for layer in self._route(n)[1]:
            if layer.name in self.ordered:
                at = self.weights[layer.name].schedule
                used.append(LayerDependency(layer.name, at.slot(n), at.forward_reads(n), at.backward_reads(n)))
        if self.config.distill is not None and self.is_last:
            # The teacher's outputs in step i are like a version: the first micro-batch makes them, and the others wait
            # for them. Those of the next step wait for the others.
            i, j = divmod(n, self.config.microbatches)
            used.append(LayerDependency(TEACHER, 2 * i + bool(j), 2 * i + bool(j), 0))
        return used

    def counters(self, kind: Kind, n: int) -> list[tuple[Hashable, int]]:
        """What an operation waits for beside versions: the norms that updates are scaled by, and the gradients that
        tied weights share; and, with one copy, a backward that must see an update for the forwards that must not."""
        counters: list[tuple[Hashable, int]] = []
        for at in self._schedules:
            # A gradient joins its slot when the slots before it are applied, whatever its backward reads.
            version = at.slot(n) if kind == "B" else at.forward_reads(n)
            for sums in self.sums:
                if sums.awaited and version > sums.delay:
                    counters.append((sums.counter, version - sums.delay))
            if self.one_copy:
                counters += forwards_to_await(at, kind, n)
        return counters

    def forward(self, n: int, activations: Activations, batch: Batch) -> tuple[Activations, Tensor | None]:
        """Runs micro-batch n through the stage's layers; on the last stage also its loss, as a report."""
        if self.is_first:
            activations = self.chain.enter(batch)
        in_background = None if self.offload is None else self.offload.prefetch_during
        tape = Tape(n, activations, self._graphs, not self.is_first, self._split_backward, in_background)
        records: dict[str, BatchStatsRecord] = {}
        with self.config.autocast(self.device):
            for weights in self.run_layers(tape, n, *self._route(n), batch):
                if weights.batch_stats.norms:
                    records[weights.layer.name] = weights.batch_stats.record(copy=True)
                    if weights.can_undo_forward:
                        weights.batch_stats.clear()
            if not self.is_last:
                self._in_flight[n] = _InFlight(tape, activations, batch, tape.activations, records)
                return tape.activations, None
            outputs, loss = self.compute_loss(tape, n, batch)
        self._in_flight[n] = _InFlight(tape, activations, batch, (loss,), records)
        return (loss,), self._report(loss, self.config.measure(outputs, batch))

    def backward(self, n: int, gradients: Gradients, counts: bool) -> Gradients:
        """The gradients of the stage's inputs, from those of its outputs; to be followed by ``weight_gradients``.

        A micro-batch that does not ``count``, because its loss is not a number, leaves no trace.
        """
        micro = self._in_flight[n]
        micro.counts = counts
        if not counts:
            for weights in micro.tape.used:
                weights.undo_forward(n)
            return ()
        micro.tape.backward_inputs(micro.outputs, (self._loss_gradient,) if self.is_last else gradients)
        return micro.tape.input_gradients

    def weight_gradients(self, n: int) -> None:
        """After the backward: the gradients of the layers, each of which waits for its turn."""
        micro = self._in_flight.pop(n)
        self._routes.pop(n, None)
        for name, gradients in micro.tape.backward_weights().items() if micro.counts else ():
            if name in self.ordered:
                self._stashed[name, n] = gradients, micro.records.get(name)

    def first_nonfinite_layer(self, n: int) -> str:
        """What on this stage first makes a value of micro-batch n not finite; empty where its inputs are so."""
        return self.first_nonfinite(n, self._in_flight[n].inputs, self._in_flight[n].batch)

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

    def _route(self, n: int) -> tuple[Subnet, list[Layer]]:
        """The subnet of micro-batch n, and its layers here."""
        if n not in self._routes:
            subnet = self.config.subnet(n)
            self._routes[n] = subnet, self.route(subnet)
        return self._routes[n]

    def _report(self, loss: Tensor, metrics: Mapping[str, tuple[Tensor, float]]) -> Tensor:
        if self.device.type == "cpu" or self.config.on_nonfinite == "skip":
            counts = math.isfinite(loss.item())
        else:  # looking would stall the device; the first stage looks when the report is on the host
            counts = True
        numbers = [loss.detach(), float(counts)]
        for total, count in metrics.values():
            numbers += [total, float(count)]
        return torch.cat([torch.as_tensor(x, dtype=torch.float64, device=self.device).reshape(-1) for x in numbers])

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
