"""From a configuration to the objects it names: the supernet, the data, and the arguments of ``weft.train``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from weft import zoo
from weft.config import SGD, Config, DataSource, Source, locate
from weft.data import Data, as_data, open_data
from weft.engine.bilevel import Bilevel
from weft.engine.losses import accuracy, cross_entropy, mean_squared_error
from weft.engine.optimizer import Optimizer, is_named
from weft.errors import ConfigError, RunError, WeftError, nearest
from weft.offload.config import OffloadConfig
from weft.supernet import Chain, Factory
from weft.trainer.api import TrainedRun, load_run

FUNCTIONS = {"accuracy": accuracy, "cross_entropy": cross_entropy, "mean_squared_error": mean_squared_error}


def supernet_of(config: Config, folder: Path, data: Data | None = None) -> Chain | Factory:
    """A supernet of the zoo by name, or the user's own by ``module:attribute``.

    A function that takes a ``vocabulary`` gets the size of the data's, unless the config gives one; the data is read
    for that if it is not at hand.
    """
    source = _source(config.supernet)
    found = locate(source.source, folder) if ":" in source.source else zoo.find(source.source)
    if isinstance(found, Chain):
        return found
    if not callable(found):
        raise ConfigError(
            f"supernet '{source.source}' is {type(found).__name__}: it must be a Chain or a function that makes one"
        )
    if "vocabulary" in _parameters(found) and "vocabulary" not in source.options:
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
        found = locate(source.source, folder)
        if callable(found):
            _check_options("data", found, source)
            found = found(**source.options)
        return as_data(found, config.train.seed)
    return open_data(source.source if source.path else _beside(source.source, folder), **source.options)


def train_arguments(config: Config, folder: Path) -> dict[str, Any]:
    """The keyword arguments of ``weft.train`` that decide the result."""
    t = config.train
    metrics = (t.metrics,) if isinstance(t.metrics, str) else t.metrics
    return {
        "steps": t.steps,
        "batch_size": t.batch_size,
        "microbatches": t.microbatches,
        "stream": str(folder / t.stream) if (folder / t.stream).is_file() else t.stream,
        "seed": t.seed,
        "schedule": _schedule(t.schedule, folder),
        "warmup": t.warmup,
        "clip": t.clip,
        "precision": t.precision,
        "nonfinite": t.nonfinite,
        "device": _device(t.device),
        "loss": _function("train.loss", t.loss, folder),
        "metrics": {spec.rpartition(":")[2]: _function("train.metrics", spec, folder) for spec in metrics},
        "augment": _made("train.augment", t.augment, folder),
        "optimizer": _optimizer(config.optimizer, folder),
        "consistency": config.consistency or None,
        "validate": t.validate,
        "rescale": t.rescale,
        "workers": t.workers,
        "cuda_graphs": t.cuda_graphs,
        "channels_last": t.channels_last,
        "residency": _residency(config),
    }


def extra_arguments(config: Config, folder: Path) -> dict[str, Any]:
    """The keyword arguments of ``weft.train`` that say where and from what it starts."""
    t = config.train
    beside = folder / t.init if t.init else None
    return {
        "run": config.run,
        "runs": config.runs,
        "init": None if t.init is None else beside if beside is not None and beside.exists() else t.init,
        "checkpoint_every": t.checkpoint_every,
        "keep": t.keep,
        "stages": t.stages,
        "cut": t.cut,
        "window": t.window,
        "split_backward": t.split_backward,
        "prefer": t.prefer,
        "trace": t.trace,
        "restarts": t.restarts,
    }


def gradient_arguments(config: Config, folder: Path) -> dict[str, Any]:
    """The keyword arguments of ``weft.search`` with a gradient method, without those of ``extra_arguments``.

    The stream is the method's own: it says which subnets are trained.
    """
    s = config.search
    if (s.warmup is not None and s.warmup < 0) or (s.rate is not None and not s.rate > 0):
        raise ConfigError(f"search.warmup is 0 or more and search.rate above 0, not {s.warmup} and {s.rate}")
    usual = Bilevel().optimizer
    return {
        **{name: value for name, value in train_arguments(config, folder).items() if name != "stream"},
        "method": s.method,
        "targets": s.targets,
        "architecture": None if s.rate is None else Optimizer(usual.kind, **{**usual.options, "lr": s.rate}),
        "warmup_weights": s.warmup,
        "pick": s.pick,
        "budget": s.budget,
        "recalibrate": s.recalibrate,
        "name": s.name,
    }


def set_threads(config: Config) -> None:
    """The number of threads is part of what a fingerprint depends on."""
    threads = config.train.threads
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"train.threads = {threads}: it is 1 or more")
        torch.set_num_threads(threads)


def open_trained(config: Config, folder: Path) -> TrainedRun:
    """The run that a configuration names, from disk."""
    set_threads(config)
    path = Path(config.runs) / str(config.run)
    if not (path / "manifest.json").is_file():
        others = [file.parent.name for file in path.parent.glob("*/manifest.json")]
        raise RunError(f"there is no run in '{path}': train it first (weft train){nearest(path.name, others)}")
    data = data_of(config, folder)
    return load_run(path, supernet_of(config, folder, data), data, **train_arguments(config, folder))


def _source(value: str | Source) -> Source:
    return Source(value) if isinstance(value, str) else value


def _beside(path: str, folder: Path) -> str:
    """The path from the config's folder, where that leads to something; else as it is."""
    beside = folder / Path(path).expanduser()
    return str(beside) if beside.exists() else path


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions that are not written in Python do not tell what they take
        return {}


def _check_options(what: str, function: Callable[..., Any], source: Source) -> None:
    try:
        inspect.signature(function).bind(**source.options)
    except TypeError as problem:
        raise ConfigError(f"{what}.options do not fit '{source.source}': {problem}") from None
    except ValueError:  # some functions that are not written in Python do not tell what they take
        return


def _device(name: str) -> str:
    try:
        torch.device(name)
    except RuntimeError:
        raise ConfigError(f"train.device = '{name}' is no device: use cpu, cuda, or cuda:N") from None
    return name


def _optimizer(options: Mapping[str, Any], folder: Path) -> Optimizer:
    given = dict(options) if "kind" in options else {**SGD, **options}
    kind = given.pop("kind")
    if not isinstance(kind, str):
        raise ConfigError(f'optimizer.kind must be text, not {type(kind).__name__}: for example kind = "adamw"')
    if ":" in kind:
        name, kind = kind, locate(kind, folder)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ConfigError(f"optimizer.kind: '{name}' is not a class of optimizers as in torch.optim")
    if "groups" in given and ":" in str(given["groups"]):
        given["groups"] = locate(str(given["groups"]), folder)
    if "others" in given:
        if not isinstance(given["others"], dict):
            raise ConfigError('optimizer.others must be a table, such as {kind = "adamw", lr = 1e-3}')
        given["others"] = _optimizer(given["others"], folder)
    return Optimizer(kind, **given)


def _residency(config: Config) -> OffloadConfig | None:
    said = config.residency
    return None if said.budget is None else OffloadConfig(said.budget, said.prefetch)


def _schedule(spec: str, folder: Path) -> Any:
    # A colon separates code from its module, and in cosine:0.1 a schedule from where it ends.
    return _made("train.schedule", spec, folder) if ":" in spec and not is_named(spec) else spec


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
    found = locate(spec, folder)
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
