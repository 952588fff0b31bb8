"""The evaluation of a trial's model: its objectives on the validation part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
from torch import nn

from weft.data import Loader, Source
from weft.trainer.evaluate import Scores
from weft.tune.recipe import TrialConfig


def evaluate(
    config: TrialConfig, model: nn.Module, source: Source, size: int, device: torch.device
) -> tuple[float, ...]:
    """The objectives in order, from batches of at most so many samples; the model is on the device already."""
    found = scores(config)
    loader = Loader(source, size, 0, shuffle=False, device=device)
    with torch.no_grad(), evaluation_mode(model), closing(loader.all()) as batches:
        for batch in batches:
            with config.autocast(device):
                found.add(model(*config.enter(batch)), batch)
    means = found.means()
    return tuple(means[name] for name in config.objectives)


def scores(config: TrialConfig) -> Scores:
    """Of the objectives alone."""
    metrics = {name: metric for name, metric in config.metrics.items() if name in config.objectives}
    return Scores(config.loss if "loss" in config.objectives else None, metrics)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within the block, the model is in evaluation mode; afterwards every part is in the mode that it was in."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
