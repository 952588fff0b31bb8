"""A step of lanes: its micro-batches, each with what dropout draws in it, and their losses and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from weft.data import Batch
from weft.pipeline.seeding import Seeder
from weft.tune.batched import Batched
from weft.tune.captured import Gradients
from weft.tune.lanes import Lanes
from weft.tune.masks import drawn
from weft.tune.setting import Setting

_MASK = "mask of dropout "
"""Begins the names under which masks stand beside the entries of a batch."""


class LaneStep:
    """What lanes of one shape do in a step, whether they train or are estimated; ``micro`` samples at a time."""

    def __init__(self, setting: Setting, lanes: Lanes, device: torch.device, micro: int) -> None:
        self.lanes, self.batched = lanes, Batched(setting, lanes.module, device)
        self._device, self._micro, self._size, self._shared = device, micro, setting.batch_size, False

    def micro_batches(
        self, batch: Batch, shared: bool, seeders: Sequence[Seeder], rates: Sequence[float | None], step: int
    ) -> Iterator[Batch]:
        """The parts of a batch, (lanes, batch, ...), or without lanes where all ``shared`` it; each with its masks,
        which are drawn out here, by each lane's own seed, as no graph could."""
        self._shared = shared
        for part, start in enumerate(range(0, self._size, self._micro)):
            end = min(start + self._micro, self._size)
            cut = batch if self._micro >= self._size else _cut(batch, start, end, shared)
            draws = self.batched.draws(self.lanes.parameters, self.lanes.fixed, cut, shared)
            masks = drawn(draws, seeders, rates, step, part, self._device)
            yield {**cut, **{f"{_MASK}{number}": mask for number, mask in enumerate(masks)}}

    def part(self, given: Batch, gradients: Gradients | None) -> tuple[Tensor, Gradients]:
        """The losses of a micro-batch with its masks, and its gradients, in place, on top of those before it."""
        batch = {name: value for name, value in given.items() if not name.startswith(_MASK)}
        masks = [value for name, value in given.items() if name.startswith(_MASK)]
        samples = next(iter(batch.values())).shape[0 if self._shared else 1]
        losses = self.batched.losses(self.lanes.parameters, self.lanes.fixed, batch, lambda draws: masks, self._shared)
        if self._micro < self._size:
            losses = losses * (samples / self._size)
        found = self.lanes.joined(torch.autograd.grad(losses.sum(), list(self.lanes.parameters.values())))
        before = None if gradients is None else gradients[0]
        return losses.detach(), [found if before is None else before.add_(found)]


def _cut(batch: Batch, start: int, end: int, shared: bool) -> Batch:
    return {name: value[start:end] if shared else value[:, start:end] for name, value in batch.items()}
