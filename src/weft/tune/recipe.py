"""A recipe: what every trial of a study trains, as values, so that it can be estimated, split and fused beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from weft.data import Data
from weft.pipeline.law import Loss, Metric
from weft.pipeline.losses import cross_entropy
from weft.space import Value

CONTINUOUS = ("lr", "weight_decay", "momentum", "dropout", "seed")
"""Names of choices that change no shape: trials that differ in these alone can be fused."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """``model(params)`` builds the module of a trial from its values, those of derived dimensions among them, anywhere
    and on any device.

    What the space has under the name of a field below, or of an option of the optimizer (``lr``, ``weight_decay``,
    ``momentum``), takes its place in that trial; ``dropout`` sets every dropout of the model.
    """

    model: Callable[[Mapping[str, Value]], nn.Module]
    data: Data | Callable[[], Data]
    loss: Loss = cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    objectives: tuple[str, ...] = ("loss",)
    """What a trial is judged by, on the validation part: ``loss`` or names of metrics."""
    inputs: tuple[str, ...] | None = None
    """Entries of a batch that the model takes, in order; all but the targets if None."""
    steps: int = 1000
    batch_size: int = 64
    optimizer: str = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = "constant"
    warmup: int = 0
    precision: str = "fp32"
    report: int | None = None
    """Steps between two reports, each with an evaluation; None: only at the end."""
    checkpoint: int | None = None
    """Steps between two checkpoints; with every report if None."""
    seed: int = 0
    accumulate_norms: bool = False
    """Whether a batch may be cut into micro-batches although the model has batch norms, which then see less."""
    cuda_graphs: bool = True
    """Whether steps become CUDA graphs on a GPU; no result depends on it. Switch it off for a model or a loss whose
    steps go by a global variable."""
