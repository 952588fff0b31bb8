"""weft.tune: a study from an objective and a space to its best trial."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from weft.data import Data
from weft.errors import RunError, TuneError, nearest
from weft.runs.run import Run, unique_name, without_modules
from weft.space import Space, Value
from weft.tune.devices import nominal, parse_devices, shared
from weft.tune.executors.processes import INSIDE
from weft.tune.jobs import Device, Executor
from weft.tune.pending import RunOptions
from weft.tune.progress import StudyProgress
from weft.tune.recipe import OLD_FIELDS, Recipe
from weft.tune.result import StudyResult
from weft.tune.runner import StudyRunner
from weft.tune.study.storage import default_url, shown_url
from weft.tune.training.run_job import Objective, StudySpec
from weft.utils.files import to_json
from weft.utils.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from weft.tune.study.study import Study

Names = str | Iterable[str]
Watch = Callable[[StudyProgress], None]


def tune(
    objective: Objective,
    space: Space,
    *,
    trials: int,
    maximize: Names = (),
    minimize: Names = (),
    sampler: str | Mapping[str, Any] = "tpe",
    pruner: str | Mapping[str, Any] | None = None,
    window: int = 7,
    seed: int = 0,
    name: str | None = None,
    runs: Path | str = "runs",
    storage: str | None = None,
    devices: Sequence[str | Device] | Mapping[str, Any] | str | None = None,
    workers: int | None = None,
    memory: str | int | None = None,
    fuse: int = 1,
    retries: int = 3,
    seconds: float | None = None,
    threads: int = 1,
    mps: str = "auto",
    executor: str | Executor = "local",
    enqueue: Iterable[Mapping[str, Value]] = (),
    resume: bool = False,
    show: bool = False,
    watch: Watch | None = None,
    config: Mapping[str, Any] | None = None,
) -> StudyResult:
    """Runs a study of so many trials and gives back what it came to.

    ``objective`` is a Recipe, or an importable function that takes a ``Trial`` and returns a number, one per objective
    (those to maximize first), or a mapping by name. Proposals, prunings and results follow from ``seed`` and
    ``window``, whatever the number of workers: trial i sees the results of those before i - window, and at most
    window + 1 trials are open at once.

    ``memory`` is what a trial of a function takes of its device, or for a Recipe the nominal memory of a device that
    candidates are fitted to. ``workers`` is the most jobs at once on a device, ``seconds`` the time limit of a trial,
    ``fuse`` the number of consecutive trials of which those of one shape train as one. A trial whose process dies goes
    on from its checkpoint, ``retries`` times at most. ``mps``: whether GPUs are shared by NVIDIA's service: ``auto``,
    ``on`` or ``off``. After Ctrl-C or a crash ``resume=True`` goes on with a study.
    """
    if INSIDE in os.environ:
        raise TuneError(
            "a study was started inside a trial, since each worker imports the script that started it: put what the "
            "script does under `if __name__ == '__main__':`"
        )
    check_numbers(trials=trials, window=window, workers=workers, fuse=fuse, retries=retries, threads=threads)
    if seconds is not None and not seconds > 0:
        raise TuneError(f"the time limit of a trial is a number above 0 seconds, not {seconds}")
    names, directions = directed(objective, maximize, minimize)
    if isinstance(objective, Recipe):
        check_recipe(objective, space)
    way = _way(memory, workers, fuse, retries, seconds, window)
    terms = StudySpec(objective, names, seed)
    name = unique_name("study") if name is None else name
    from weft.tune.study.study import Study

    with ExitStack() as stack:
        made = _executor(executor, terms, parse_devices(devices), threads)
        if executor == "local" and any(device.name.startswith("cuda") for device in made.devices):
            stack.enter_context(shared(mps))
        if made is not executor:
            stack.callback(made.close)  # before MPS ends, which waits for the processes that it serves
        law = law_of(terms, way, made.devices, threads, space)
        run, new = _directory(Path(runs), name)
        study = None
        try:
            url = storage or default_url(run.path)
            study = Study.open(
                name,
                space,
                directions=directions,
                seed=seed,
                window=window,
                trials=trials,
                sampler=sampler,
                pruner=pruner,
                objectives=names,
                storage=url,
                resume=resume,
            )
            stack.callback(study.close)
            if resume:
                agree(name, run.manifest.get("study"), law)
            for params in () if resume else enqueue:  # a resumed study has them
                study.enqueue(params)
        except BaseException:
            _undo(None if resume else study, run if new else None)
            raise
        stack.enter_context(run.locked())
        shown = shown_url(url)
        run.update_manifest(
            study={**law, "objectives": dict(zip(names, directions, strict=True)), "trials": trials, "storage": shown},
            config=None if config is None else dict(config),
            seed=seed,
            space=space.id,
        )
        board = StudyProgress(name, trials, names, directions)
        try:
            return _run(stack, study, made, terms, way, run, board, watch, show, shown)
        except Exception:
            begun = (run.path / "trials").exists() or any(record.ended for record in study.trials())
            if not resume and not begun:
                _undo(study, run if new else None)
            raise


def _run(
    stack: ExitStack,
    study: Study,
    executor: Executor,
    terms: StudySpec,
    way: RunOptions,
    run: Run,
    board: StudyProgress,
    watch: Watch | None,
    show: bool,
    storage: str,
) -> StudyResult:
    seen = watch
    if show:
        from weft.tune.progress import LiveTable

        seen = stack.enter_context(LiveTable()).see
    began = time.perf_counter()
    run.events.drop_from(0)  # the end of an earlier run is not the end
    ended, space = [record for record in study.trials() if record.ended], study.definition.space.to_json()
    run.events.append("started", trials=[], at=len(ended), steps=board.trials, space=space)
    logged = {number for event in run.events.read() if event["event"] == "ended" for number in event["trials"]}
    for record in ended:
        if record.number not in logged:  # a driver was killed between the storage and the log
            run.events.append("ended", trials=[record.number], state=record.state, values=record.values, **record.notes)
    driver = StudyRunner(
        study,
        executor,
        terms,
        way,
        trials=board.trials,
        path=run.path.resolve(),
        events=run.events,
        board=board,
        watch=seen or (lambda board: None),
    )
    try:
        driver.run()
    except KeyboardInterrupt:
        run.events.append("stopped")
        raise
    except BaseException as problem:
        run.events.append("failed", reason=f"{type(problem).__name__}: {problem}")
        raise
    run.events.append("finished", steps=board.trials)
    records = study.trials()
    found = StudyResult(
        board.name,
        run.path,
        storage,
        board.objectives,
        board.directions,
        records,
        study.best(),
        study.importances(),
        board.time(),
        time.perf_counter() - began,
    )
    run.save_result("study", found.to_json())
    return found


def directed(objective: Objective, maximize: Names, minimize: Names) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The objectives in the order of their values, and which way each goes."""
    up, down = names_of(maximize), names_of(minimize)
    if not up and not down and isinstance(objective, Recipe) and objective.objectives == ("loss",):
        down = ("loss",)
    ways = {**dict.fromkeys(up, "maximize"), **dict.fromkeys(down, "minimize")}
    if not ways:
        raise TuneError("a study needs something to judge by: maximize='accuracy', or minimize='loss'")
    if len(ways) < len(up) + len(down):
        raise TuneError(f"an objective is named twice: maximize {', '.join(up)}; minimize {', '.join(down)}")
    names = objective.objectives if isinstance(objective, Recipe) else tuple(ways)
    for one in ways:
        if one not in names:
            raise TuneError(f"the recipe has no objective '{one}'{nearest(one, names)}")
    for one in names:
        if one not in ways:
            raise TuneError(f"objective '{one}' of the recipe is neither to be maximized nor minimized: name it in one")
    if not callable(objective) and not isinstance(objective, Recipe):
        raise TuneError(f"an objective is a Recipe or a function of a trial, not a {type(objective).__name__}")
    return names, tuple(ways[one] for one in names)


def _way(
    memory: str | int | None,
    workers: int | None,
    fuse: int,
    retries: int,
    seconds: float | None,
    window: int,
) -> RunOptions:
    if fuse > window + 1:
        raise TuneError(
            f"fuse={fuse} trials cannot be open at once with window={window}, which allows {window + 1}: "
            "use a smaller fuse or a larger window"
        )
    return RunOptions(None if memory is None else int(parse_bytes(memory, TuneError)), workers, fuse, retries, seconds)


def _executor(wanted: str | Executor, terms: StudySpec, devices: list[Device] | None, threads: int) -> Executor:
    if not isinstance(wanted, str):
        return wanted
    if wanted == "local":
        from weft.tune.executors.local import LocalExecutor

        return LocalExecutor(terms, devices, threads=threads)
    if wanted == "ray":
        from weft.tune.executors.ray import RayExecutor

        if devices is not None:
            raise TuneError("the devices of a Ray cluster are those of its nodes: leave devices out")
        return RayExecutor(terms, threads=threads)
    raise TuneError(f"unknown executor '{wanted}'{nearest(wanted, ('local', 'ray'))}")


def _undo(study: Study | None, run: Run | None) -> None:
    """Take back what a call made that came to nothing, so that the next one does not find it."""
    if study is not None:
        study.discard()
    if run is not None:
        run.events.close()
        shutil.rmtree(run.path, ignore_errors=True)


def _directory(root: Path, name: str) -> tuple[Run, bool]:
    """The study's directory, and whether it is new."""
    new = not (root / name).exists()
    run = Run.create(root, name, manifest={"kind": "study"}, exist_ok=True)
    if run.manifest.get("kind") != "study":
        raise RunError(f"'{run.path}' holds a run that is no study: choose another name")
    return run, new


# The law of a study: what its results depend on beside its definition, as a resumed one must keep it.

WITHOUT = ("objectives", "checkpoint_every", "cuda_graphs")
"""Fields of a recipe that change no result, or are told by another name."""
MISSING = object()


def law_of(terms: StudySpec, way: RunOptions, devices: Sequence[Device], threads: int, space: Space) -> dict[str, Any]:
    """As plain values, for the manifest. What the space chooses in every trial is no part of it, nor are threads where
    there is no CPU."""
    recipe = terms.objective if isinstance(terms.objective, Recipe) else None
    called = recipe.model if recipe is not None else terms.objective
    law = {
        "objective": f"{getattr(called, '__module__', '')}:{getattr(called, '__qualname__', type(called).__name__)}",
        "names": list(terms.objectives),
        "fuse": way.fuse,
        "memory": nominal(way.memory, devices) if recipe is not None else None,
    }
    if any(device.name == "cpu" for device in devices):
        law["threads"] = threads
    if recipe is not None:
        law["recipe"] = dict(_fields(recipe, {name for name in space.choices if name not in space.conditions}))
    return law


def agree(study: str, before: object, law: Mapping[str, Any]) -> None:
    """TuneError, with the first thing that differs, where a study was begun under another law. What an older weft did
    not write down counts as equal."""
    if not isinstance(before, Mapping):
        return
    for key, old, new in _differences(without_modules(before), without_modules(law)):
        shown = [format_bytes(v) if key == "memory" and isinstance(v, int) else repr(v) for v in (old, new)]
        remedy = f"give memory={old!r}, or " if key == "memory" and old is not None else ""
        raise TuneError(
            f"study '{study}' cannot be resumed with another {key}: it was {shown[0]}, and is now {shown[1]}; "
            f"{remedy}use another name"
        )


def _differences(before: Mapping[str, Any], law: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key, new in law.items():
        old = before.get(key, MISSING)
        if key == "recipe" and isinstance(old, Mapping):
            old = {OLD_FIELDS.get(name, name): value for name, value in old.items()}
            yield from ((f"recipe.{name}", was, now) for name, was, now in _differences(old, new))
        elif old is not MISSING and old != new:
            yield key, old, new


def _fields(recipe: Recipe, chosen: set[str]) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if field.name == "optimizer_options":
            yield field.name, {name: named(item) for name, item in value.items() if name not in chosen}
        elif field.name not in WITHOUT and field.name not in chosen:
            yield field.name, named(value)


def named(value: Any) -> Any:
    """A plain value as it is, and code or data by its name, with what it was made with as far as that can be told.

    >>> named(partial(sorted, reverse=True)), named(("a", 1))
    ('builtins:sorted(reverse=True)', ['a', 1])
    """
    if isinstance(value, Mapping):
        return {str(name): named(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [named(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return to_json(value)
    if isinstance(value, msgspec.Struct):
        return named(msgspec.to_builtins(value))
    if isinstance(value, partial):
        return f"{named(value.func)}({_given(value.args, value.keywords)})"
    if isinstance(value, Data):
        parts = [len(part) for part in (value.train, value.validation) if part is not None]
        return f"{value.name} of {' + '.join(map(str, parts))} samples"
    kind = type(value)
    name = f"{getattr(value, '__module__', kind.__module__)}:{getattr(value, '__qualname__', kind.__qualname__)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
        return f"{name}({_given((), given)})"
    return name


def _given(args: Sequence[Any], named_ones: Mapping[str, Any]) -> str:
    return ", ".join([*(str(named(one)) for one in args), *(f"{n}={named(one)}" for n, one in named_ones.items())])


# What Python and Optuna would tell too late, or not at all: it is checked before anything is made.

LEAST = {"window": 0, "retries": 0}
"""Of what is counted; everything else is at least 1."""


def check_numbers(**asked: int | None) -> None:
    """TuneError names what is too small."""
    for name, value in asked.items():
        if value is not None and value < LEAST.get(name, 1):
            raise TuneError(f"{name} is a whole number from {LEAST.get(name, 1)} on, not {value}")


def names_of(given: str | Iterable[str]) -> tuple[str, ...]:
    """One name or several, of objectives."""
    return (given,) if isinstance(given, str) else tuple(given)


def check_recipe(recipe: Recipe, space: Space) -> None:
    """TuneError for what would fail every trial: all of the recipe but what the space chooses."""
    from weft.tune.recipe import FIELDS, OLD_CHOICES, refuse_old_names, trial_config

    own: dict[str, Any] = {one.name: one.default for one in fields(Recipe) if one.name in FIELDS and one.name in space}
    if "optimizer" in space:
        own["optimizer_options"] = {}  # which are of those that may be chosen
    refuse_old_names(name for name in OLD_CHOICES if name in space)
    trial_config(replace(recipe, **own), {})
