"""Forwards of several lanes as one: torch.func's vmap over the module that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from weft.data import Batch
from weft.errors import TuneError
from weft.pipeline.evaluate import Scores
from weft.tune.masks import Draw, masking, recording
from weft.tune.setting import Setting

Tensors = Mapping[str, Tensor]
Drawing = Callable[[Sequence[Draw]], Sequence[Tensor]]


class Batched:
    """What lanes of one shape compute together; randomness but for dropout is refused, since lanes could not draw it
    as they do alone."""

    def __init__(self, setting: Setting, module: nn.Module, device: torch.device) -> None:
        self._setting, self._module, self._device = setting, module, device
        self._draws: dict[Any, list[Draw]] = {}

    def losses(self, trained: Tensors, fixed: Tensors, batch: Batch, draw: Drawing, shared: bool = False) -> Tensor:
        """The training loss of each lane. ``batch`` has a first dimension of lanes, unless they share it.

        ``fixed`` are buffers and what is not trained; batch norms change theirs in place. ``draw`` gives a mask for
        each dropout of the forward.
        """
        where = dict.fromkeys(batch, None if shared else 0)
        masks = list(draw(self.draws(trained, fixed, batch, shared)))

        def loss(trained: Tensors, fixed: Tensors, batch: Batch, masks: list[Tensor]) -> Tensor:
            with masking(masks):
                outputs = self._forward(trained, fixed, batch)
                found = self._setting.loss(outputs, batch)
            if not isinstance(found, Tensor) or found.dim() != 0:
                raise TuneError("the loss must return a tensor with one number")
            return found

        found: Tensor = self._map(loss, (0, 0, where, 0))(trained, fixed, batch, masks)
        return found

    def draws(self, trained: Tensors, fixed: Tensors, batch: Batch, shared: bool = False) -> list[Draw]:
        """The dropouts of a forward of such a batch, in order: found once, by a forward that changes nothing."""
        self._module.train()
        kind = tuple((name, tuple(value.shape if shared else value.shape[1:])) for name, value in batch.items())
        if kind not in self._draws:
            spare = {name: value.clone() for name, value in fixed.items()}
            one = {name: value if shared else value[0] for name, value in batch.items()}
            draws = self._draws[kind] = []
            with torch.no_grad(), recording(draws), self._setting.autocast(self._device):
                first = {name: value[0] for name, value in {**trained, **spare}.items()}
                outputs = functional_call(self._module, first, self._setting.enter(one))
                self._setting.loss(outputs, one)
        return self._draws[kind]

    def outputs(self, trained: Tensors, fixed: Tensors, batch: Batch) -> Any:
        """Of each lane on the same batch, in evaluation mode."""
        self._module.eval()
        shared = dict.fromkeys(batch)
        with torch.no_grad(), masking(()), _plain_attention():
            return self._map(self._forward, (0, 0, shared))(trained, fixed, batch)

    def scores(self, count: int) -> list[Scores]:
        """One a lane, of the trial's objectives."""
        setting = self._setting
        metrics = {name: metric for name, metric in setting.metrics.items() if name in setting.objectives}
        return [Scores(setting.loss if "loss" in setting.objectives else None, metrics) for _ in range(count)]

    def _forward(self, trained: Tensors, fixed: Tensors, batch: Batch) -> Any:
        return functional_call(self._module, {**trained, **fixed}, self._setting.enter(batch))

    def _map(self, function: Callable[..., Any], where: tuple[Any, ...]) -> Callable[..., Any]:
        mapped = vmap(function, in_dims=where, randomness="error")

        def run(*args: Any) -> Any:
            # Autocast around vmap, never within: inside it would cast, and keep, what only a lane sees.
            with self._setting.autocast(self._device):
                return mapped(*args)

        return run


@contextmanager
def _plain_attention() -> Iterator[None]:
    """torch's short cut through whole attention layers in evaluation has no form for lanes."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
