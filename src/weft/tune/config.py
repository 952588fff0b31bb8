"""The configuration of a study, in two parts: what decides its result, and how it is executed.

The table ``[study]`` of a configuration file, the options of the command line, the manifest of a study and the
reference page are all derived from these classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import msgspec

from weft.data import Data
from weft.errors import TuneError, nearest
from weft.runs.run import without_modules
from weft.space import Space
from weft.tune.devices import nominal
from weft.tune.jobs import Device, Executor
from weft.tune.recipe import OLD_FIELDS as OLD_RECIPE_FIELDS
from weft.tune.recipe import Recipe
from weft.tune.training.run_job import StudySpec
from weft.utils.files import to_json
from weft.utils.units import format_bytes, parse_bytes

Names = str | Iterable[str]


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """What decides the result of a study, beside its objective and its space. A study is resumed under the same one,
    but for ``trials``."""

    trials: int = 50
    """number of trials"""
    maximize: Names = ()
    """objectives that are better when larger"""
    minimize: Names = ()
    """objectives that are better when smaller"""
    sampler: str | Mapping[str, Any] = "tpe"
    """`tpe`, `cmaes`, `gp`, `nsga2`, `random`, `grid`; or a table with a `name` and options of Optuna"""
    pruner: str | Mapping[str, Any] | None = None
    """`asha`, `hyperband`, `median`; or a table with a `name` and options of Optuna; none if not given"""
    max_concurrent: int = 8
    """the most trials that are open at once: trial i is proposed, and pruned, once trial i - max_concurrent and all
    before it have ended, and sees the results of no others"""
    seed: int = 0
    """seed of proposals and of the trials of a function"""
    fuse: int = 1
    """of so many consecutive trials, those of one shape train as one; at most `max_concurrent`"""
    device_memory: str | int | None = None
    """for a recipe: the nominal memory of a device that trials are fitted to; that of the smallest device if not
    given"""
    trial_memory: str | int | None = None
    """for a function: the memory that a trial takes of its device; without it a GPU runs one trial at a time"""

    def __post_init__(self) -> None:
        _at_least_1(self, "trials", "max_concurrent", "fuse")
        if self.fuse > self.max_concurrent:
            raise TuneError(
                f"fuse={self.fuse} trials cannot be open at once with max_concurrent={self.max_concurrent}: "
                "use a smaller fuse or a larger max_concurrent"
            )
        for name in ("device_memory", "trial_memory"):
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, int(parse_bytes(given, TuneError)))

    def memory_of(self, objective: object) -> int | None:
        """Bytes: for a recipe the nominal memory of a device, for a function what a trial takes; None if not given."""
        own, other = ("device_memory", "trial_memory")[:: 1 if isinstance(objective, Recipe) else -1]
        if getattr(self, other) is not None:
            kind = "a recipe" if own == "device_memory" else "a function"
            raise TuneError(f"{other} is not for {kind}: give {own}")
        memory: int | None = getattr(self, own)
        return memory


@dataclass(frozen=True, kw_only=True)
class StudyExecution:
    """How a study is executed. None of this changes its result, but for ``threads`` on a CPU and the memory of devices
    where ``device_memory`` is not given."""

    executor: str | Executor = "local"
    """`local` or `ray`"""
    devices: Sequence[str | Device] | Mapping[str, Any] | str | None = None
    """such as `["cuda:0", "cuda:1=40GiB"]`; all GPUs, else the CPU, if not given"""
    jobs_per_device: int | None = None
    """the most jobs at once on a device; as many as its memory and the cores of the host allow if not given"""
    threads: int = 1
    """threads of each worker on a CPU; results depend on it"""
    mps: str = "auto"
    """whether NVIDIA's multi-process service shares GPUs: `auto`, `on`, `off`"""
    timeout: float | None = None
    """seconds after which a trial has failed"""
    max_retries: int = 3
    """how often a trial continues from its checkpoint after its process died"""

    def __post_init__(self) -> None:
        _at_least_1(self, "jobs_per_device", "threads")
        if self.timeout is not None and not self.timeout > 0:
            raise TuneError(f"timeout={self.timeout}: a number of seconds above 0")


def _at_least_1(config: Any, *names: str) -> None:
    for name in names:
        if (value := getattr(config, name)) is not None and value < 1:
            raise TuneError(f"{name}={value!r}: a whole number, 1 or more")


OLD_FIELDS = {
    "window": "max_concurrent (= window + 1)",
    "memory": "device_memory (of a recipe) or trial_memory (of a function)",
    "workers": "jobs_per_device",
    "retries": "max_retries",
    "seconds": "timeout",
    "runs": "folder",
    "show": "progress",
    "watch": "callback",
}
"""What options of ``weft.tune`` were called before, and are called now."""


def merge_fields(
    config: StudyConfig, execution: StudyExecution, options: Mapping[str, Any]
) -> tuple[StudyConfig, StudyExecution]:
    """Both with some of their fields changed, by name; raises TuneError for a name that is none."""
    of_config, of_execution = ({entry.name for entry in fields(part)} for part in (config, execution))
    for name in options:
        if name in OLD_FIELDS:
            raise TuneError(f"the option '{name}' is called '{OLD_FIELDS[name]}' now")
        if name not in of_config | of_execution:
            raise TuneError(f"unknown option '{name}'{nearest(name, of_config | of_execution)}")
    return (
        replace(config, **{name: value for name, value in options.items() if name in of_config}),
        replace(execution, **{name: value for name, value in options.items() if name in of_execution}),
    )


# The resume contract: what results depend on, beside the definition in the storage, as the manifest has it.

CHANGES_NO_RESULT = ("objectives", "checkpoint_every", "cuda_graphs")
"""Fields of a recipe that change no result, or that the contract has under another name."""
MISSING = object()


def resume_contract(
    spec: StudySpec, config: StudyConfig, devices: Sequence[Device], threads: int, space: Space
) -> dict[str, Any]:
    """As plain values. What the space chooses in every trial is no part of it, nor are threads where there is no
    CPU."""
    recipe = spec.objective if isinstance(spec.objective, Recipe) else None
    called = recipe.model if recipe is not None else spec.objective
    memory = config.memory_of(spec.objective)
    contract = {
        "objective": f"{getattr(called, '__module__', '')}:{getattr(called, '__qualname__', type(called).__name__)}",
        "names": list(spec.objectives),
        "fuse": config.fuse,
        "device_memory": nominal(memory, devices) if recipe is not None else None,
    }
    if any(device.name == "cpu" for device in devices):
        contract["threads"] = threads
    if recipe is not None:
        contract["recipe"] = dict(_fields(recipe, {name for name in space.choices if name not in space.conditions}))
    return contract


def check_resume(study: str, before: object, contract: Mapping[str, Any]) -> None:
    """TuneError, with the first thing that differs, where a study began under another contract. What an older weft did
    not write down counts as equal."""
    if not isinstance(before, Mapping):
        return
    for key, old, new in _differences(_in_new_words(without_modules(before)), without_modules(contract)):
        shown = [format_bytes(v) if key == "device_memory" and isinstance(v, int) else repr(v) for v in (old, new)]
        remedy = f"give device_memory={old!r}, or " if key == "device_memory" and old is not None else ""
        raise TuneError(
            f"study '{study}' cannot be resumed with another {key}: it was {shown[0]}, and is now {shown[1]}; "
            f"{remedy}use another name"
        )


def _in_new_words(before: Mapping[str, Any]) -> dict[str, Any]:
    found = {"device_memory" if name == "memory" else name: value for name, value in before.items()}
    if isinstance(recipe := found.get("recipe"), Mapping):
        found["recipe"] = {OLD_RECIPE_FIELDS.get(name, name): value for name, value in recipe.items()}
    return found


def _differences(before: Mapping[str, Any], contract: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key, new in contract.items():
        old = before.get(key, MISSING)
        if key == "recipe" and isinstance(old, Mapping):
            yield from ((f"recipe.{name}", was, now) for name, was, now in _differences(old, new))
        elif old is not MISSING and old != new:
            yield key, old, new


def _fields(recipe: Recipe, chosen: set[str]) -> Iterator[tuple[str, Any]]:
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if field.name == "optimizer_options":
            yield field.name, {name: describe(item) for name, item in value.items() if name not in chosen}
        elif field.name not in CHANGES_NO_RESULT and field.name not in chosen:
            yield field.name, describe(value)


def describe(value: Any) -> Any:
    """A plain value as it is, and code or data by its name, with its arguments as far as they are known.

    >>> describe(partial(sorted, reverse=True)), describe(("a", 1))
    ('builtins:sorted(reverse=True)', ['a', 1])
    """
    if isinstance(value, Mapping):
        return {str(name): describe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return to_json(value)
    if isinstance(value, msgspec.Struct):
        return describe(msgspec.to_builtins(value))
    if isinstance(value, partial):
        return f"{describe(value.func)}({_arguments(value.args, value.keywords)})"
    if isinstance(value, Data):
        parts = [len(part) for part in (value.train, value.validation) if part is not None]
        return f"{value.name} of {' + '.join(map(str, parts))} samples"
    kind = type(value)
    name = f"{getattr(value, '__module__', kind.__module__)}:{getattr(value, '__qualname__', kind.__qualname__)}"
    if is_dataclass(value) and not isinstance(value, type):
        given = {field.name: getattr(value, field.name) for field in fields(value) if field.repr}
        return f"{name}({_arguments((), given)})"
    return name


def _arguments(args: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    return ", ".join([*(str(describe(one)) for one in args), *(f"{n}={describe(one)}" for n, one in keywords.items())])
