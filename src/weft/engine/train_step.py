"""What decides the bits of a step, resolved for one supernet, and the layers that one process trains by it.

``SequentialReference`` trains all layers of a chain on one device, a pipeline's ``Stage`` those of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Augment, Batch, Data, IterableLoader, Loader, Source
from weft.data.loader import split_batch
from weft.engine.bilevel import Bilevel, BilevelLoader, with_progress
from weft.engine.consistency import Consistency, version_schedule
from weft.engine.grad_exchange import SMALL, GlobalNormClipper, Sums, delay_of, span_of, ties_of
from weft.engine.layer_state import CheckpointPart, capture, optimizer_states, restore
from weft.engine.losses import counted, cross_entropy
from weft.engine.optimizer import GlobalNorm, LayerOptimizer, Optimizer, make_schedule
from weft.engine.rng import Seeder
from weft.engine.tape import Tape
from weft.engine.weight_versions import Offload, VersionedLayer
from weft.errors import NonFiniteError, TrainError
from weft.space import Stream, Subnet
from weft.supernet import Activations, Chain, Layer, extra_inputs
from weft.utils import foreach

Outputs = Any
Loss = Callable[[Outputs, Batch], Tensor]
Distill = Callable[[Outputs, Outputs, Batch], Tensor]
"""The loss of a subnet's outputs against those of the step's largest one."""
Metric = Callable[[Outputs, Batch], tuple[Tensor, float]]
"""Sum and count over a micro-batch, so that metrics add up. The sum may be a vector, whose length the metric then gives
as its attribute ``size``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """The fingerprint of a run is a function of this, the chain and the data."""

    steps: int
    stream: Stream
    consistency: Mapping[str, Consistency]
    """Of every layer."""
    batch_size: int = 64
    microbatches: int = 1
    loss: Loss = cross_entropy
    optimizer: Optimizer = field(default_factory=Optimizer)
    augment: Augment | None = None
    precision: str = "fp32"
    on_nonfinite: str = "stop"
    distill: Distill | None = None
    """In-place distillation: every micro-batch of a step has the full batch, and later ones learn from the first."""
    architecture_search: Bilevel | None = None
    seed: int = 0
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Measured beside the loss; they change no weight."""

    def loader(self, data: Data, device: torch.device, workers: int = 0) -> Loader | IterableLoader | BilevelLoader:
        """The batches of the run by step; a DataLoader of the user's own is taken as it is."""

        def loader(source: Source) -> Loader:
            return Loader(source, self.batch_size, self.seed, augment=self.augment, workers=workers, device=device)

        train = data.train if isinstance(data.train, IterableLoader) else loader(data.train)
        if self.architecture_search is None:
            return train
        if data.validation is None:
            raise TrainError(
                "architecture parameters learn on validation data, and this data set has none: split some off it"
            )
        return BilevelLoader(self.architecture_search, train, loader(data.validation), self.steps)

    def validation_batches(self, loader: Loader, step: int) -> Iterator[Batch]:
        """All validation data; where the chain has architecture parameters, with how far the run has come."""
        batches = loader.all()
        if self.architecture_search is None:
            return batches
        return (with_progress(batch, step / self.steps) for batch in batches)

    def subnets(self, step: int) -> tuple[Subnet, ...]:
        """The subnets of a step: one for all its micro-batches, or one for each."""
        m, subnets = self.microbatches, self.stream[step]
        if len(subnets) not in (1, m):
            raise TrainError(
                f"the stream '{self.stream.name}' gives {len(subnets)} subnets a step, but a step has {m} "
                f"micro-batches: set microbatches={len(subnets)}"
            )
        return subnets

    def subnet(self, n: int) -> Subnet:
        subnets = self.subnets(n // self.microbatches)
        return subnets[n % self.microbatches % len(subnets)]

    def parts(self, batch: Batch) -> list[Batch]:
        return [batch] * self.microbatches if self.distill is not None else split_batch(batch, self.microbatches)

    def trains(self, layer: Layer, step: int) -> bool:
        """Whether the step changes the layer: architecture and weights take turns where there are both."""
        return self.architecture_search is None or layer.is_architecture == self.architecture_search.architecture(step)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """A block in which forwards compute in the run's precision."""
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def loss_of(
        self, activations: Activations, batch: Batch, teacher_outputs: Outputs = None
    ) -> tuple[Outputs, Tensor]:
        """The outputs as the loss sees them, and the loss; raises TrainError where it is not one number.

        ``teacher_outputs`` are those of the step's first micro-batch, where the others learn from it.
        """
        outputs = activations[0] if len(activations) == 1 else activations
        if self.distill is not None and teacher_outputs is not None:
            loss = self.distill(outputs, teacher_outputs, batch)
        else:
            loss = self.loss(outputs, batch)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TrainError(f"the loss must return a tensor with one number, not {got}")
        return outputs, loss

    def measure(self, outputs: Outputs, batch: Batch) -> dict[str, tuple[Tensor, float]]:
        if not self.metrics:
            return {}
        with torch.no_grad():
            return {name: counted(name, metric(outputs, batch)) for name, metric in self.metrics.items()}


class TrainedLayers:
    """Some layers of a chain in training; ``stages`` gives the stage of every block, and ``index`` this one's."""

    def __init__(
        self, chain: Chain, config: TrainStep, device: torch.device, stages: Sequence[int] = (), index: int = 0
    ) -> None:
        self.chain, self.config, self.device = chain, config, device
        self.is_first, self.is_last = index == 0, not stages or index == stages[-1]
        self.blocks = {block for block in range(len(chain.blocks)) if not stages or stages[block] == index}
        """The numbers of the blocks that are trained here."""
        m, compute = config.microbatches, torch.bfloat16 if config.precision == "bf16" else None
        self.weights: dict[str, VersionedLayer] = {}
        for name, layer in chain.layers.items():
            if layer.block in self.blocks:
                versions = version_schedule(config.consistency[name], layer.block, len(chain.blocks), m, config.steps)
                weights = self.weights[name] = VersionedLayer(layer, chain.module(name), versions, compute)
                weights.can_undo_forward = config.on_nonfinite == "skip"
                weights.trains = partial(config.trains, layer)
        self.optimizer = self._make_optimizer()
        self._lr_schedule = make_schedule(config.optimizer.schedule, config.optimizer.warmup_steps)
        self.clipper = self._make_clipper(index)
        self.ties = ties_of(chain, config.consistency.values(), m, stages, index)
        self.sums: list[Sums] = [sums for sums in (self.clipper, self.ties) if sums is not None]
        """What stages share about each update."""
        self.seeder = Seeder(config.seed, device)
        self.offload: Offload | None = None
        """Loads layers to the device, where they do not all stay there."""
        self.updates = 0
        # The mean over the step's micro-batches enters as the gradient of each loss: every layer is divided by m.
        self._loss_gradient = torch.full((), 1.0 / m, device=device)
        self._teacher_outputs: Outputs = None
        self._with_versions: dict[str, VersionedLayer] = {}
        """Layers that keep older versions."""
        self._unfinished: dict[str, VersionedLayer] = {}
        """Layers with gradients whose slot is not complete."""

    def route(self, subnet: Subnet) -> list[Layer]:
        """The layers that a subnet uses here, in chain order."""
        return [layer for layer in self.chain.route(subnet) if layer.block in self.blocks]

    def run_layers(
        self,
        tape: Tape,
        n: int,
        subnet: Subnet,
        layers: Iterable[Layer],
        batch: Batch,
        trains: Callable[[Layer, int], bool] | None = None,
    ) -> Iterator[VersionedLayer]:
        """Runs micro-batch n through these layers of its subnet, one at a time, with the randomness of each; yields
        what has run.

        ``trains`` says which layers train in a step; the configuration says it where None is given.
        """
        step, j = divmod(n, self.config.microbatches)
        trains = trains or self.config.trains
        for layer in layers:
            self.seeder.set(step, j, layer.name)
            weights = self.weights[layer.name]
            tape.forward(weights, extra_inputs(layer, batch, subnet), trains(layer, step))
            yield weights

    def compute_loss(self, tape: Tape, n: int, batch: Batch) -> tuple[Outputs, Tensor]:
        """Outputs and loss of micro-batch n, after the last layer of the chain."""
        step, j = divmod(n, self.config.microbatches)
        self.seeder.set(step, j, "loss")
        outputs, loss = self.config.loss_of(tape.outputs(), batch, self._teacher_outputs if j else None)
        if self.config.distill is not None and j == 0:
            one = isinstance(outputs, Tensor)
            self._teacher_outputs = outputs.detach() if one else tuple(x.detach() for x in outputs)
        return outputs, loss

    def apply(self, group: Iterable[VersionedLayer], readers: Callable[[VersionedLayer], int]) -> None:
        """The finished slots of these layers become updates, in one call of the optimizer for each learning rate, which
        is that of the step of a slot's last micro-batch.

        ``readers`` says which micro-batch is the first that may still read what a layer was before.
        """
        by_step: dict[int, list[VersionedLayer]] = {}
        for weights in group:
            by_step.setdefault(weights.last_microbatch() // self.config.microbatches, []).append(weights)
        for step, members in by_step.items():
            factor = self._lr_schedule(step, self.config.steps)
            apply = partial(self._apply, factor=factor, readers=readers)
            apply(members) if self.offload is None else self.offload.apply_updates(members, apply)
            self._with_versions |= {weights.layer.name: weights for weights in members if weights.kept}
            self.updates += len(members)

    def prune(self, readers: Callable[[VersionedLayer], int]) -> None:
        """Drops older versions without a reader, also of layers that are not used again."""
        for name, weights in list(self._with_versions.items()):
            weights.prune(readers(weights))
            if not weights.kept:
                del self._with_versions[name]

    def restore(self, part: CheckpointPart) -> None:
        """Puts the layers back as they were in a checkpoint, which may hold others too."""
        for name, weights in self.weights.items():
            restore(weights, part.tensors, part.layers[name])
        states = optimizer_states(part.tensors)
        self.optimizer.load({name: state for name, state in states.items() if name in self.optimizer.parameters})
        self._with_versions = {name: w for name, w in self.weights.items() if w.kept}
        self._unfinished = {name: w for name, w in self.weights.items() if w.pending is not None}
        for sums in self.sums:
            sums.restore(part, self.device)
        if self.offload is not None:
            self.offload.bind_restored()

    def train_mode(self) -> None:
        """The layers train: their norms write into scratch buffers."""
        for weights in self.weights.values():
            weights.module.train()
            weights.batch_stats.attach()

    def eval_mode(self) -> None:
        """The layers evaluate, with their running buffers."""
        for weights in self.weights.values():
            weights.batch_stats.detach()
            weights.module.eval()

    def snapshot(self, at: int) -> CheckpointPart:
        """All layers as they are before micro-batch ``at``. The tensors are not copied: read them before the next
        step."""
        part = CheckpointPart(at)
        for weights in self.weights.values():
            part.tensors.update(self.capture(weights, part))
        for sums in self.sums:
            sums.save(part)
        return part

    def capture(self, weights: VersionedLayer, part: CheckpointPart) -> dict[str, Tensor]:
        """The tensors of a layer for a checkpoint, which gets its numbers; raises NonFiniteError for weights that are
        not finite, which no checkpoint should hold."""
        weights.synchronize()
        if weights.parameters and not bool(torch.isfinite(foreach.norm(list(weights.parameters)))):
            raise NonFiniteError(
                f"the weights of layer '{weights.layer.name}' are not finite before step "
                f"{part.at // self.config.microbatches}, so no checkpoint is written. Try a lower learning rate or "
                "clipping"
            )
        tensors, part.layers[weights.layer.name] = capture(weights, self.optimizer, part.at)
        return tensors

    def first_nonfinite(self, n: int, activations: Activations, batch: Batch) -> str:
        """What first makes a value of micro-batch n not finite: runs its layers again. Empty where the activations come
        in so, or leave finite for another stage."""
        if _has_nonfinite(activations):
            return "the batch itself" if self.is_first else ""
        i, j = divmod(n, self.config.microbatches)
        subnet = self.config.subnet(n)
        with torch.no_grad(), self.config.autocast(self.device):
            for layer in self.route(subnet):
                self.seeder.set(i, j, layer.name)
                weights = self.weights[layer.name]
                activations, _ = weights.forward(n, activations, extra_inputs(layer, batch, subnet))
                if _has_nonfinite(activations):
                    broken = any(not torch.isfinite(p).all() for p in weights.parameters)
                    return f"layer '{layer.name}'" + (", whose weights are not finite" if broken else "")
        return "the loss function" if self.is_last else ""

    def nonfinite_loss(self, n: int, where: str) -> NonFiniteError:
        i, j = divmod(n, self.config.microbatches)
        return NonFiniteError(
            f"the loss is not a number in step {i}, micro-batch {j}, subnet {self.config.subnet(n)}: "
            f"it first appears in {where or 'another stage'}. "
            "Try a lower learning rate, clipping, or on_nonfinite='skip'"
        )

    def _make_optimizer(self) -> LayerOptimizer:
        """The optimizers of the layers, by the names of their parameters; tied ones have the options of the first."""
        search = self.config.architecture_search
        named: dict[str, nn.Parameter] = {}
        separate = {}
        for name, weights in self.weights.items():
            for path, parameter in zip(weights.names, weights.parameters, strict=True):
                named[f"{name}.{path}"] = parameter
                if search is not None and weights.layer.is_architecture:
                    separate[f"{name}.{path}"] = search.optimizer
        alias = {str(tie.second): str(tie.first) for tie in self.chain.ties}
        return LayerOptimizer(self.config.optimizer, named, separate, alias)

    def _make_clipper(self, index: int) -> GlobalNormClipper | None:
        clip, consistency = self.config.optimizer.clip, self.config.consistency
        if not isinstance(clip, GlobalNorm):
            return None
        span = span_of(next(iter(consistency.values())), self.config.microbatches)
        return GlobalNormClipper(clip, delay_of(consistency.values()), span, self.weights, index, self.is_last)

    def _apply(self, group: Sequence[VersionedLayer], factor: float, readers: Callable[[VersionedLayer], int]) -> None:
        found = [self._gradients(weights, readers(weights)) for weights in group]
        parameters = [parameter for changed, _, _ in found for parameter in changed]
        if parameters:
            self.optimizer.apply(parameters, [g for _, clipped, _ in found for g in clipped], factor)
        for weights, (_, _, good) in zip(group, found, strict=True):
            weights.on_update(readers(weights), good)

    def _gradients(self, weights: VersionedLayer, oldest: int) -> tuple[list[nn.Parameter], list[Tensor], bool]:
        """The parameters that the update of a layer's finished slot changes, their clipped gradients, and whether the
        update counts: one that is not finite may be skipped. ``oldest`` is as in ``VersionedLayer.take_gradients``."""
        slot = weights.slot
        sums = {} if self.ties is None else self.ties.sums(weights)
        taken = weights.take_gradients(oldest)
        rest = [place for place in range(len(taken)) if place not in sums]
        clipped = self._clip([taken[place] for place in rest], slot)
        parameters = [] if clipped is None else [weights.parameters[place] for place in rest]
        gradients = clipped or []
        for place, total in sums.items():
            tied = None if total is None else self._clip([total], slot)
            if tied is not None:
                parameters.append(weights.parameters[place])
                gradients = gradients + tied
        return parameters, gradients, clipped is not None

    def _clip(self, gradients: list[Tensor], slot: int) -> list[Tensor] | None:
        """A layer's clipped gradients; None where they are not finite and are to be skipped."""
        clip, skips = self.config.optimizer.clip, self.config.on_nonfinite == "skip"
        if not gradients or (clip is None and not skips):
            return gradients
        norm = foreach.norm(gradients) if self.clipper is None or skips else None
        if norm is not None and skips and not bool(torch.isfinite(norm)):
            return None
        if self.clipper is not None:
            return foreach.mul(gradients, self.clipper.factor(slot, gradients))
        if norm is None or not isinstance(clip, float | int):
            return gradients
        return foreach.mul(gradients, torch.clamp(clip / (norm + SMALL), max=1.0))


def _has_nonfinite(activations: Activations) -> bool:
    return any(not torch.isfinite(x).all() for x in activations if x.is_floating_point())
