"""What decides the bits of a step, resolved for one supernet: its stream, loss, optimizer and consistencies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.data import Augment, Batch, Data, IterableLoader, Loader, Source
from weft.engine.bilevel import Bilevel, BilevelLoader, marked
from weft.engine.consistency import Consistency, VersionSchedule
from weft.engine.losses import counted, cross_entropy
from weft.engine.optimizer import Optimizer
from weft.errors import TrainError
from weft.space import Stream
from weft.supernet import Activations, Layer

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
    """In place: every micro-batch of a step sees the whole batch, and all but the first follow the first's outputs."""
    architecture_search: Bilevel | None = None
    seed: int = 0
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Measured on the way; they change no weight."""

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
        return (marked(batch, step / self.steps) for batch in batches)

    def parts(self, batch: Batch) -> list[Batch]:
        """The micro-batches of a step."""
        return [batch] * self.microbatches if self.distill is not None else split(batch, self.microbatches)

    def trains(self, layer: Layer, step: int) -> bool:
        """Whether the step changes the layer: architecture and weights take turns where there are both."""
        return self.architecture_search is None or layer.is_architecture == self.architecture_search.architecture(step)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """A block in which forwards compute in the run's precision."""
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def lr_factor(self, versions: VersionSchedule, slot: int) -> float:
        """What the learning rate is multiplied by in the update of a slot: that of the step of its last micro-batch."""
        return self.optimizer.lr_factor(versions.last(slot) // self.microbatches, self.steps)

    def loss_of(
        self, activations: Activations, batch: Batch, teacher_outputs: Outputs = None
    ) -> tuple[Outputs, Tensor]:
        """The outputs as the loss sees them, and the loss; raises TrainError where it is not one number.

        ``teacher_outputs`` is what the first micro-batch of the step gave, where the others are to follow it.
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
        """Sum and count of every metric over a micro-batch."""
        if not self.metrics:
            return {}
        with torch.no_grad():
            return {name: counted(name, metric(outputs, batch)) for name, metric in self.metrics.items()}


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
