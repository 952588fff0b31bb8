"""The sequential law: one process, one device, every micro-batch after the other under exactly the versions it must
see.

Written from the formulas of ``consistency``, with kept versions, and not from an order of execution. This is the oracle
that every pipeline run must equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.data import Batch
from weft.engine.bilevel import check_unrolled, look_ahead
from weft.engine.consistency import version_schedule
from weft.engine.cuda_graphs import CudaGraphCache
from weft.engine.rng import Seeder
from weft.engine.tape import Tape
from weft.engine.tied_weights import ties_of
from weft.engine.train_step import Outputs, TrainStep, detached
from weft.engine.weight_versions import Offload, VersionedLayer
from weft.errors import NonFiniteError, TrainError
from weft.space import Stream, Subnet
from weft.supernet import Chain, extra_inputs


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step leaves behind: per micro-batch its loss (not yet read from the device), and the sums of its
    metrics."""

    step: int
    subnets: tuple[Subnet, ...]
    losses: tuple[Tensor, ...]
    metrics: Mapping[str, tuple[Tensor, float]]
    skipped: int = 0


class SequentialReference:
    """Trains a chain step by step on one device."""

    def __init__(
        self, chain: Chain, law: TrainStep, stream: Stream, device: torch.device, graphs: CudaGraphCache | None = None
    ) -> None:
        check_unrolled(law)
        self.chain = chain
        self.law = law
        self.stream = stream
        self.device = device
        self.seeder = Seeder(law.seed, device)
        compute = torch.bfloat16 if law.precision == "bf16" else None
        self.weights = {
            name: VersionedLayer(
                layer,
                chain.module(layer),
                version_schedule(law.consistency[name], layer.block, len(chain.blocks), law.microbatches, law.steps),
                compute,
            )
            for name, layer in chain.layers.items()
        }
        for weights in self.weights.values():
            weights.revocable = law.nonfinite == "skip"
            weights.trains = partial(law.trains, weights.layer)
        self.updater = law.updater(self.weights, chain.ties)
        self.norms = law.norms(chain.layers)
        self.ties = ties_of(chain, law.consistency.values(), law.microbatches)
        self._waiting: dict[str, VersionedLayer] = {}
        self._keeping: dict[str, VersionedLayer] = {}
        m = law.microbatches
        # The mean over the step's micro-batches enters as the gradient of each loss: every layer is divided by m.
        self._seed_gradient = torch.full((), 1.0 / m, device=device)
        self.precision = law.autocast(device)
        self._lesson: Outputs = None
        self.graphs = graphs
        self.memory: Offload | None = None
        """What brings layers to the device, where they do not all stay there."""
        self._reached = -2

    def step(self, i: int, batch: Batch) -> StepResult:
        """Forward, backward and every update that falls due in step i."""
        m = self.law.microbatches
        picks = self.stream[i]
        if len(picks) not in (1, m):
            raise TrainError(
                f"the stream '{self.stream.name}' gives {len(picks)} subnets a step, but a step has {m} micro-batches: "
                f"set microbatches={len(picks)}"
            )
        losses: list[Tensor] = []
        sums: dict[str, tuple[Tensor, float]] = {}
        skipped = 0
        for j, part in enumerate(self.law.parts(batch)):
            if self.memory is not None:
                self._at_hand(i * m + j)
            loss, metrics, counted = self._microbatch(i, j, picks[j % len(picks)], part)
            losses.append(loss)
            skipped += not counted
            for name, (total, count) in metrics.items():
                before = sums.get(name)
                sums[name] = (total, count) if before is None else (_wide(before[0]) + total, before[1] + count)
            self._update(i * m + j)
            if self.memory is not None:
                self.memory.finish(i * m + j)
        return StepResult(i, picks, tuple(losses), sums, skipped)

    def _at_hand(self, n: int) -> None:
        assert self.memory is not None
        if n != self._reached + 1:
            self.memory.begin_run(n, self.law.steps * self.law.microbatches)
        self._reached = n
        self.memory.start(n)

    def _microbatch(
        self, i: int, j: int, subnet: Subnet, batch: Batch
    ) -> tuple[Tensor, dict[str, tuple[Tensor, float]], bool]:
        n = i * self.law.microbatches + j
        ahead = self.law.bilevel is not None and self.law.bilevel.order == 2 and self.law.bilevel.architecture(i)
        if ahead:
            outputs, loss, found = look_ahead(self, i, subnet, batch)
            return self._settle(i, j, subnet, batch, outputs, loss, lambda: found, list(self.weights.values()))
        tape = Tape(
            n, self.chain.enter(batch), self.graphs, beside=None if self.memory is None else self.memory.prefetch_during
        )
        with self.precision():
            for layer in self.chain.route(subnet):
                self.seeder.set(i, j, layer.name)
                weights, side = self.weights[layer.name], extra_inputs(layer, batch, subnet)
                tape.forward(weights, side, self.law.trains(layer, i))
            carry = tape.outputs()
            self.seeder.set(i, j, "loss")
            outputs, loss = self.law.loss_of(carry, batch, self._lesson if j else None)
        if self.law.distil is not None and j == 0:
            self._lesson = detached(outputs)
        backward = partial(tape.backward, (loss,), (self._seed_gradient,))
        return self._settle(i, j, subnet, batch, outputs, loss, backward, tape.used)

    def _settle(
        self,
        i: int,
        j: int,
        subnet: Subnet,
        batch: Batch,
        outputs: Outputs,
        loss: Tensor,
        backward: Callable[[], Mapping[str, list[Tensor | None]]],
        used: Sequence[VersionedLayer],
    ) -> tuple[Tensor, dict[str, tuple[Tensor, float]], bool]:
        metrics = self.law.measured(outputs, batch)
        # On the CPU looking costs nothing; on a GPU it would stall every step, so there the run looks later.
        looks = self.device.type == "cpu" or self.law.nonfinite == "skip"
        if looks and not math.isfinite(loss.item()):
            if self.law.nonfinite == "stop":
                raise self.non_finite(i, j, subnet, batch)
            for weights in used:
                weights.forget(i * self.law.microbatches + j)
            return loss.detach(), {}, False
        found = backward()
        for weights in used:
            if weights.layer.name in found and (weights.parameters or weights.statistics.norms):
                weights.add(i * self.law.microbatches + j, found[weights.layer.name])
                self._waiting[weights.layer.name] = weights
        return loss.detach(), metrics, True

    def _update(self, n: int) -> None:
        by_rate: dict[float, list[VersionedLayer]] = {}
        for weights in list(self._waiting.values()):
            last = weights.completes()
            if last <= n:
                del self._waiting[weights.layer.name]
                by_rate.setdefault(self.law.rate(weights.clock, last), []).append(weights)
                if self.norms is not None:
                    self.norms.record(weights.slot, weights.layer.name, weights.mean())
                if self.ties is not None:
                    self.ties.record(weights)
        if self.norms is not None:
            self.norms.advance(n + 1)
        if self.ties is not None:
            self.ties.advance(n + 1)
        for rate, group in by_rate.items():
            self._apply(group, rate, n + 1)
            self._keeping |= {weights.layer.name: weights for weights in group if weights.kept}
        if self.norms is not None:
            self.norms.forget((n + 1) // self.norms.span)
        if self.ties is not None:
            self.ties.forget((n + 1) // self.ties.span)
        # A layer that is not used again must let go of its old versions too.
        for weights in list(self._keeping.values()):
            weights.prune(n + 1)
            if not weights.kept:
                del self._keeping[weights.layer.name]

    def _apply(self, group: Sequence[VersionedLayer], rate: float, oldest: int) -> None:
        def apply(some: Sequence[VersionedLayer]) -> None:
            self.law.apply(some, rate, lambda weights: oldest, self.updater, self.norms, self.ties)

        if self.memory is None:
            apply(group)
        else:
            self.memory.apply_updates(group, apply)

    def resume(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """After the layers were restored: the optimizer's state comes back, and unfinished slots wait again."""
        self.updater.load(states)
        self._waiting = {name: w for name, w in self.weights.items() if w.pending is not None}
        self._keeping = {name: w for name, w in self.weights.items() if w.kept}
        if self.memory is not None:
            self.memory.bind_restored()
        self._reached = -2

    def train_mode(self) -> None:
        """Every layer trains: its norms write into scratch buffers."""
        self.chain.train()
        for weights in self.weights.values():
            weights.statistics.attach()

    def eval_mode(self) -> None:
        """Every layer evaluates, with its running buffers."""
        for weights in self.weights.values():
            weights.statistics.detach()
        self.chain.eval()

    def non_finite(self, i: int, j: int, subnet: Subnet, batch: Batch) -> NonFiniteError:
        """The error for a loss that is not a number: runs the forward again and names the first layer that makes
        one."""
        names = [layer.name for layer in self.chain.route(subnet)]
        with nullcontext() if self.memory is None else self.memory.pinned_on_device(names):
            return self._non_finite(i, j, subnet, batch)

    def _non_finite(self, i: int, j: int, subnet: Subnet, batch: Batch) -> NonFiniteError:
        where = "the loss function"
        carry = self.chain.enter(batch)
        if any(not torch.isfinite(x).all() for x in carry if x.is_floating_point()):
            where = "the batch itself"
        else:
            with torch.no_grad(), self.precision():
                for layer in self.chain.route(subnet):
                    self.seeder.set(i, j, layer.name)
                    weights = self.weights[layer.name]
                    side = extra_inputs(layer, batch, subnet)
                    carry, _ = weights.forward(i * self.law.microbatches + j, carry, side)
                    if any(not torch.isfinite(x).all() for x in carry if x.is_floating_point()):
                        broken = any(not torch.isfinite(p).all() for p in weights.parameters)
                        where = f"layer '{layer.name}'" + (", whose weights are not finite" if broken else "")
                        break
        return NonFiniteError(
            f"the loss is not a number in step {i}, micro-batch {j}, subnet {subnet}: it first appears in {where}. "
            "Try a lower learning rate, clipping, or nonfinite='skip'"
        )


def _wide(total: Tensor | float) -> Tensor:
    return torch.as_tensor(total, dtype=torch.float64)
