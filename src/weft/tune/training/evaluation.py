"""What a trial's model is worth: its objectives on the validation part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
from torch import nn

from weft.data import Loader, Source
from weft.trainer.evaluate import Scores
from weft.tune.recipe import TrialConfig


def evaluate(
    setting: TrialConfig, model: nn.Module, source: Source, size: int, device: torch.device
) -> tuple[float, ...]:
    """The objectives in order, from batches of at most so many samples; the model lies on the device already."""
    found = scores(setting)
    loader = Loader(source, size, 0, shuffle=False, device=device)
    with torch.no_grad(), evaluation_mode(model), closing(loader.all()) as batches:
        for batch in batches:
            with setting.autocast(device):
                found.add(model(*setting.enter(batch)), batch)
    means = found.means()
    return tuple(means[name] for name in setting.objectives)


def scores(setting: TrialConfig) -> Scores:
    """Of the objectives alone."""
    metrics = {name: metric for name, metric in setting.metrics.items() if name in setting.objectives}
    return Scores(setting.loss if "loss" in setting.objectives else None, metrics)


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
