"""`weft tune`: a study from a TOML file with ``--a.b=c`` overrides; unknown keys and wrong types are refused."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
import typer
from torch import nn

from weft.cli import build
from weft.cli.arguments import AsJson, settings_of
from weft.cli.output import console, errors, print_json, printable, results_alone
from weft.config import (
    Config,
    DataSource,
    NamedSource,
    Names,
    RunTable,
    Train,
    convert,
    read_values,
    table_of,
    values_of,
)
from weft.data import Data, Loader, as_data
from weft.errors import ConfigError, WeftError
from weft.space import Space, Value
from weft.supernet import Chain, Factory, extract, initialise
from weft.tune.config import OLD_FIELDS, StudyConfig, StudyExecution
from weft.tune.recipe import OLD_FIELDS as OLD_RECIPE_FIELDS
from weft.tune.recipe import Recipe
from weft.utils.imports import import_object


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A choice from low to high: real, uniform in its logarithm with ``log``; whole numbers with ``step``."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | None = None


Option = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class StudyOptions(StudyExecution, StudyConfig):
    """How the study runs; the names are those of `weft.tune`."""

    name: str | None = None
    """name of the study; that of the file if not given"""
    folder: str = "runs"
    """the directory that holds the studies"""
    storage: str | None = None
    """`sqlite:///...`, `postgresql://...` or another URL of Optuna; a file in the study's directory if not given"""
    enqueue: tuple[dict[str, Option], ...] = ()
    """trials by hand, each a table of values; those that a table lacks are drawn"""


if TYPE_CHECKING:
    StudyTable = Any
    RecipeTable = Any
else:
    StudyTable = table_of(
        "StudyTable",
        StudyOptions,
        kinds={
            "maximize": Names,
            "minimize": Names,
            "sampler": str | dict[str, Any],
            "pruner": str | dict[str, Any] | None,
            "devices": Names | None,
            "enqueue": tuple[dict[str, Option], ...],
        },
    )
    RecipeTable = table_of(
        "RecipeTable",
        Recipe,
        kinds={
            "model": str | None,
            "data": str | DataSource,
            "metrics": Names,
            "objectives": Names | None,
            "model_inputs": Names | None,
            "optimizer_options": dict[str, Any],
        },
        model=None,
        data="digits",
        metrics=("accuracy",),
        objectives=None,
        optimizer_options={},
    )


class StudyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One study: what is tried, from which space, and how."""

    study: StudyTable = StudyTable()
    """how it runs; below"""
    space: dict[str, tuple[Option, ...] | Range] = {}
    """what is tried: a name with a list of options, or a range; below"""
    objective: str | None = None
    """`module:function` that takes a trial; otherwise there is a recipe"""
    recipe: RecipeTable | None = None
    """what every trial trains; below"""
    supernet: str | NamedSource | None = None
    """whose choices join the space: the model of a trial is its subnet, freshly initialised"""


RENAMED = {
    "runs": "study.folder",
    **{f"study.{before}": f"study.{now}" for before, now in OLD_FIELDS.items()},
    **{f"recipe.{before}": f"recipe.{now}" for before, now in OLD_RECIPE_FIELDS.items()},
}
"""What keys of a study were called before, and are called now."""


def read_study(path: Path | str, overrides: Sequence[str] = ()) -> StudyFile:
    """The study in a TOML file, its name that of the file if it has none; raises ConfigError in one clear line."""
    config = make_study(read_values(path), overrides)
    if config.study.name is None:
        named = msgspec.structs.replace(config.study, name=Path(path).stem)
        config = msgspec.structs.replace(config, study=named)
    return config


def make_study(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> StudyFile:
    """The study that a nested mapping means."""
    config = convert(values, overrides, StudyFile, RENAMED)
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


def space_of(config: StudyFile, supernet: Space | None = None) -> Space:
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


# From a study's configuration to the objects that it names: the arguments of ``weft.tune``.


@dataclass(frozen=True, eq=False)
class Reading:
    """Reads the data that a config names."""

    source: str | DataSource
    folder: Path = field(repr=False)
    """Of the config; it may move."""

    def __call__(self) -> Data:
        return build.data_of(Config(supernet="digits-conv", data=self.source), self.folder)


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
        several = (chain.inputs is not None and len(chain.inputs) > 1) or any(layer.extra_inputs for layer in route)
        example = None
        if several and self.data is not None:
            example = Loader(as_data(self.data()).train, 2, 0).batch(0)
        return extract(chain, subnet, example).train()


def tune_arguments(config: StudyFile, folder: Path) -> tuple[Any, Space, StudyConfig, StudyExecution]:
    """The first arguments of ``weft.tune``."""
    given = values_of(config.study)
    parts = [{entry.name: given[entry.name] for entry in fields(part)} for part in (StudyConfig, StudyExecution)]
    options = StudyConfig(**parts[0]), StudyExecution(**parts[1])
    if config.objective is not None:
        found = import_object(config.objective, folder)
        if not callable(found):
            raise ConfigError(f"objective '{config.objective}' is {type(found).__name__}: it must be a function")
        return found, space_of(config), *options
    assert config.recipe is not None
    recipe, chain = _recipe(config, config.recipe, folder)
    return recipe, space_of(config, None if chain is None else chain.space), *options


def _recipe(config: StudyFile, t: RecipeTable, folder: Path) -> tuple[Recipe, Chain | None]:
    plain = Config(
        supernet=config.supernet or "digits-conv",
        data=t.data,
        train=Train(loss=t.loss, seed=t.seed),
        run=RunTable(metrics=t.metrics),
    )
    load = Reading(t.data, folder.resolve())
    train, _, run = build.train_parts(plain, folder)
    chain: Chain | None = None
    model: Callable[[Mapping[str, Value]], nn.Module]
    if config.supernet is not None:
        supernet = build.supernet_of(plain, folder)
        if isinstance(supernet, Chain):
            raise ConfigError("a supernet that is tuned must be a function that makes it anew for each trial")
        chain = supernet()
        model = Subnets(supernet, load)
    else:
        assert t.model is not None
        model = import_object(t.model, folder)
        if not callable(model):
            raise ConfigError(f"recipe.model: '{t.model}' is {type(model).__name__}, which cannot be called")
    judged_by = (*_names(config.study.maximize), *_names(config.study.minimize))
    given = values_of(t) | {
        "model": model,
        "data": load,
        "loss": train.loss,
        "metrics": run.metrics,
        "objectives": _names(t.objectives) or judged_by or ("loss",),
        "model_inputs": None if t.model_inputs is None else _names(t.model_inputs),
    }
    return Recipe(**given), chain


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else given


# The verb that tunes: `tune` runs a study, many trainings at once on the devices there are.


def tune(
    context: typer.Context,
    config: Annotated[str, typer.Argument(help="A config.toml of a study.", metavar="CONFIG")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the study of this name.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a study of true trainings and print the best trials.

    Trials are proposed, packed onto the devices and trained. The exit code is 1 if every trial failed.
    """
    if config.startswith("--"):
        raise ConfigError(f"'{config}' stands where the config is expected: the config comes first, then its settings")
    path = Path(config)
    study = read_study(path, settings_of(context))
    from weft.tune.api import run_study
    from weft.tune.progress import LiveTable, summary

    arguments, own = tune_arguments(study, path.parent), study.study
    again = shlex.join(["weft", "tune", config, *context.args, "--resume"])
    plain = msgspec.to_builtins(study) | {"folder": str(path.parent.resolve())}
    plain["study"].pop("storage", None)  # it may hold a password
    try:
        with results_alone(), LiveTable(errors) as live:
            found = run_study(
                *arguments,
                own.name,
                own.folder,
                own.storage,
                resume,
                own.enqueue,
                [live.update],
                plain,
            )
    except KeyboardInterrupt:
        print(f"stopped; every trial that has ended is kept. Go on with: {again}", file=sys.stderr)
        raise
    if as_json:
        print_json(found.to_json())
    else:
        summary(console, found)
    if found.trials and all(record.state == "failed" for record in found.trials):
        error = str(found.trials[-1].info.get("error", "")).strip().splitlines()
        last = f"; the last: {error[-1]}" if error else ""
        print(printable(f"error: all {len(found.trials)} trials of '{found.name}' failed{last}"), file=sys.stderr)
        raise typer.Exit(1)
