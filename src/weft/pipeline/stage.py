"""One stage: its own layers, the micro-batches in flight on it, and the updates that fall due. No processes here.

A forward keeps a tape until the gradient of what it gave comes back. A backward gives gradients; each layer gets them
in micro-batch order (the scheduler says whose turn it is), and is updated when those of a slot are all there.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Batch
from weft.engine.batch_stats import BatchStatsRecord
from weft.engine.bilevel import check_unrolled
from weft.engine.consistency import version_schedule
from weft.engine.cuda_graphs import CudaGraphCache, Gradients
from weft.engine.grad_clip import NORMS
from weft.engine.rng import Seeder
from weft.engine.tape import Tape
from weft.engine.tied_weights import TIES, ties_of
from weft.engine.train_step import TrainStep, detached
from weft.engine.weight_versions import VersionedLayer
from weft.errors import TrainError
from weft.pipeline.layer_updates import LESSON, LayerUpdates
from weft.pipeline.scheduler import Kind, LayerDependency
from weft.pipeline.workload import forwards_first, single_copy
from weft.space import Stream, Subnet
from weft.supernet import Activations, Chain, Layer, extra_inputs
from weft.supernet.partition import Cut, stage_of


@dataclass(slots=True)
class _Flight:
    """A micro-batch between its forward and its backward."""

    tape: Tape
    inputs: Activations
    batch: Batch
    outputs: Activations
    records: dict[str, BatchStatsRecord]
    counts: bool = True


class Stage(LayerUpdates):
    """Trains the blocks of one stage of a cut; only their layers need to be built."""

    def __init__(
        self,
        chain: Chain,
        law: TrainStep,
        stream: Stream,
        device: torch.device,
        cut: Cut,
        index: int,
        graphs: CudaGraphCache | None = None,
        split: bool = False,
    ) -> None:
        check_unrolled(law, len(cut) + 1)
        self.chain, self.stream, self.device = chain, stream, device
        self.index, self.stages = index, len(cut) + 1
        of = stage_of(cut, len(chain.blocks))
        self._blocks = {block for block, stage in enumerate(of) if stage == index}
        compute = torch.bfloat16 if law.precision == "bf16" else None
        blocks, m = len(chain.blocks), law.microbatches
        made = {
            name: VersionedLayer(
                layer,
                chain.module(name),
                version_schedule(law.consistency[name], layer.block, blocks, m, law.steps),
                compute,
            )
            for name, layer in chain.layers.items()
            if layer.block in self._blocks
        }
        norms = law.norms(made, self.is_first, self.is_last)
        ties = ties_of(chain, law.consistency.values(), m, of, index)
        one_copy = single_copy(law.consistency.values(), cut, blocks)
        super().__init__(law, made, law.updater(made, chain.ties), norms, ties, one_copy)
        self.ordered = {name for name, w in self.weights.items() if w.parameters or w.statistics.norms}
        """Layers whose micro-batches must keep to an order; the others hold nothing that training changes."""
        for name, weights in self.weights.items():
            weights.revocable = law.nonfinite == "skip"
            if name not in self.ordered and self.stages > 1:
                weights.refuse_buffers()
            weights.trains = partial(law.trains, weights.layer)
        self._clocks = {self.weights[name].clock for name in self.ordered}
        self._graphs = graphs
        self._split = split and index > 0  # the first stage has nobody to send to
        self.seeder = Seeder(law.seed, device)
        self.precision = law.autocast(device)
        self._seed_gradient = torch.full((), 1.0 / m, device=device)
        self._lesson: Any = None
        self._flights: dict[int, _Flight] = {}
        self._routes: dict[int, list[Layer]] = {}

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    def reads_batch(self) -> bool:
        """Whether this stage needs batches: for the chain's input, the loss, or a layer's side inputs."""
        return self.is_first or self.is_last or any(w.layer.side for w in self.weights.values())

    def uses(self, n: int) -> list[LayerDependency]:
        """What micro-batch n needs here, as the scheduler takes it."""
        found: list[LayerDependency] = []
        for layer in self._route(n):
            if layer.name in self.ordered:
                at = self.weights[layer.name].clock
                found.append(LayerDependency(layer.name, at.slot(n), at.forward_reads(n), at.backward_reads(n)))
        if self.law.distil is not None and self.is_last:
            # The lesson of step i is like a version: the first micro-batch makes it, and the others wait for it. The
            # next lesson waits for them.
            i, j = divmod(n, self.law.microbatches)
            found.append(LayerDependency(LESSON, 2 * i + bool(j), 2 * i + bool(j), 0))
        return found

    def gates(self, kind: Kind, n: int) -> list[tuple[Hashable, int]]:
        """What an operation waits for beside versions: the norms that updates are scaled by, and the gradients that
        tied weights share; and, with one copy, a backward that must see an update for the forwards that must not."""
        found: list[tuple[Hashable, int]] = []
        for at in self._clocks:
            # A gradient joins its slot when the slots before it are applied, whatever its backward reads.
            version = at.slot(n) if kind == "B" else at.forward_reads(n)
            if self.norms is not None and version > self.norms.delay:
                found.append((NORMS, version - self.norms.delay))
            if self.ties is not None and self.ties.layers and version > self.ties.delay:
                found.append((TIES, version - self.ties.delay))
            if self.one_copy:
                found += forwards_first(at, kind, n)
        return found

    def forward(self, n: int, carry: Activations, batch: Batch) -> tuple[Activations, Tensor | None]:
        """Runs micro-batch n through the stage's layers; on the last stage also its loss, as a report."""
        i, j = divmod(n, self.law.microbatches)
        if self.is_first:
            carry = self.chain.enter(batch)
        beside = None if self.memory is None else self.memory.prefetch_during
        tape = Tape(n, carry, self._graphs, not self.is_first, self._split, beside)
        records: dict[str, BatchStatsRecord] = {}
        report = None
        subnet = self.subnet(n)
        with self.precision():
            for layer in self._route(n):
                weights = self.weights[layer.name]
                self.seeder.set(i, j, layer.name)
                tape.forward(weights, extra_inputs(layer, batch, subnet), self.law.trains(layer, i))
                if weights.statistics.norms:
                    records[layer.name] = weights.statistics.record(copy=True)
                    if weights.revocable:
                        weights.statistics.clear()
            outputs = tape.carry
            if self.is_last:
                self.seeder.set(i, j, "loss")
                seen, loss = self.law.loss_of(tape.outputs(), batch, self._lesson if j else None)
                outputs = (loss,)
                if self.law.distil is not None and j == 0:
                    self._lesson = detached(seen)
        if self.is_last:
            report = self._report(loss, self.law.measured(seen, batch))
        self._flights[n] = _Flight(tape, carry, batch, outputs, records)
        return outputs, report

    def backward(self, n: int, gradients: Gradients, counts: bool) -> Gradients:
        """The gradients of what the stage took, from those of what it gave; ``weigh`` goes with it.

        A micro-batch that does not ``count``, because its loss is not a number, leaves no trace.
        """
        flight = self._flights[n]
        flight.counts = counts
        if not counts:
            for weights in flight.tape.used:
                weights.forget(n)
            return ()
        flight.tape.backward_inputs(flight.outputs, (self._seed_gradient,) if self.is_last else gradients)
        return flight.tape.back

    def weigh(self, n: int) -> None:
        """After the backward: the gradients of the layers, each of which waits for its turn."""
        flight = self._flights.pop(n)
        self._routes.pop(n, None)
        for name, own in flight.tape.backward_weights().items() if flight.counts else ():
            if name in self.ordered:
                self.hold(name, n, own, flight.records.get(name))

    def train_mode(self) -> None:
        """The stage's layers train: their norms write into scratch buffers."""
        for weights in self.weights.values():
            weights.module.train()
            weights.statistics.attach()

    def eval_mode(self) -> None:
        """The stage's layers evaluate, with their running buffers."""
        for weights in self.weights.values():
            weights.statistics.detach()
            weights.module.eval()

    def culprit(self, n: int) -> str:
        """What on this stage first makes a number of micro-batch n not finite; empty where it came in so already."""
        flight = self._flights[n]
        i, j = divmod(n, self.law.microbatches)
        carry = flight.inputs
        if _broken(carry):
            return "the batch itself" if self.is_first else ""
        with torch.no_grad(), self.precision():
            for layer in self._route(n):
                self.seeder.set(i, j, layer.name)
                weights = self.weights[layer.name]
                carry, _ = weights.forward(n, carry, extra_inputs(layer, flight.batch, self.subnet(n)))
                if _broken(carry):
                    worn = any(not torch.isfinite(p).all() for p in weights.parameters)
                    return f"layer '{layer.name}'" + (", whose weights are not finite" if worn else "")
        return "the loss function" if self.is_last else ""

    def subnet(self, n: int) -> Subnet:
        """The subnet of micro-batch n."""
        picks = self.stream[n // self.law.microbatches]
        m = self.law.microbatches
        if len(picks) not in (1, m):
            raise TrainError(
                f"the stream '{self.stream.name}' gives {len(picks)} subnets a step, but a step has {m} micro-batches: "
                f"set microbatches={len(picks)}"
            )
        return picks[n % m % len(picks)]

    def route(self, subnet: Subnet) -> list[Layer]:
        """The layers of this stage that a subnet uses, in chain order."""
        return [layer for layer in self.chain.route(subnet) if layer.block in self._blocks]

    def modules(self, subnet: Subnet) -> list[nn.Module]:
        """The modules of those layers."""
        return [self.chain.module(layer) for layer in self.route(subnet)]

    def _route(self, n: int) -> list[Layer]:
        found = self._routes.get(n)
        if found is None:
            found = self._routes[n] = self.route(self.subnet(n))
        return found

    def _report(self, loss: Tensor, metrics: Mapping[str, tuple[Tensor, float]]) -> Tensor:
        if self.device.type == "cpu" or self.law.nonfinite == "skip":
            counts = math.isfinite(loss.item())
        else:  # looking would stall the device; the first stage looks when the report is on the host
            counts = True
        numbers = [loss.detach(), float(counts)]
        for total, count in metrics.values():
            numbers += [total, float(count)]
        return torch.cat([torch.as_tensor(x, dtype=torch.float64, device=self.device).reshape(-1) for x in numbers])


def _broken(carry: Activations) -> bool:
    return any(not torch.isfinite(x).all() for x in carry if x.is_floating_point())
