"""What a training run is, apart from where it runs, as values: its loss and optimizer, what layers promise, how
gradients are clipped; and what these mean for a micro-batch and for an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Batch
from weft.engine.bilevel import Bilevel
from weft.engine.consistency import Consistency, VersionSchedule
from weft.engine.grad_clip import SMALL, GlobalNorm, GlobalNormClipper, delay_of, span_of
from weft.engine.losses import counted
from weft.engine.optimizer import LayerOptimizer, Optimizer, Schedule
from weft.engine.tied_weights import Ties
from weft.engine.weight_versions import VersionedLayer
from weft.errors import TrainError
from weft.supernet import Activations, Layer, Tie
from weft.utils import foreach

Outputs = Any
Loss = Callable[[Outputs, Batch], Tensor]
Distil = Callable[[Outputs, Outputs, Batch], Tensor]
"""The loss of a subnet's outputs against those of the step's largest one."""
Metric = Callable[[Outputs, Batch], tuple[Tensor, float]]
"""Sum and count over a micro-batch, so that metrics add up. The sum may be a vector, whose length the metric then gives
as its attribute ``size``."""


@dataclass(frozen=True, slots=True)
class TrainStep:
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

    def updater(self, weights: Mapping[str, VersionedLayer], ties: Iterable[Tie] = ()) -> LayerOptimizer:
        """The optimizers of some layers, by the names of their parameters; tied ones have the options of the first."""
        own = {} if self.bilevel is None else {n: self.bilevel.optimizer for n, w in weights.items() if w.layer.arch}
        parameters = {
            (name, path): p for name, w in weights.items() for path, p in zip(w.names, w.parameters, strict=True)
        }
        apart = {f"{name}.{path}": own[name] for name, path in parameters if name in own}
        named = {f"{name}.{path}": p for (name, path), p in parameters.items()}
        return LayerOptimizer(self.optimizer, named, apart, {str(tie.second): str(tie.first) for tie in ties})

    def autocast(self, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
        """Blocks in which forwards compute in the run's precision."""
        if self.precision == "bf16":
            return lambda: torch.autocast(device.type, torch.bfloat16)
        return nullcontext

    def loss_of(self, carry: Activations, batch: Batch, lesson: Outputs = None) -> tuple[Outputs, Tensor]:
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
            return {name: counted(name, metric(outputs, batch)) for name, metric in self.metrics.items()}

    def norms(self, layers: Iterable[str], first: bool = True, last: bool = True) -> GlobalNormClipper | None:
        """What the clipping of some layers, in chain order, by the norm of all of them needs."""
        if not isinstance(self.clip, GlobalNorm):
            return None
        delay = delay_of(self.consistency.values())
        span = span_of(next(iter(self.consistency.values())), self.microbatches)
        return GlobalNormClipper(self.clip, delay, span, layers, first, last)

    def update(
        self, weights: VersionedLayer, oldest: int, norms: GlobalNormClipper | None, ties: Ties | None
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

    def rate(self, clock: VersionSchedule, last: int) -> float:
        """What the learning rate is multiplied by in an update whose last micro-batch is ``last``."""
        step = last // self.microbatches
        rate = self.schedule(step, self.steps)
        if self.rescale is None or not clock.delay:
            return rate
        return rate * float((1.0 + clock.delay) ** (min(step / self.rescale, 1.0) - 1.0))

    def clipped(self, gradients: list[Tensor], slot: int, norms: GlobalNormClipper | None) -> list[Tensor] | None:
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

    def apply(
        self,
        group: Sequence[VersionedLayer],
        rate: float,
        readers: Callable[[VersionedLayer], int],
        updater: LayerOptimizer,
        norms: GlobalNormClipper | None,
        ties: Ties | None,
    ) -> None:
        """The finished slots of these layers, which all have this rate, become updates, in one call of the optimizer.

        ``readers`` says which micro-batch is the first that may still read what a layer was before.
        """
        parameters: list[nn.Parameter] = []
        gradients: list[Tensor] = []
        applied = []
        for weights in group:
            changed, own, good = self.update(weights, readers(weights), norms, ties)
            applied.append(good)
            parameters += changed
            gradients += own
        if parameters:
            updater.apply(parameters, gradients, rate)
        for weights, good in zip(group, applied, strict=True):
            weights.updated(readers(weights), good)


def detached(outputs: Outputs) -> Outputs:
    """Outputs that a later micro-batch compares its own with."""
    return outputs.detach() if isinstance(outputs, Tensor) else tuple(x.detach() for x in outputs)


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
