"""Two levels in one run: steps train the weights on training data, or the architecture on validation data."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.data import Batch, IterableLoader, Loader
from weft.engine.consistency import Exact
from weft.engine.optimizer import Optimizer
from weft.engine.tape import Tape
from weft.errors import TrainError
from weft.supernet.mixed_chain import PROGRESS
from weft.utils import foreach

if TYPE_CHECKING:
    from weft.engine.train_step import TrainedLayers, TrainStep

TRAINING = "train."
"""Prefix of the training batch's entries in a batch that holds both, as the second order needs it."""


@dataclass(frozen=True)
class Bilevel:
    """How the levels alternate: ``warmup`` steps for the weights alone, then of every ``every`` steps the last is for
    the architecture. Its parameters learn by ``optimizer``, at a constant rate."""

    optimizer: Optimizer = field(
        default_factory=lambda: Optimizer("adam", lr=3e-3, betas=(0.5, 0.999), weight_decay=1e-3)
    )
    warmup: int = 0
    every: int = 2
    order: int = 1
    """2: the architecture's gradient looks one step of the weights ahead, as in second-order DARTS."""

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.every < 2 or self.order not in (1, 2):
            raise TrainError(
                f"bilevel needs warmup >= 0, every >= 2 and order 1 or 2, not {self.warmup}, {self.every}, {self.order}"
            )

    def architecture(self, step: int) -> bool:
        return step >= self.warmup and (step - self.warmup) % self.every == self.every - 1

    def counts_before(self, step: int) -> tuple[int, int]:
        """How many steps before this one trained the weights, and how many the architecture."""
        architecture = max(step - self.warmup, 0) // self.every
        return step - architecture, architecture

    def describe(self) -> dict[str, Any]:
        """For a run's manifest."""
        return {"optimizer": self.optimizer.describe(), "warmup": self.warmup, "every": self.every, "order": self.order}


class BilevelLoader:
    """The batches of both levels by step, each with the progress of the run."""

    def __init__(self, bilevel: Bilevel, train: Loader | IterableLoader, validation: Loader, steps: int) -> None:
        self._bilevel, self._train, self._validation, self._steps = bilevel, train, validation, steps

    def batch(self, i: int) -> Batch:
        """The batch of step i, prepared in this thread."""
        weights, architecture = self._bilevel.counts_before(i)
        if not self._bilevel.architecture(i):
            batch = self._train.batch(weights)
        else:
            batch = self._validation.batch(architecture)
            if self._bilevel.order == 2:
                batch = _joined(batch, self._train.batch(weights))
        return with_progress(batch, i / self._steps)

    def iterate(self, start: int = 0, stop: int | None = None) -> Generator[Batch, None, None]:
        """The batches of the steps from ``start`` on, prepared ahead."""
        weights, architecture = self._bilevel.counts_before(start)
        train, validation = self._train.iterate(weights), self._validation.iterate(architecture)
        ahead: Batch | None = None  # the next training batch, which a second-order step uses too
        try:
            for i in range(start, self._steps if stop is None else stop):
                if not self._bilevel.architecture(i):
                    batch, ahead = ahead or next(train), None
                else:
                    batch = next(validation)
                    if self._bilevel.order == 2:
                        ahead = next(train)
                        batch = _joined(batch, ahead)
                yield with_progress(batch, i / self._steps)
        finally:
            train.close()
            validation.close()


def with_progress(batch: Batch, progress: float) -> Batch:
    """The batch with the progress of the run, from 0 to 1."""
    first = next(iter(batch.values()))
    return {**batch, PROGRESS: torch.full((len(first),), progress, device=first.device)}


def _joined(batch: Batch, train: Batch) -> Batch:
    return {**batch, **{f"{TRAINING}{name}": tensor for name, tensor in train.items()}}


# Second-order DARTS: the architecture's gradient at the weights that one more training step would give.
#
# With w' = w - rate * (gradient of the training loss), the gradient of L_val(w'(a), a) by the architecture a is
#
# dL_val(w', a)/da - rate * (dL_train(w+, a)/da - dL_train(w-, a)/da) / (2 e), w+- = w +- e * dL_val(w', a)/dw'
#
# with e = 0.01 / |dL_val/dw'|, as Liu et al. (2019) compute it.

LayerGradients = dict[str, list[Tensor | None]]


def check_unrolled(config: TrainStep, stages: int = 1) -> None:
    """Raises TrainError where the second order is asked for and the run does not support it."""
    if config.architecture_search is None or config.architecture_search.order == 1:
        return
    if stages > 1 or config.microbatches > 1 or any(each != Exact() for each in config.consistency.values()):
        raise TrainError(
            "the second order changes all weights back and forth within a step: it needs one stage, one micro-batch a "
            "step and 'exact' layers. Use the first order, or DrNAS, on several stages"
        )


def look_ahead(engine: TrainedLayers, step: int, batch: Batch) -> tuple[Any, Tensor, LayerGradients]:
    """Outputs and loss on the held-out part of the batch, and the gradients of the architecture by layer."""
    train = {name.removeprefix(TRAINING): value for name, value in batch.items() if name.startswith(TRAINING)}
    train[PROGRESS] = batch[PROGRESS]
    validation = {name: value for name, value in batch.items() if not name.startswith(TRAINING)}
    layers = [w for w in engine.weights.values() if not w.layer.is_architecture and w.parameters]
    parameters = [p for w in layers for p in w.parameters]

    def of_weights(by_layer: LayerGradients) -> list[Tensor]:
        flat = [g for w in layers for g in by_layer.get(w.layer.name, [None] * len(w.parameters))]
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, flat, strict=True)]

    rate = engine.optimizer.rate * engine.config.optimizer.lr_factor(step, engine.config.steps)
    before = [p.detach().clone() for p in parameters]
    _, _, by_layer = _pass(engine, step, train, arch=False, weights=True)
    _move(parameters, before, engine.optimizer.direction(parameters, of_weights(by_layer)), -rate)
    outputs, loss, by_layer = _pass(engine, step, validation, arch=True, weights=True)
    ahead = of_weights(by_layer)
    small = 0.01 / foreach.norm(ahead)
    sides = []
    for sign in (1.0, -1.0):
        _move(parameters, before, ahead, sign * small)
        sides.append(_pass(engine, step, train, arch=True, weights=False)[2])
    foreach.copy_([p.data for p in parameters], before)
    change: LayerGradients = {}
    for name, gradients in by_layer.items():
        if engine.weights[name].layer.is_architecture:
            triples = zip(gradients, sides[0][name], sides[1][name], strict=True)
            change[name] = [
                None if g is None or up is None or down is None else g - rate * (up - down) / (2 * small)
                for g, up, down in triples
            ]
    return outputs, loss, change


def _move(
    parameters: Sequence[torch.nn.Parameter], before: list[Tensor], direction: list[Tensor], length: float | Tensor
) -> None:
    for parameter, start, step in zip(parameters, before, direction, strict=True):
        parameter.data.copy_(start + length * step)


def _pass(
    engine: TrainedLayers, step: int, batch: Batch, arch: bool, weights: bool
) -> tuple[Any, Tensor, LayerGradients]:
    """Outputs, loss and gradients of a step of one micro-batch."""
    tape, subnet = Tape(step, engine.chain.enter(batch)), engine.config.subnet(step)
    trains = lambda layer, _: arch if layer.is_architecture else weights  # noqa: E731
    with engine.config.autocast(engine.device):
        for _ in engine.run_layers(tape, step, subnet, engine.chain.route(subnet), batch, trains):
            pass
        outputs, loss = engine.compute_loss(tape, step, batch)
    return outputs, loss, tape.backward((loss,), (torch.ones((), device=loss.device),))
