"""From a configuration to the objects that it names: the supernet, the data, and the configs of ``weft.train``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from weft import zoo
from weft.config import Config, DataSource, NamedSource, values_of
from weft.data import Data, as_data, open_data
from weft.engine.bilevel import Bilevel
from weft.engine.losses import accuracy, cross_entropy, mean_squared_error
from weft.engine.optimizer import Optimizer, is_named
from weft.errors import ConfigError, RunError, WeftError, nearest
from weft.offload.config import OffloadConfig
from weft.search.gradient import GradientSearchConfig
from weft.supernet import Chain, Factory
from weft.trainer.api import TrainedRun, load_run
from weft.trainer.config import Execution, Parts, RunConfig, TrainConfig, Validation, at_least
from weft.utils.imports import import_object

FUNCTIONS = {"accuracy": accuracy, "cross_entropy": cross_entropy, "mean_squared_error": mean_squared_error}


def supernet_of(config: Config, folder: Path, data: Data | None = None) -> Chain | Factory:
    """A supernet of the zoo by name, or the user's own by ``module:attribute``.

    A function that takes a ``vocabulary`` gets the size of the data's, unless the config gives one; the data is read
    for that if it is not at hand.
    """
    source = NamedSource(config.supernet) if isinstance(config.supernet, str) else config.supernet
    found = import_object(source.source, folder) if ":" in source.source else zoo.find(source.source)
    if isinstance(found, Chain):
        return found
    if not callable(found):
        raise ConfigError(
            f"supernet '{source.source}' is {type(found).__name__}: it must be a Chain or a function that makes one"
        )
    if "vocabulary" in inspect.signature(found).parameters and "vocabulary" not in source.options:
        size = (data or data_of(config, folder)).info.get("size")
        if isinstance(size, int):
            source = replace(source, options={**source.options, "vocabulary": size})
    _check_options("supernet", found, source)
    return partial(found, **source.options) if source.options else found


def data_of(config: Config, folder: Path) -> Data:
    """Embedded data by name, data at a path from the config's folder, or the user's own by ``module:attribute``.

    A ``path`` beside the name goes to whatever reads the data.
    """
    source = DataSource(config.data) if isinstance(config.data, str) else config.data
    if not source.source and source.path is None:
        raise ConfigError('the config lacks \'data.source\': for example data.source = "text", or data.path = "x.npz"')
    if source.path is not None:
        if "path" in source.options:
            raise ConfigError("data.path and data.options.path are one and the same: give one of them")
        place = _beside(source.path, folder)
        if not Path(place).exists():
            raise ConfigError(f"data.path = '{source.path}': there is no such file or folder, here or in {folder}")
        if not source.source:
            return open_data(place, **source.options)
        source = replace(source, options={"path": place, **source.options})
    if ":" in source.source:
        found = import_object(source.source, folder)
        if callable(found):
            _check_options("data", found, source)
            found = found(**source.options)
        return as_data(found, config.train.seed)
    return open_data(source.source if source.path else _beside(source.source, folder), **source.options)


def train_parts(config: Config, folder: Path) -> Parts:
    """The three configs of ``weft.train``."""
    train, execution, offload = values_of(config.train), values_of(config.execution), values_of(config.offload)
    stream, init, distill = folder / train["stream"], train["init_from"], train["distill"]
    train |= {
        "stream": str(stream) if stream.is_file() else train["stream"],
        "loss": _function("train.loss", train["loss"], folder),
        "augment": _made("train.augment", train["augment"], folder),
        "distill": distill if isinstance(distill, bool) else _made("train.distill", distill, folder),
        "init_from": str(folder / init) if init and (folder / init).exists() else init,
        "optimizer": _optimizer(config.optimizer, folder),
        "consistency": config.consistency or None,
    }
    execution["offload"] = None if offload["budget"] is None else OffloadConfig(**offload)
    return TrainConfig(**train), Execution(**execution), _run(config, folder)


def _run(config: Config, folder: Path) -> RunConfig:
    run = values_of(config.run)
    metrics = (run["metrics"],) if isinstance(run["metrics"], str) else run["metrics"]
    run["metrics"] = {spec.rpartition(":")[2]: _function("run.metrics", spec, folder) for spec in metrics}
    if isinstance(run["validation"], Struct):
        run["validation"] = Validation(**values_of(run["validation"]))
    return RunConfig(**run, source={**to_builtins(config), "folder": str(folder.resolve())})


def gradient_search(config: Config) -> GradientSearchConfig:
    """The options of a search by a gradient method."""
    s = config.search
    if s.rate is not None and not s.rate > 0:
        raise ConfigError(f"search.rate is above 0, not {s.rate}")
    default = Bilevel().optimizer
    return GradientSearchConfig(
        method=str(s.method),
        targets=s.targets,
        architecture=None if s.rate is None else Optimizer(default.kind, **{**default.options, "lr": s.rate}),
        weight_warmup_steps=s.weight_warmup_steps,
        pick=s.pick,
        budget=s.budget,
        bn_batches=s.bn_batches,
        search_name=s.name,
    )


def set_threads(config: Config) -> None:
    """The number of threads is part of what a fingerprint depends on."""
    threads = config.execution.threads
    if threads is not None:
        at_least("execution.threads", threads, 1)
        torch.set_num_threads(threads)


def open_trained(config: Config, folder: Path) -> TrainedRun:
    """The run that a configuration names, from disk."""
    set_threads(config)
    path = config.path
    if not (path / "manifest.json").is_file():
        others = [file.parent.name for file in path.parent.glob("*/manifest.json")]
        raise RunError(f"there is no run in '{path}': train it first (weft train){nearest(path.name, others)}")
    data = data_of(config, folder)
    train, execution, run = train_parts(config, folder)
    fields = {name: getattr(part, name) for part in (train, execution) for name in part.__dataclass_fields__}
    return load_run(path, supernet_of(config, folder, data), data, **fields, metrics=run.metrics)


def _beside(path: str, folder: Path) -> str:
    """The path from the config's folder, where that leads to something; else as it is."""
    beside = folder / Path(path).expanduser()
    return str(beside) if beside.exists() else path


def _check_options(what: str, function: Callable[..., Any], source: NamedSource) -> None:
    try:
        inspect.signature(function).bind(**source.options)
    except TypeError as problem:
        raise ConfigError(f"{what}.options do not fit '{source.source}': {problem}") from None


def _optimizer(options: Mapping[str, Any], folder: Path) -> Optimizer:
    given = dict(options)
    kind = given.pop("kind", None)
    if kind is not None and not isinstance(kind, str):
        raise ConfigError(f'optimizer.kind must be text, not {type(kind).__name__}: for example kind = "adamw"')
    if kind is not None and ":" in kind:
        name, kind = kind, import_object(kind, folder)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ConfigError(f"optimizer.kind: '{name}' is not a class of optimizers as in torch.optim")
    if "groups" in given and ":" in str(given["groups"]):
        given["groups"] = import_object(str(given["groups"]), folder)
    if "others" in given:
        if not isinstance(given["others"], dict):
            raise ConfigError('optimizer.others must be a table, such as {kind = "adamw", lr = 1e-3}')
        given["others"] = _optimizer(given["others"], folder)
    schedule = str(given.get("schedule", ""))
    if ":" in schedule and not is_named(schedule):  # cosine:0.1 is a schedule and where it ends
        given["schedule"] = _made("optimizer.schedule", schedule, folder)
    return Optimizer(kind, **given)


def _function(key: str, spec: str, folder: Path) -> Any:
    if ":" in spec:
        return _made(key, spec, folder)
    if spec not in FUNCTIONS:
        raise ConfigError(
            f"{key}: '{spec}' is neither module:function nor a name that is known{nearest(spec, FUNCTIONS)}"
        )
    return FUNCTIONS[spec]


def _made(key: str, spec: str | None, folder: Path) -> Any:
    """A callable by name; a class, or a function without arguments, is called for it."""
    if spec is None:
        return None
    found = import_object(spec, folder)
    if isinstance(found, type) or (inspect.isfunction(found) and not inspect.signature(found).parameters):
        try:
            found = found()
        except WeftError:
            raise
        except Exception as problem:
            raise ConfigError(f"'{spec}' cannot be made: {type(problem).__name__}: {problem}") from problem
    if not callable(found):
        raise ConfigError(f"{key}: '{spec}' is {type(found).__name__}, which cannot be called")
    return found
