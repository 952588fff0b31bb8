"""One harness for both sides of a rename: names and options are written as they are to be, and looked up as they are.

A helper that moved gets one more word in a `first(...)`, an option that was renamed one line in `RENAMED`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import weft

RENAMED = {  # the new word of an option: the old one
    "architecture_search": "bilevel",
    "bn_batches": "recalibrate",
    "checkpoint_every": "checkpoint",  # of recipes; those of runs have the new word already
    "constraints": "keep",
    "data_workers": "workers",
    "distill": "distil",
    "init_from": "init",
    "jobs_per_device": "workers",
    "keep_checkpoints": "keep",
    "lr_schedule": "schedule",
    "max_in_flight": "window",
    "max_restarts": "restarts",
    "max_retries": "retries",
    "microbatch_batchnorm": "accumulate_norms",
    "model_inputs": "inputs",
    "offload": "residency",
    "on_nonfinite": "nonfinite",
    "optimizer_options": "options",
    "report_every": "report",
    "throughput": "sharing",
    "time_limit": "seconds",
    "timeout": "seconds",
    "tolerance": "gap",
    "validation": "validate",
    "warmup_steps": "warmup",
    "weight_warmup_steps": "warmup_weights",
}
OF_THE_OPTIMIZER = ("clip", "schedule", "warmup_steps")
"""Options of `train` that are to be the optimizer's."""
CONFIGS = ("TrainConfig", "Execution", "RunConfig", "GradientSearchConfig")
"""Dataclasses whose fields `train` and its kin are to take by name."""


def first(*homes: str) -> Any:
    """The first that exists of several homes of a name, each as ``module:name``; the newest come first."""
    for home in homes:
        module, _, name = home.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise LookupError(f"none of {', '.join(homes)} exists: add the new home in benchmarks/golden")


def tree() -> Path:
    """The checkout whose weft is measured, which need not be that of this harness."""
    return Path(weft.__file__).parents[2]


def known(function: Any) -> set[str]:
    """The options that a function or a class takes, those of the configs among them where it takes any."""
    parameters = inspect.signature(function).parameters.values()
    names = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
    if "options" in names and getattr(function, "__module__", "").startswith("weft.plan"):
        with contextlib.suppress(LookupError):  # the old tree has none
            names |= {each.name for each in fields(first("weft.plan.options:PlanOptions"))}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        for config in (getattr(weft, name, None) for name in CONFIGS):
            names |= {each.name for each in fields(config)} if is_dataclass(config) else set()
    return names


def spelled(options: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """The options under the words that are known; one that is in neither way is left to be refused."""
    return {name if name in names else RENAMED.get(name, name): value for name, value in options.items()}


def optimizer(kind: str, **options: Any) -> Any:
    return weft.Optimizer(kind, **options)


def train_options(function: Any, name: str, folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `weft.train` and of searches that train. ``optimizer`` is a kind and its options."""
    names = known(weft.train)
    given = dict(options)
    kind, more = given.pop("optimizer", ("sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}))
    stays, moved = {}, {}
    for word in OF_THE_OPTIMIZER:
        if word in given:
            old = RENAMED.get(word, word)
            (stays if old in names else moved)[old if old in names else word] = given.pop(word)
    config = getattr(weft, "RunConfig", None)
    place = {"run": name, "runs": folder} if config is None else {"run": config(name=name, folder=folder)}
    given["optimizer"] = optimizer(kind, **more, **moved)
    return {**spelled(given, names | known(function)), **stays, **place}


def train(net: Any, data: Any, *, name: str, folder: Path, **options: Any) -> Any:
    return weft.train(net, data, **train_options(weft.train, name, folder, options))


def search_gradient(net: Any, data: Any, *, name: str, folder: Path, **options: Any) -> Any:
    function = first(
        "weft.search.gradient.api:gradient_search", "weft:search_gradient", "weft.search.gradient.entry:gradient_search"
    )
    return function(net, data, **train_options(function, name, folder, options))


def search(run: Any, **options: Any) -> Any:
    """A front with inherited weights."""
    function = first("weft.search.api:search", "weft.search.entry:search_trained", "weft:search")
    return call(function, run, **options)


def tune(objective: Any, space: Any, *, name: str, folder: Path, **options: Any) -> Any:
    """`weft.tune`; ``max_concurrent`` is one more than the old ``window``, ``device_memory`` was ``memory``."""
    function = tune_function()
    names = known(function)
    for config in ("StudyConfig", "StudyExecution"):
        with contextlib.suppress(LookupError):  # the old tree has none
            names |= {each.name for each in fields(first(f"weft.tune.config:{config}"))}
    given = dict(options)
    if "max_concurrent" in given and "max_concurrent" not in names:
        given["window"] = given.pop("max_concurrent") - 1
    for word in ("device_memory", "trial_memory"):
        if word in given and word not in names:
            given["memory"] = given.pop(word)
    home = next(word for word in ("folder", "runs") if word in names)
    return function(objective, space, name=name, **{home: folder}, **spelled(given, names))


def tune_function() -> Any:
    return first("weft.tune.api:tune", "weft.tune.entry:tune", "weft.tune:tune", "weft:tune")


def recipe(**options: Any) -> Any:
    return call(first("weft.tune:Recipe", "weft:Recipe"), **options)


def call(function: Any, *arguments: Any, **options: Any) -> Any:
    """A function with its options under the words that it knows."""
    return function(*arguments, **spelled(options, known(function)))


Word = str | tuple[str, str]
"""A word of a command line, or the new one and the old one."""


def command(*words: Word) -> tuple[int, str]:
    """The exit code and what is printed of `weft WORDS`, run in this process; old words where the new are refused."""
    spellings = {tuple(w if isinstance(w, str) else w[at] for w in words): None for at in (0, 1)}
    code, text = 2, ""
    for spelling in spellings:
        code, text = _run(spelling)
        if code != 2:
            break
    return code, text


def _run(words: tuple[str, ...]) -> tuple[int, str]:
    main = first("weft.cli:main")
    before, out, problems = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["weft", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(problems):
            main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    return code, out.getvalue() if code != 2 else out.getvalue() + problems.getvalue()
