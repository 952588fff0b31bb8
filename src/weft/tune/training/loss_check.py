"""Whether a loss is a mean over samples, as it must be where a batch is cut: then the mean of its parts is its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Batch, Loader, Source
from weft.engine.rng import HostSeeder
from weft.errors import TuneError
from weft.nn.state import evaluation_mode
from weft.tune.recipe import TrialConfig

SAMPLES = 16
"""Whose loss is looked at; fewer where micro-batches are smaller, since no more fit than are trained at once."""
TOLERANCE = 1e-3
"""The relative difference from which on two losses are not the same number with rounding."""

Losses = tuple[float, float, float]
log = logging.getLogger("weft.tune")


def require_mean_loss(config: TrialConfig, model: nn.Module, source: Source, micro: int, device: torch.device) -> None:
    """TuneError if the loss of a few samples is not the mean of the losses of its halves: in micro-batches another
    problem would be solved.

    The model is on the device; a copy of it is tried, in evaluation mode, and no generator moves. A loss that draws,
    or cannot be had so, is let pass.
    """
    samples = max(2, min(micro // 2 * 2, SAMPLES))
    batch = Loader(source, samples, config.seed, device=device).batch(0)
    seeder = HostSeeder(config.seed, device)
    try:
        tried, loss = deepcopy(model), deepcopy(config.loss)
        with seeder.preserved(), torch.no_grad(), evaluation_mode(tried):
            found = _losses(config, tried, loss, batch, seeder)
            if _differ(found):  # or is it rounding? in twice the digits it would not be
                found = _losses_in_double(config, tried, loss, batch, seeder) or found
    except Exception as problem:  # in training it shows what is wrong, if anything is
        log.info("whether the loss is a mean over samples is not known: %s: %s", type(problem).__name__, problem)
        return
    whole, first, second = found
    if _differ(found):
        raise TuneError(
            f"the loss must be a mean over samples where a batch of {config.batch_size} is cut into micro-batches of "
            f"{micro}: of {samples} samples it is {whole:.6g}, of their halves {first:.6g} and {second:.6g}. Divide "
            "by the number of samples, not by that of tokens or weights, use a smaller batch_size, or give more memory"
        )


def _losses(
    config: TrialConfig, model: nn.Module, loss: Callable[..., Any], batch: Batch, seeder: HostSeeder
) -> Losses:
    """Of all samples, and of both halves; nothing where the loss draws, or is not finite."""

    def of(start: int, stop: int, draw: int = 0) -> float:
        part = {name: value[start:stop] for name, value in batch.items()}
        seeder.set(0, draw, "means")
        found = loss(model(*config.enter(part)), part)
        return float(found) if isinstance(found, Tensor) and found.dim() == 0 else math.nan

    samples = len(next(iter(batch.values())))
    whole, again = of(0, samples), of(0, samples, draw=1)
    found = whole, of(0, samples // 2), of(samples // 2, samples)
    return found if whole == again and all(map(math.isfinite, found)) else (0.0, 0.0, 0.0)


def _losses_in_double(
    config: TrialConfig, model: nn.Module, loss: Callable[..., Any], batch: Batch, seeder: HostSeeder
) -> Losses | None:
    """The same in double precision; None where something does not compute in that."""
    try:
        wide = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
        return _losses(config, model.double(), loss.double() if isinstance(loss, nn.Module) else loss, wide, seeder)
    except Exception:
        return None


def _differ(found: Losses) -> bool:
    whole, first, second = found
    return abs(whole - (first + second) / 2) > TOLERANCE * max(map(abs, found))
