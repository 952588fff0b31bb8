"""A setting: the recipe of a study with one trial's own values in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Batch, Data, Loader, Source, Subset, Tensors, Text, as_data
from weft.engine.losses import cross_entropy
from weft.engine.optimizer import LayerOptimizer, Optimizer, Schedule, make_schedule
from weft.engine.train_step import Loss, Metric
from weft.errors import TrainError, TuneError, nearest
from weft.nn.state import evaluation_mode
from weft.space import Value
from weft.trainer.evaluate import Scores
from weft.utils.rng import fork_rng, torch_seeded
from weft.zoo.gpt import CausalAttention

FIELDS = (
    *("steps", "batch_size", "optimizer", "lr_schedule", "warmup_steps"),
    *("precision", "report_every", "checkpoint_every", "seed"),
)
"""Fields of a recipe that a choice of the same name replaces. Any other choice is the model's own affair."""
OPTIONS = ("lr", "weight_decay", "momentum")
"""Options of the optimizer that a choice of the same name replaces."""
TARGETS = ("label", "targets", "y")
"""Entries of a batch that are not the model's input unless the recipe says so."""


_newest: list[tuple[object, Data]] = []
"""The newest data set, with what it was made of."""


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """All that one trial's result depends on, apart from the device and how its batches are cut."""

    params: Mapping[str, Value]
    model: Callable[[Mapping[str, Value]], nn.Module]
    source: Data | Callable[[], Data]
    loss: Loss
    metrics: Mapping[str, Metric]
    objectives: tuple[str, ...]
    model_inputs: tuple[str, ...] | None
    steps: int
    batch_size: int
    optimizer: Optimizer
    lr_schedule: Schedule
    precision: str
    dropout: float | None
    """Of every dropout in the model; None leaves them as the model has them."""
    report_every: int | None
    checkpoint_every: int | None
    seed: int
    microbatch_batchnorm: bool
    cuda_graphs: bool

    def data(self) -> Data:
        """The data set; one that is made by a function is kept for the next trial of the process."""
        if not _newest or _newest[0][0] is not self.source:
            with fork_rng("data"), torch_seeded("data"):  # the same in each process: all of its trials share it
                _newest[:] = [(self.source, as_data(self.source))]
        return _newest[0][1]

    def bare(self) -> nn.Module:
        """The module, its weights drawn from wherever torch draws now: for who needs shapes alone. What it draws from
        Python's and NumPy's generators, which shapes may follow from, is keyed by the trial's seed."""
        with fork_rng(self.seed, "init"):
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
        names = tuple(name for name in batch if name not in TARGETS) if self.model_inputs is None else self.model_inputs
        missing = [name for name in names if name not in batch]
        if missing or not names:
            raise TuneError(
                f"the model takes {', '.join(names) or 'an input'}, but a batch has {', '.join(batch) or 'nothing'}: "
                "name them in model_inputs of the recipe"
            )
        return tuple(batch[name] for name in names)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """A block in which forwards compute in the trial's precision."""
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def scores(self) -> Scores:
        """Of the objectives alone."""
        metrics = {name: metric for name, metric in self.metrics.items() if name in self.objectives}
        return Scores(self.loss if "loss" in self.objectives else None, metrics)

    def evaluate(self, model: nn.Module, source: Source, size: int, device: torch.device) -> tuple[float, ...]:
        """The objectives in order, from batches of at most so many samples; the model is on the device already."""
        found, loader = self.scores(), Loader(source, size, 0, shuffle=False, device=device)
        with torch.no_grad(), evaluation_mode(model), closing(loader.all()) as batches:
            for batch in batches:
                with self.autocast(device):
                    found.add(model(*self.enter(batch)), batch)
        means = found.means()
        return tuple(means[name] for name in self.objectives)

    def describe(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be of this trial, as plain values."""
        return {
            "params": {name: self.params[name] for name in sorted(self.params)},
            "steps": self.steps,
            "batch_size": self.batch_size,
            "optimizer": {name: str(value) for name, value in self.optimizer.describe().items()},
            "schedule": str(getattr(self.lr_schedule, "__qualname__", self.lr_schedule)),
            "precision": self.precision,
            "seed": self.seed,
        }


def trial_config(recipe: Recipe, params: Mapping[str, Value]) -> TrialConfig:
    """The recipe with the trial's values in place; a TuneError names the choice whose value cannot be."""
    own = {name: params[name] for name in FIELDS if name in params}
    try:
        recipe = replace(recipe, **own)  # type: ignore[arg-type]  # checked below
        _check(recipe)
        optimizer = _optimizer(recipe, params)
        schedule = make_schedule(recipe.lr_schedule, recipe.warmup_steps)
    except TrainError as problem:
        raise TuneError(f"{problem}{_blame(own, params)}") from problem
    dropout = params.get("dropout")
    if dropout is not None and (isinstance(dropout, bool | str) or not 0.0 <= dropout < 1.0):
        raise TuneError(f"choice 'dropout' = {dropout!r}: a dropout is a number from 0 to below 1")
    given: dict[str, Any] = {
        "params": dict(params),
        "source": recipe.data,
        "optimizer": optimizer,
        "lr_schedule": schedule,
        "dropout": None if dropout is None else float(dropout),
        "checkpoint_every": recipe.report_every if recipe.checkpoint_every is None else recipe.checkpoint_every,
    }
    same = {entry.name for entry in fields(TrialConfig)} - given.keys()
    return TrialConfig(**given, **{name: getattr(recipe, name) for name in same})


def dropouts(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Every part of a module that drops, with the attribute that says how often."""
    for part in module.modules():
        if isinstance(part, DROPOUTS):
            yield part, "p"
        elif isinstance(part, nn.MultiheadAttention) or (isinstance(part, nn.RNNBase) and part.num_layers > 1):
            yield part, "dropout"
        elif isinstance(part, CausalAttention):
            yield part, "drop"


def set_dropout(module: nn.Module, rate: float) -> None:
    for part, attribute in dropouts(module):
        setattr(part, attribute, rate)


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _optimizer(recipe: Recipe, params: Mapping[str, Value]) -> Optimizer:
    options = dict(recipe.optimizer_options) | {name: params[name] for name in OPTIONS if name in params}
    optimizer = Optimizer(recipe.optimizer, **options)
    LayerOptimizer(
        optimizer, {"": nn.Parameter(torch.zeros(2, 2))}
    )  # torch checks values only when it makes the optimizer
    return optimizer


def _check(recipe: Recipe) -> None:
    least = {"steps": 1, "batch_size": 1, "report_every": 1, "checkpoint_every": 1, "warmup_steps": 0, "seed": 0}
    for name, value in ((name, getattr(recipe, name)) for name in least):
        if value is not None and not (isinstance(value, int) and value >= least[name]):
            raise TrainError(f"'{name}' = {value!r}: a whole number, {least[name]} or more")
    if recipe.precision not in ("fp32", "bf16"):
        raise TrainError(f"precision '{recipe.precision}' is unknown{nearest(str(recipe.precision), ('fp32', 'bf16'))}")
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


CONTINUOUS = ("lr", "weight_decay", "momentum", "dropout", "seed")
"""Names of choices that change no shape: trials that differ in these alone can be fused."""


OLD_FIELDS = {
    "inputs": "model_inputs",
    "options": "optimizer_options",
    "schedule": "lr_schedule",
    "warmup": "warmup_steps",
    "report": "report_every",
    "checkpoint": "checkpoint_every",
    "accumulate_norms": "microbatch_batchnorm",
}
"""What fields of a recipe were called before, and are called now."""
OLD_CHOICES = ("schedule", "warmup", "report", "checkpoint")
"""Of these, those whose place a choice of the same name took."""


def refuse_old_names(names: Iterable[str]) -> None:
    """TuneError for a name that fields of a recipe had before, with the one that they have now."""
    for name in names:
        if name in OLD_FIELDS:
            raise TuneError(f"'{name}' of a recipe is called '{OLD_FIELDS[name]}' now")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every trial of a study trains. ``model(params)`` builds the module of a trial from its values, those of
    derived dimensions among them, anywhere and on any device.

    What the space has under the name of a field below, or of an option of the optimizer (``lr``, ``weight_decay``,
    ``momentum``), takes its place in that trial; ``dropout`` sets every dropout of the model.
    """

    model: Callable[[Mapping[str, Value]], nn.Module]
    """`module:function` that makes a module from a trial's values; left out where there is a supernet"""
    data: Data | Callable[[], Data]
    """as `data` of a run"""
    loss: Loss = cross_entropy
    """`cross_entropy`, `mean_squared_error`, or code"""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """`accuracy`, or code: `module:function`"""
    objectives: tuple[str, ...] = ("loss",)
    """what a trial is judged by, on the validation part: `loss` or names of metrics"""
    model_inputs: tuple[str, ...] | None = None
    """entries of a batch that the model takes, in order; all but the targets if not given"""
    steps: int = 1000
    """training steps of a trial"""
    batch_size: int = 64
    """the effective one, whatever the micro-batches"""
    optimizer: str = "adamw"
    """a class of torch.optim"""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    """of the optimizer; a choice called `lr`, `weight_decay`, `momentum` takes its place"""
    lr_schedule: str = "constant"
    """of the learning rate: `constant`, `linear`, `cosine`, `cosine:0.1` (down to a tenth), or code"""
    warmup_steps: int = 0
    """steps over which the learning rate rises, linearly"""
    precision: str = "fp32"
    """`fp32` or `bf16`"""
    report_every: int | None = None
    """steps between two reports, each with an evaluation; only at the end if not given"""
    checkpoint_every: int | None = None
    """steps between two checkpoints; with every report if not given"""
    seed: int = 0
    """seed of weights and batches"""
    microbatch_batchnorm: bool = False
    """whether a batch may be cut into micro-batches although the model has batch norms, which then see less"""
    cuda_graphs: bool = True
    """whether steps become CUDA graphs on a GPU; no result depends on it. Switch it off for a model or a loss whose
    steps depend on a global variable"""


_init = Recipe.__init__


@wraps(_init)
def _refusing_old_names(recipe: Recipe, **given: Any) -> None:
    refuse_old_names(given)
    _init(recipe, **given)


Recipe.__init__ = _refusing_old_names  # type: ignore[assignment, method-assign]


# Data that a trial keeps on its device, since it is small.

SMALL = 64 * 2**20
"""Bytes of data that are worth keeping on the device rather than sending batch by batch."""


def resident(data: Data) -> int:
    """Bytes of the data set on a device that is not the CPU: all of it where it is small and in memory, else 0."""
    sources = {id(source): source for source in map(_source, data.parts().values())}
    total = sum(map(_bytes, sources.values()))
    return int(total) if total <= SMALL else 0


def _source(part: Source) -> Source:
    return _source(part.source) if isinstance(part, Subset) else part


def _bytes(source: Source) -> float:
    if isinstance(source, Text):
        return source.tokens.nbytes
    if isinstance(source, Tensors):
        return sum(tensor.nbytes for tensor in source._named.values())
    return float("inf")
