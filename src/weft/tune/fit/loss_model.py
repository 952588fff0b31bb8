"""A trial's model with its loss: a function of the tensors of a batch, as the planner and the estimates take it."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from weft.data import Batch, Loader
from weft.nn.fake import clear_polluted_caches
from weft.tune.recipe import TrialConfig
from weft.tune.training.evaluation import evaluation_mode

_log = logging.getLogger("weft.tune")


class LossModule(nn.Module):
    """Called with the entries of a batch in the order of ``names``, gives the loss."""

    def __init__(self, config: TrialConfig, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names, self._config = model, names, config

    def forward(self, *tensors: Tensor) -> Tensor:
        batch = dict(zip(self.names, tensors, strict=True))
        with self._config.autocast(tensors[0].device):
            return self._config.loss(self.model(*self._config.enter(batch)), batch)

    def tensors(self, batch: Batch) -> tuple[Tensor, ...]:
        """A batch as it is called with."""
        return tuple(batch[name] for name in self.names)


def example_batch(config: TrialConfig, size: int, device: str = "meta") -> Batch:
    """A batch of so many samples with the shapes and types of the trial's own, and no values of meaning."""
    batch = Loader(config.data().train, 1, config.seed).batch(0)
    return {name: torch.zeros((size, *part.shape[1:]), dtype=part.dtype, device=device) for name, part in batch.items()}


def build_meta(config: TrialConfig) -> nn.Module:
    """The trial's module for its shapes alone: without values where it can be built so."""
    try:
        with torch.device("meta"), clear_polluted_caches(config.model):
            made = config.bare()
        if not _is_lazy(made):
            return made
    except Exception as problem:  # it computes with its weights as it builds them
        _log.debug("the model is built with values: %s", problem)
    made = config.build()
    if _is_lazy(made):  # its shapes follow from a batch
        with torch.no_grad(), evaluation_mode(made):
            made(*config.enter(example_batch(config, 2, "cpu")))
    return made


def _is_lazy(module: nn.Module) -> bool:
    return any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))
