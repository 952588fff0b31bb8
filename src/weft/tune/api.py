"""weft.tune: a study from an objective and a space to its best trial."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import RunError, TuneError, nearest
from weft.runs.run import Run, unique_name
from weft.space import Space, Value
from weft.tune.config import StudyConfig, StudyExecution, check_resume, describe, merge_fields, resume_contract
from weft.tune.devices import parse_devices, share_gpus
from weft.tune.executors.worker import IN_TRIAL
from weft.tune.jobs import Executor, StudyProgress
from weft.tune.progress import LiveTable, StudyResult
from weft.tune.recipe import FIELDS, OLD_CHOICES, Recipe, refuse_old_names, trial_config
from weft.tune.runner import StudyRunner
from weft.tune.study.storage import default_url, shown_url
from weft.tune.training.run_job import Objective, StudySpec

if TYPE_CHECKING:
    from weft.tune.study.study import Study

Callback = Callable[[StudyProgress], None]


def tune(
    objective: Objective,
    space: Space,
    config: StudyConfig | None = None,
    *,
    execution: StudyExecution | None = None,
    name: str | None = None,
    folder: Path | str = "runs",
    storage: str | None = None,
    resume: bool = False,
    enqueue: Iterable[Mapping[str, Value]] = (),
    progress: bool = False,
    callback: Callback | None = None,
    **options: Any,
) -> StudyResult:
    """Runs a study and returns its result.

    ``objective`` is a Recipe, or an importable function that takes a ``Trial`` and returns a number, one per objective
    (those to maximize first), or a mapping by name. ``config`` decides the result, ``execution`` says how the study is
    executed. ``options`` are fields of the two by name: ``weft.tune(recipe, space, trials=40, maximize="accuracy",
    devices=["cuda:0"])``. The result follows from the seed, whatever the number of devices and workers.

    The study is kept in ``folder/name``, its trials in the database at ``storage``, a file in that directory if not
    given. Trials in ``enqueue`` come first; values that they lack are drawn. After Ctrl-C or a crash ``resume=True``
    continues a study. ``progress`` shows a live table; ``callback`` is called after everything that happens.
    """
    if isinstance(config, Mapping):
        raise TuneError("config is a StudyConfig; the manifest of a study takes no dictionary of its own any more")
    config, execution = merge_fields(config or StudyConfig(), execution or StudyExecution(), options)
    with ExitStack() as stack:
        callbacks = [] if callback is None else [callback]
        if progress:
            callbacks.append(stack.enter_context(LiveTable()).update)
        return run_study(objective, space, config, execution, name, folder, storage, resume, enqueue, callbacks)


def run_study(
    objective: Objective,
    space: Space,
    config: StudyConfig,
    execution: StudyExecution,
    name: str | None,
    folder: Path | str,
    storage: str | None,
    resume: bool,
    enqueue: Iterable[Mapping[str, Value]] = (),
    callbacks: Sequence[Callback] = (),
    source: Mapping[str, Any] | None = None,
) -> StudyResult:
    """As ``tune``; ``source`` is the configuration file that the study comes from, for its manifest."""
    if IN_TRIAL in os.environ:
        raise TuneError(
            "a study was started inside a trial, since each worker imports the script that started it: put what the "
            "script does under `if __name__ == '__main__':`"
        )
    names, directions = directed(objective, config)
    if isinstance(objective, Recipe):
        check_recipe(objective, space)
    config.memory_of(objective)
    spec = StudySpec(objective, names, config.seed)
    name = unique_name("study") if name is None else name
    from weft.tune.study.definition import define
    from weft.tune.study.study import Study

    with ExitStack() as stack:
        executor = make_executor(spec, execution)
        if execution.executor == "local" and any(device.name.startswith("cuda") for device in executor.devices):
            stack.enter_context(share_gpus(execution.mps))
        if executor is not execution.executor:
            stack.callback(executor.close)  # before MPS ends, which waits for the processes that it serves
        contract = resume_contract(spec, config, executor.devices, execution.threads, space)
        run, is_new = _directory(Path(folder), name)
        stack.enter_context(run.locked())
        study = None
        try:
            url = storage or default_url(run.path)
            definition = define(space, directions, config.seed, config.max_concurrent, config.sampler, config.pruner)
            study = Study.open(name, definition, trials=config.trials, storage=url, objectives=names, resume=resume)
            stack.callback(study.close)
            if resume:
                check_resume(name, run.manifest.get("study"), contract)
            for params in () if resume else enqueue:  # a resumed study has them
                study.enqueue(params)
        except BaseException:
            _undo(None if resume else study, run if is_new else None)
            raise
        run.update_manifest(
            study={
                **{entry.name: describe(getattr(config, entry.name)) for entry in fields(config)},
                **contract,
                "objectives": dict(zip(names, directions, strict=True)),
                "storage": shown_url(url),
            },
            config=None if source is None else dict(source),
            seed=config.seed,
            space=space.id,
        )
        try:
            progress = StudyProgress(name, config.trials, names, directions)
            path, events = run.path.resolve(), run.events
            events.drop_from(0)  # the end of an earlier run is not the end
            runner = StudyRunner(study, executor, spec, config, execution, path, events, progress, callbacks)
            return _run(study, runner, run, shown_url(url))
        except Exception:
            begun = (run.path / "trials").exists() or any(record.ended for record in study.trials())
            if not resume and not begun:
                _undo(study, run if is_new else None)
            raise


def _run(study: Study, runner: StudyRunner, run: Run, storage: str) -> StudyResult:
    began, progress = time.perf_counter(), runner.progress
    ended, space = [record for record in study.trials() if record.ended], study.definition.space.to_json()
    run.events.append("started", trials=[], at=len(ended), steps=progress.total, space=space)
    logged = {number for event in run.events.read() if event["event"] == "ended" for number in event["trials"]}
    for record in ended:
        if record.number not in logged:  # the process was killed between the storage and the log
            run.events.append("ended", trials=[record.number], state=record.state, values=record.values, **record.info)
    try:
        runner.run()
    except KeyboardInterrupt:
        run.events.append("stopped")
        raise
    except BaseException as problem:
        run.events.append("failed", reason=f"{type(problem).__name__}: {problem}")
        raise
    run.events.append("finished", steps=progress.total)
    result = StudyResult(
        study.name,
        run.path,
        storage,
        progress.objectives,
        progress.directions,
        study.trials(),
        study.best(),
        study.importances(),
        progress.time_breakdown(),
        time.perf_counter() - began,
    )
    run.save_result("study", result.to_json())
    return result


def directed(objective: Objective, config: StudyConfig) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The objectives in the order of their values, with the direction of each."""
    given = (config.maximize, config.minimize)
    up, down = ((names,) if isinstance(names, str) else tuple(names) for names in given)
    if not up and not down and isinstance(objective, Recipe) and objective.objectives == ("loss",):
        down = ("loss",)
    directions = {**dict.fromkeys(up, "maximize"), **dict.fromkeys(down, "minimize")}
    if not directions:
        raise TuneError("a study needs an objective: maximize='accuracy', or minimize='loss'")
    if len(directions) < len(up) + len(down):
        raise TuneError(f"an objective is named twice: maximize {', '.join(up)}; minimize {', '.join(down)}")
    names = objective.objectives if isinstance(objective, Recipe) else tuple(directions)
    for one in directions:
        if one not in names:
            raise TuneError(f"the recipe has no objective '{one}'{nearest(one, names)}")
    for one in names:
        if one not in directions:
            raise TuneError(f"objective '{one}' of the recipe is neither maximized nor minimized: name it in one")
    if not callable(objective) and not isinstance(objective, Recipe):
        raise TuneError(f"an objective is a Recipe or a function of a trial, not a {type(objective).__name__}")
    return names, tuple(directions[one] for one in names)


def check_recipe(recipe: Recipe, space: Space) -> None:
    """TuneError for what would fail every trial: all of the recipe but what the space chooses."""
    own: dict[str, Any] = {one.name: one.default for one in fields(Recipe) if one.name in FIELDS and one.name in space}
    if "optimizer" in space:
        own["optimizer_options"] = {}  # which are of those that may be chosen
    refuse_old_names(name for name in OLD_CHOICES if name in space)
    trial_config(replace(recipe, **own), {})


def make_executor(spec: StudySpec, execution: StudyExecution) -> Executor:
    """The executor of a study, which is closed by who asked for it unless it was given."""
    wanted, devices = execution.executor, parse_devices(execution.devices)
    if not isinstance(wanted, str):
        return wanted
    if wanted == "local":
        from weft.tune.executors.local import LocalExecutor

        return LocalExecutor(spec, devices, threads=execution.threads)
    if wanted == "ray":
        from weft.tune.executors.ray import RayExecutor

        if devices is not None:
            raise TuneError("the devices of a Ray cluster are those of its nodes: leave devices out")
        return RayExecutor(spec, threads=execution.threads)
    raise TuneError(f"unknown executor '{wanted}'{nearest(wanted, ('local', 'ray'))}")


def _undo(study: Study | None, run: Run | None) -> None:
    """Remove what a call made that failed, so that the next one does not find it."""
    if study is not None:
        study.discard()
    if run is not None:
        run.events.close()
        shutil.rmtree(run.path, ignore_errors=True)


def _directory(folder: Path, name: str) -> tuple[Run, bool]:
    """The study's directory, and whether it is new."""
    is_new = not (folder / name).exists()
    run = Run.create(folder, name, manifest={"kind": "study"}, exist_ok=True)
    if run.manifest.get("kind") != "study":
        raise RunError(f"'{run.path}' holds a run that is no study: choose another name")
    return run, is_new
