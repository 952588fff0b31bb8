"""A setting: the recipe of a study with one trial's own values in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Batch, Data, as_data
from weft.errors import TrainError, TuneError, nearest
from weft.keys import torch_seeded
from weft.pipeline.law import Loss, Metric
from weft.pipeline.optimizer import Optimizer, Updater
from weft.pipeline.rate import Schedule, make_schedule
from weft.space import Value
from weft.tune.drawing import seeded
from weft.tune.recipe import Recipe
from weft.zoo.language import Attention as LanguageAttention

FIELDS = ("steps", "batch_size", "optimizer", "schedule", "warmup", "precision", "report", "checkpoint", "seed")
"""Fields of a recipe that a choice of the same name replaces. Any other choice is the model's own affair."""
OPTIONS = ("lr", "weight_decay", "momentum")
"""Options of the optimizer that a choice of the same name replaces."""
TARGETS = ("label", "targets", "y")
"""Entries of a batch that are not the model's input unless the recipe says so."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that one trial's result depends on, apart from the device and how its batches are cut."""

    params: Mapping[str, Value]
    model: Callable[[Mapping[str, Value]], nn.Module]
    source: Data | Callable[[], Data]
    loss: Loss
    metrics: Mapping[str, Metric]
    objectives: tuple[str, ...]
    inputs: tuple[str, ...] | None
    steps: int
    batch_size: int
    optimizer: Optimizer
    schedule: Schedule
    precision: str
    dropout: float | None
    """Of every dropout in the model; None leaves them as the model has them."""
    report: int | None
    checkpoint: int | None
    seed: int
    accumulate_norms: bool
    cuda_graphs: bool

    def data(self) -> Data:
        """The data set; one that is made by a function is kept for the next trial of the process."""
        try:
            return _made(self.source)
        except TypeError:  # what cannot be hashed cannot be remembered
            return _fresh(self.source)

    def bare(self) -> nn.Module:
        """The module, its weights drawn from wherever torch draws now: for who needs shapes alone. What it draws from
        Python's and NumPy's generators, which shapes may follow from, is keyed by the trial's seed."""
        with seeded(self.seed, "init"):
            module = self.model(self.params)
        if not isinstance(module, nn.Module):
            raise TuneError(f"the recipe's model returned a {type(module).__name__}: it must return an nn.Module")
        if self.dropout is not None:
            set_dropout(module, self.dropout)
        return module

    def build(self) -> nn.Module:
        """The module on the CPU with the weights that this trial starts from, keyed by its seed."""
        with torch_seeded(self.seed, "init"):
            return self.bare()

    def enter(self, batch: Batch) -> tuple[Tensor, ...]:
        """What the model takes of a batch, in order."""
        names = tuple(name for name in batch if name not in TARGETS) if self.inputs is None else self.inputs
        missing = [name for name in names if name not in batch]
        if missing or not names:
            raise TuneError(
                f"the model takes {', '.join(names) or 'an input'}, but a batch has {', '.join(batch) or 'nothing'}: "
                "name the recipe's inputs"
            )
        return tuple(batch[name] for name in names)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """A block in which forwards compute in the trial's precision."""
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def describe(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be of this trial, as plain values."""
        return {
            "params": {name: self.params[name] for name in sorted(self.params)},
            "steps": self.steps,
            "batch_size": self.batch_size,
            "optimizer": {name: str(value) for name, value in self.optimizer.describe().items()},
            "schedule": str(getattr(self.schedule, "__qualname__", self.schedule)),
            "precision": self.precision,
            "seed": self.seed,
        }


def setting(recipe: Recipe, params: Mapping[str, Value]) -> Setting:
    """The recipe with the trial's values in place; a TuneError names the choice whose value cannot be."""
    own = {name: params[name] for name in FIELDS if name in params}
    try:
        recipe = replace(recipe, **own)  # type: ignore[arg-type]  # checked below, whoever gave it
        _check(recipe)
        optimizer = _optimizer(recipe, params)
        schedule = make_schedule(recipe.schedule, recipe.warmup)
    except TrainError as problem:
        raise TuneError(f"{problem}{_blame(own, params)}") from problem
    dropout = params.get("dropout")
    if dropout is not None and (isinstance(dropout, bool | str) or not 0.0 <= dropout < 1.0):
        raise TuneError(f"choice 'dropout' = {dropout!r}: a dropout is a number from 0 to below 1")
    return Setting(
        params=dict(params),
        model=recipe.model,
        source=recipe.data,
        loss=recipe.loss,
        metrics=dict(recipe.metrics),
        objectives=recipe.objectives,
        inputs=recipe.inputs,
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        optimizer=optimizer,
        schedule=schedule,
        precision=recipe.precision,
        dropout=None if dropout is None else float(dropout),
        report=recipe.report,
        checkpoint=recipe.checkpoint if recipe.checkpoint is not None else recipe.report,
        seed=recipe.seed,
        accumulate_norms=recipe.accumulate_norms,
        cuda_graphs=recipe.cuda_graphs,
    )


def dropouts(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Every part of a module that drops, with the attribute that says how often."""
    for part in module.modules():
        if isinstance(part, DROPOUTS):
            yield part, "p"
        elif isinstance(part, nn.MultiheadAttention) or (isinstance(part, nn.RNNBase) and part.num_layers > 1):
            yield part, "dropout"
        elif isinstance(part, LanguageAttention):
            yield part, "drop"


def set_dropout(module: nn.Module, rate: float) -> None:
    for part, attribute in dropouts(module):
        setattr(part, attribute, rate)


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _optimizer(recipe: Recipe, params: Mapping[str, Value]) -> Optimizer:
    options = dict(recipe.options) | {name: params[name] for name in OPTIONS if name in params}
    optimizer = Optimizer(recipe.optimizer, **options)
    Updater(optimizer, {"": nn.Parameter(torch.zeros(2, 2))})  # torch checks values only when it makes the optimizer
    return optimizer


def _check(recipe: Recipe) -> None:
    for name in ("steps", "batch_size", "report", "checkpoint"):
        value = getattr(recipe, name)
        if value is None and name in ("report", "checkpoint"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise TrainError(f"'{name}' = {value!r}: a whole number, 1 or more")
    for name in ("warmup", "seed"):
        value = getattr(recipe, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise TrainError(f"'{name}' = {value!r}: a whole number, 0 or more")
    if recipe.precision not in ("fp32", "bf16"):
        raise TrainError(f"precision '{recipe.precision}' is unknown{nearest(str(recipe.precision), ('fp32', 'bf16'))}")
    for name in ("optimizer", "schedule"):
        if not isinstance(getattr(recipe, name), str):
            raise TrainError(f"'{name}' = {getattr(recipe, name)!r}: a name")
    if not recipe.objectives:
        raise TrainError("a recipe needs an objective: 'loss' or the name of a metric")
    for name in recipe.objectives:
        if name != "loss" and name not in recipe.metrics:
            raise TrainError(
                f"no metric is called '{name}', as an objective is{nearest(name, ['loss', *recipe.metrics])}"
            )


def _blame(own: Mapping[str, Value], params: Mapping[str, Value]) -> str:
    """Which choices of the trial are in question, ready to append to a message."""
    chosen = {**own, **{name: params[name] for name in OPTIONS if name in params}}
    return f" (chosen: {', '.join(f'{name} = {value!r}' for name, value in chosen.items())})" if chosen else ""


@lru_cache(maxsize=1)
def _made(source: Any) -> Data:
    try:
        return _fresh(source)
    except TypeError as problem:  # not to be taken for a source that cannot be hashed
        raise TuneError(f"the recipe's data cannot be had: {problem}") from problem


def _fresh(source: Any) -> Data:
    with seeded("data"), torch_seeded("data"):  # the same in each process: all of its trials share it
        return as_data(source)
