"""What a study is, as typed values from TOML with ``--a.b=c`` overrides; unknown keys and wrong types are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weft.config import DataSource, Names, Source, convert, read_values
from weft.errors import ConfigError, WeftError
from weft.space import Space


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A choice from low to high: real, uniform in its logarithm with ``log``; whole numbers with ``step``."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | None = None


Option = bool | int | float | str


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the study runs; the names are those of ``weft.tune``."""

    trials: int = 50
    name: str | None = None
    maximize: Names = ()
    minimize: Names = ()
    sampler: str | dict[str, Any] = "tpe"
    pruner: str | dict[str, Any] | None = None
    window: int = 7
    seed: int = 0
    storage: str | None = None
    executor: str = "local"
    devices: Names | None = None
    workers: int | None = None
    memory: str | int | None = None
    fuse: int = 1
    retries: int = 3
    seconds: float | None = None
    threads: int = 1
    mps: str = "auto"
    enqueue: tuple[dict[str, Option], ...] = ()
    """Trials by hand, each a table of values; those that a table lacks are drawn."""


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every trial trains; the names are those of ``weft.tune.Recipe``."""

    model: str | None = None
    """``module:function`` that makes a module from a trial's values; left out where there is a supernet."""
    data: str | DataSource = "digits"
    loss: str = "cross_entropy"
    metrics: Names = ("accuracy",)
    objectives: Names | None = None
    """Those of the study if left out."""
    inputs: Names | None = None
    steps: int = 1000
    batch_size: int = 64
    optimizer: str = "adamw"
    options: dict[str, Any] = {}
    schedule: str = "constant"
    warmup: int = 0
    precision: str = "fp32"
    report: int | None = None
    checkpoint: int | None = None
    seed: int = 0
    accumulate_norms: bool = False
    cuda_graphs: bool = True


class StudyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One study: what is tried, from which space, and how."""

    study: Study = Study()
    space: dict[str, tuple[Option, ...] | Range] = {}
    objective: str | None = None
    """``module:function`` that takes a trial; otherwise there is a recipe."""
    recipe: Training | None = None
    supernet: str | Source | None = None
    """Whose choices join the space: the model of a trial is its subnet, freshly initialised."""
    runs: str = "runs"


def read_study(path: Path | str, overrides: Sequence[str] = ()) -> StudyConfig:
    """The study in a TOML file, its name that of the file if it has none; raises ConfigError in one clear line."""
    config = make_study(read_values(path), overrides)
    if config.study.name is None:
        named = msgspec.structs.replace(config.study, name=Path(path).stem)
        config = msgspec.structs.replace(config, study=named)
    return config


def make_study(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> StudyConfig:
    """The study that a nested mapping means."""
    config = convert(values, overrides, StudyConfig)
    if (config.objective is None) == (config.recipe is None):
        raise ConfigError(
            'a study tries either an objective ("module:function") or a [recipe]; the config has '
            f"{'both' if config.recipe else 'neither'}"
        )
    if config.objective is not None and config.supernet is not None:
        raise ConfigError("a supernet needs a [recipe], which trains its subnets; an objective makes its own models")
    if config.recipe is not None and (config.recipe.model is None) == (config.supernet is None):
        raise ConfigError(
            'the model of a trial is made by recipe.model ("module:function") or is a subnet of a supernet; the config '
            f"has {'both' if config.supernet else 'neither'}"
        )
    return config


def space_of(config: StudyConfig, supernet: Space | None = None) -> Space:
    """The choices of the supernet, if there is one, and after them those of the config."""
    space = Space() if supernet is None else Space.from_json(supernet.to_json())
    for name, given in config.space.items():
        try:
            _add(space, name, given)
        except WeftError as problem:
            raise ConfigError(f"space.{name}: {problem}") from None
    return space


def _add(space: Space, name: str, given: tuple[Option, ...] | Range) -> None:
    if isinstance(given, Range):
        whole = isinstance(given.low, int) and isinstance(given.high, int)
        if given.step is not None:
            if given.log or not whole:
                raise ConfigError("whole numbers have a whole low, high and step, and no log")
            space.integer(name, int(given.low), int(given.high), given.step)
        elif whole and not given.log:
            raise ConfigError(
                f"{given.low} to {given.high}: add step = 1 for whole numbers, or write {given.low}.0 for real ones"
            )
        else:
            space.real(name, float(given.low), float(given.high), given.log)
    elif given and all(isinstance(option, int) and not isinstance(option, bool) for option in given):
        space.integer(name, [int(option) for option in given])
    else:
        space.categorical(name, given)
