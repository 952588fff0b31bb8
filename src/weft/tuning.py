"""From a study's configuration to the objects that it names: the arguments of ``weft.tune``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from weft import assembly
from weft.config import Config, DataSource, Source, Train, locate
from weft.data import Data, Loader, as_data
from weft.errors import ConfigError
from weft.space import Value
from weft.supernet import Chain, Factory, extract, initialise
from weft.tune import Recipe
from weft.tuneconfig import StudyConfig, Training, space_of


@dataclass(frozen=True, eq=False)
class Reading:
    """Reads the data that a config names."""

    source: str | DataSource
    folder: Path = field(repr=False)
    """Of the config; it may move."""

    def __call__(self) -> Data:
        return assembly.data_of(Config(supernet="digits-conv", data=self.source), self.folder)


@dataclass(frozen=True)
class Subnets:
    """Makes the module of a trial: the subnet that its values pick from a supernet, with fresh weights."""

    supernet: Factory
    data: Callable[[], Data] | None = field(default=None, repr=False)
    """Whence an example batch comes, for supernets that take several inputs."""

    def __call__(self, params: Mapping[str, Value]) -> nn.Module:
        # The weights follow from torch's generator, like those of any module that is made here.
        seed = int(torch.randint(2**62, ()).item())
        chain = self.supernet()
        subnet = chain.space.subnet({name: value for name, value in params.items() if name in chain.space.choices})
        route = chain.route(subnet)
        initialise(chain, seed, only=[layer.name for layer in route])
        several = (chain.inputs is not None and len(chain.inputs) > 1) or any(layer.side for layer in route)
        example = None
        if several and self.data is not None:
            example = Loader(as_data(self.data()).train, 2, 0).batch(0)
        return extract(chain, subnet, example).train()


def tune_arguments(config: StudyConfig, folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """The objective, the space, and the keyword arguments of ``weft.tune``."""
    s = config.study
    arguments = {**{name: getattr(s, name) for name in s.__struct_fields__}, "runs": config.runs}
    if config.objective is not None:
        found = locate(config.objective, folder)
        if not callable(found):
            raise ConfigError(f"objective '{config.objective}' is {type(found).__name__}: it must be a function")
        return found, space_of(config), arguments
    assert config.recipe is not None
    recipe, chain = _recipe(config, config.recipe, folder)
    return recipe, space_of(config, None if chain is None else chain.space), arguments


def _recipe(config: StudyConfig, t: Training, folder: Path) -> tuple[Recipe, Chain | None]:
    source = "digits-conv" if config.supernet is None else config.supernet
    plain = Config(
        supernet=source if isinstance(source, (str, Source)) else str(source),
        data=t.data,
        train=Train(loss=t.loss, metrics=t.metrics, seed=t.seed),
    )
    load = Reading(t.data, folder.resolve())
    found = assembly.train_arguments(plain, folder)
    chain: Chain | None = None
    model: Callable[[Mapping[str, Value]], nn.Module]
    if config.supernet is not None:
        supernet = assembly.supernet_of(plain, folder)
        if isinstance(supernet, Chain):
            raise ConfigError("a supernet that is tuned must be a function that makes it anew for each trial")
        chain = supernet()
        model = Subnets(supernet, load)
    else:
        assert t.model is not None
        model = locate(t.model, folder)
        if not callable(model):
            raise ConfigError(f"recipe.model: '{t.model}' is {type(model).__name__}, which cannot be called")
    return (
        Recipe(
            model=model,
            data=load,
            loss=found["loss"],
            metrics=found["metrics"],
            objectives=_names(t.objectives)
            or (*_names(config.study.maximize), *_names(config.study.minimize))
            or ("loss",),
            inputs=None if t.inputs is None else _names(t.inputs),
            **{name: getattr(t, name) for name in _PLAIN},
        ),
        chain,
    )


_PLAIN = (
    *("steps", "batch_size", "optimizer", "options", "schedule", "warmup", "precision"),
    *("report", "checkpoint", "seed", "accumulate_norms", "cuda_graphs"),
)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else given


def saved(config: StudyConfig, folder: Path) -> dict[str, Any]:
    """The configuration as plain values, for the study's manifest."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    plain["study"].pop("storage", None)  # it may hold a password
    return {**plain, "folder": str(folder.resolve())}
