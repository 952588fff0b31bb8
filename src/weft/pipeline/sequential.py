"""The sequential law: one process, one device, every micro-batch after the other under exactly the versions it must
see.

Written from the formulas of ``consistency``, with kept versions, and not from an order of execution. This is the oracle
that every pipeline run must equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Batch
from weft.errors import NonFiniteError, TrainError
from weft.pipeline import foreach
from weft.pipeline.bilevel import Bilevel
from weft.pipeline.consistency import Clock, Consistency, clock
from weft.pipeline.graphs import Graphs
from weft.pipeline.norms import SMALL, GlobalNorm, Norms, delay_of, span_of
from weft.pipeline.optimizer import Optimizer, Updater
from weft.pipeline.rate import Schedule
from weft.pipeline.recall import as_before
from weft.pipeline.seeding import Seeder
from weft.pipeline.tape import Tape
from weft.pipeline.ties import Ties, ties_of
from weft.pipeline.unrolled import check_unrolled, look_ahead
from weft.pipeline.weights import Weights
from weft.space import Stream, Subnet
from weft.supernet import Carry, Chain, Layer, Tie, side_inputs

Outputs = Any
Loss = Callable[[Outputs, Batch], Tensor]
Distil = Callable[[Outputs, Outputs, Batch], Tensor]
"""The loss of a subnet's outputs against those of the step's largest one."""
Metric = Callable[[Outputs, Batch], tuple[Tensor, float]]
"""Sum and count over a micro-batch, so that metrics add up. The sum may be a vector, whose length the metric then gives
as its attribute ``size``."""


@dataclass(frozen=True, slots=True)
class Law:
    """What a training run is, apart from where it runs: the fingerprint is a function of this, the chain and the
    data."""

    steps: int
    microbatches: int
    loss: Loss
    optimizer: Optimizer
    schedule: Schedule
    seed: int
    consistency: Mapping[str, Consistency]
    clip: float | GlobalNorm | None = None
    precision: str = "fp32"
    nonfinite: str = "stop"
    metrics: Mapping[str, Metric] | None = None
    bilevel: Bilevel | None = None
    distil: Distil | None = None
    """In place: every micro-batch of a step sees the whole batch, and all but the first follow the first's outputs."""

    rescale: int | None = None
    """Steps over which layers that see old weights go from a smaller learning rate to the common one: it is divided by
    1 + their mean delay in updates, as PipeMare does."""

    def parts(self, batch: Batch) -> list[Batch]:
        """The micro-batches of a step."""
        return [batch] * self.microbatches if self.distil is not None else split(batch, self.microbatches)

    def trains(self, layer: Layer, step: int) -> bool:
        """Whether the step changes the layer: architecture and weights take turns where there are both."""
        return self.bilevel is None or layer.arch == self.bilevel.architecture(step)

    def updater(self, weights: Mapping[str, Weights], ties: Iterable[Tie] = ()) -> Updater:
        """The optimizers of some layers, by the names of their parameters; tied ones have the options of the first."""
        own = {} if self.bilevel is None else {n: self.bilevel.optimizer for n, w in weights.items() if w.layer.arch}
        parameters = {
            (name, path): p for name, w in weights.items() for path, p in zip(w.names, w.parameters, strict=True)
        }
        apart = {f"{name}.{path}": own[name] for name, path in parameters if name in own}
        named = {f"{name}.{path}": p for (name, path), p in parameters.items()}
        return Updater(self.optimizer, named, apart, {str(tie.second): str(tie.first) for tie in ties})

    def autocast(self, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
        """Blocks in which forwards compute in the run's precision."""
        if self.precision == "bf16":
            return lambda: torch.autocast(device.type, torch.bfloat16)
        return nullcontext

    def loss_of(self, carry: Carry, batch: Batch, lesson: Outputs = None) -> tuple[Outputs, Tensor]:
        """The outputs as the loss sees them, and the loss; raises TrainError where it is not one number.

        ``lesson`` is what the first micro-batch of the step gave, where the others are to follow it.
        """
        outputs = carry[0] if len(carry) == 1 else carry
        follows = self.distil is not None and lesson is not None
        loss = self.distil(outputs, lesson, batch) if self.distil and follows else self.loss(outputs, batch)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TrainError(f"the loss must return a tensor with one number, not {got}")
        return outputs, loss

    def measured(self, outputs: Outputs, batch: Batch) -> dict[str, tuple[Tensor, float]]:
        """Sum and count of every metric over a micro-batch."""
        if not self.metrics:
            return {}
        with torch.no_grad():
            return {name: metric(outputs, batch) for name, metric in self.metrics.items()}

    def norms(self, layers: Iterable[str], first: bool = True, last: bool = True) -> Norms | None:
        """What the clipping of some layers, in chain order, by the norm of all of them needs."""
        if not isinstance(self.clip, GlobalNorm):
            return None
        delay = delay_of(self.consistency.values())
        span = span_of(next(iter(self.consistency.values())), self.microbatches)
        return Norms(self.clip, delay, span, layers, first, last)

    def update(
        self, weights: Weights, oldest: int, norms: Norms | None, ties: Ties | None
    ) -> tuple[list[nn.Parameter], list[Tensor], bool]:
        """The parameters that the update of a layer's finished slot changes, their gradients, clipped, and whether it
        counts: one whose gradients are not finite may be skipped. ``oldest`` is as in ``Weights.take``."""
        slot = weights.slot
        sums = {} if ties is None else ties.sums(weights)
        taken = weights.take(oldest)
        rest = [place for place in range(len(taken)) if place not in sums]
        own = self.clipped([taken[place] for place in rest], slot, norms)
        parameters = [] if own is None else [weights.parameters[place] for place in rest]
        gradients = own or []
        for place, total in sums.items():
            tied = None if total is None else self.clipped([total], slot, norms)
            if tied is not None:
                parameters.append(weights.parameters[place])
                gradients = gradients + tied
        return parameters, gradients, own is not None

    def rate(self, clock: Clock, last: int) -> float:
        """What the learning rate is multiplied by in an update whose last micro-batch is ``last``."""
        step = last // self.microbatches
        rate = self.schedule(step, self.steps)
        if self.rescale is None or not clock.delay:
            return rate
        return rate * float((1.0 + clock.delay) ** (min(step / self.rescale, 1.0) - 1.0))

    def clipped(self, gradients: list[Tensor], slot: int, norms: Norms | None) -> list[Tensor] | None:
        """A layer's gradients, clipped to the run's norm; None where they are not finite and are to be skipped."""
        if not gradients or (self.clip is None and self.nonfinite != "skip"):
            return gradients
        norm = foreach.norm(gradients) if norms is None or self.nonfinite == "skip" else None
        if norm is not None and self.nonfinite == "skip" and not bool(torch.isfinite(norm)):
            return None
        if norms is not None:
            return foreach.mul(gradients, norms.factor(slot, gradients))
        if norm is None or not isinstance(self.clip, float | int):
            return gradients
        return foreach.mul(gradients, torch.clamp(self.clip / (norm + SMALL), max=1.0))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step leaves behind: per micro-batch its loss (not yet read from the device), and the sums of its
    metrics."""

    step: int
    subnets: tuple[Subnet, ...]
    losses: tuple[Tensor, ...]
    metrics: Mapping[str, tuple[Tensor, float]]
    skipped: int = 0


class Sequential:
    """Trains a chain step by step on one device."""

    def __init__(
        self, chain: Chain, law: Law, stream: Stream, device: torch.device, graphs: Graphs | None = None
    ) -> None:
        check_unrolled(law)
        self.chain = chain
        self.law = law
        self.stream = stream
        self.device = device
        self.seeder = Seeder(law.seed, device)
        compute = torch.bfloat16 if law.precision == "bf16" else None
        self.weights = {
            name: Weights(
                layer,
                chain.module(layer),
                clock(law.consistency[name], layer.block, len(chain.blocks), law.microbatches, law.steps),
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
        self._waiting: dict[str, Weights] = {}
        self._keeping: dict[str, Weights] = {}
        m = law.microbatches
        # The mean over the step's micro-batches enters as the gradient of each loss: every layer is divided by m.
        self._seed_gradient = torch.full((), 1.0 / m, device=device)
        self.precision = law.autocast(device)
        self._lesson: Outputs = None
        self.graphs = graphs

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
            loss, metrics, counted = self._microbatch(i, j, picks[j % len(picks)], part)
            losses.append(loss)
            skipped += not counted
            for name, (total, count) in metrics.items():
                before = sums.get(name)
                sums[name] = (total, count) if before is None else (_wide(before[0]) + total, before[1] + count)
            self._update(i * m + j)
        return StepResult(i, picks, tuple(losses), sums, skipped)

    def _microbatch(
        self, i: int, j: int, subnet: Subnet, batch: Batch
    ) -> tuple[Tensor, dict[str, tuple[Tensor, float]], bool]:
        n = i * self.law.microbatches + j
        ahead = self.law.bilevel is not None and self.law.bilevel.order == 2 and self.law.bilevel.architecture(i)
        if ahead:
            outputs, loss, found = look_ahead(self, i, subnet, batch)
            return self._settle(i, j, subnet, batch, outputs, loss, lambda: found, list(self.weights.values()))
        tape = Tape(n, self.chain.enter(batch), self.graphs)
        with self.precision():
            for layer in self.chain.route(subnet):
                self.seeder.set(i, j, layer.name)
                weights, side = self.weights[layer.name], side_inputs(layer, batch, subnet)
                again = None
                if weights.recomputes:
                    again = partial(as_before, self.seeder, self.precision, i, j, layer.name)
                tape.forward(weights, side, self.law.trains(layer, i), again)
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
        used: Sequence[Weights],
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
        by_rate: dict[float, list[Weights]] = {}
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
            self._apply(n, rate, group)
        if self.norms is not None:
            self.norms.forget((n + 1) // self.norms.span)
        if self.ties is not None:
            self.ties.forget((n + 1) // self.ties.span)
        # A layer that is not used again must let go of its old versions too.
        for weights in list(self._keeping.values()):
            weights.prune(n + 1)
            if not weights.kept:
                del self._keeping[weights.layer.name]

    def _apply(self, n: int, factor: float, group: Sequence[Weights]) -> None:
        parameters: list[nn.Parameter] = []
        gradients: list[Tensor] = []
        applied = []
        for weights in group:
            changed, own, good = self.law.update(weights, n + 1, self.norms, self.ties)
            applied.append(good)
            parameters += changed
            gradients += own
        if parameters:
            self.updater.apply(parameters, gradients, factor)
        for weights, good in zip(group, applied, strict=True):
            weights.updated(n + 1, good)
            if weights.kept:
                self._keeping[weights.layer.name] = weights

    def resume(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """After the layers were restored: the optimizer's state comes back, and unfinished slots wait again."""
        self.updater.load(states)
        self._waiting = {name: w for name, w in self.weights.items() if w.pending is not None}
        self._keeping = {name: w for name, w in self.weights.items() if w.kept}

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
        where = "the loss function"
        carry = self.chain.enter(batch)
        if any(not torch.isfinite(x).all() for x in carry if x.is_floating_point()):
            where = "the batch itself"
        else:
            with torch.no_grad(), self.precision():
                for layer in self.chain.route(subnet):
                    self.seeder.set(i, j, layer.name)
                    weights = self.weights[layer.name]
                    side = side_inputs(layer, batch, subnet)
                    carry, _ = weights.forward(i * self.law.microbatches + j, carry, side)
                    if any(not torch.isfinite(x).all() for x in carry if x.is_floating_point()):
                        broken = any(not torch.isfinite(p).all() for p in weights.parameters)
                        where = f"layer '{layer.name}'" + (", whose weights are not finite" if broken else "")
                        break
        return NonFiniteError(
            f"the loss is not a number in step {i}, micro-batch {j}, subnet {subnet}: it first appears in {where}. "
            "Try a lower learning rate, clipping, or nonfinite='skip'"
        )


def detached(outputs: Outputs) -> Outputs:
    """Outputs that a later micro-batch compares its own with."""
    return outputs.detach() if isinstance(outputs, Tensor) else tuple(x.detach() for x in outputs)


def _wide(total: Tensor | float) -> Tensor:
    return torch.as_tensor(total, dtype=torch.float64)


def split(batch: Batch, m: int) -> list[Batch]:
    """The batch as m micro-batches of equal size, in order."""
    if m == 1:
        return [batch]
    sizes = {key: len(value) if value.dim() else 0 for key, value in batch.items()}
    size = next(iter(sizes.values()))
    if len(set(sizes.values())) > 1:
        raise TrainError(
            f"the entries of a batch must have as many rows to be split into micro-batches; these have {sizes}"
        )
    if size % m:
        raise TrainError(
            f"a batch of {size} cannot be split into {m} micro-batches of equal size: use a multiple of {m}"
        )
    part = size // m
    return [{key: value[j * part : (j + 1) * part] for key, value in batch.items()} for j in range(m)]
