"""A trial's model with its loss: a function of the tensors of a batch, as the planner and the estimates take it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.data import Batch, Loader
from weft.tune.setting import Setting


class Complete(nn.Module):
    """Called with the entries of a batch in the order of ``names``, gives the loss."""

    def __init__(self, setting: Setting, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names, self._setting = model, names, setting

    def forward(self, *tensors: Tensor) -> Tensor:
        batch = dict(zip(self.names, tensors, strict=True))
        with self._setting.autocast(tensors[0].device):
            return self._setting.loss(self.model(*self._setting.enter(batch)), batch)

    def tensors(self, batch: Batch) -> tuple[Tensor, ...]:
        """A batch as it is called with."""
        return tuple(batch[name] for name in self.names)


def example(setting: Setting, size: int, device: str = "meta") -> Batch:
    """A batch of so many samples with the shapes and types of the trial's own, and no values of meaning."""
    batch = Loader(setting.data().train, 1, setting.seed).batch(0)
    return {name: torch.zeros((size, *part.shape[1:]), dtype=part.dtype, device=device) for name, part in batch.items()}


def shaped(setting: Setting) -> nn.Module:
    """The trial's module for its shapes alone: without values where it can be built so."""
    try:
        with torch.device("meta"):
            return setting.bare()
    except (NotImplementedError, RuntimeError):  # it computes with its weights as it builds them
        return setting.bare()
