"""weft.tune: a study from an objective and a space to its best trial."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import RunError, TuneError, nearest
from weft.runs.run import Run, fresh_name
from weft.space import Space, Value
from weft.tune.asked import (
    check_executor,
    check_numbers,
    check_place,
    check_recipe,
    check_seconds,
    check_space_given,
    enqueued,
    names_of,
)
from weft.tune.attempt import Objective, Terms
from weft.tune.board import Board
from weft.tune.devices import parse_devices
from weft.tune.driver import Driver
from weft.tune.executor import Executor
from weft.tune.job import Device
from weft.tune.law import agree, law_of
from weft.tune.mps import shared
from weft.tune.process import INSIDE
from weft.tune.recipe import Recipe
from weft.tune.storage import default_url
from weft.tune.task import Way
from weft.tune.tuned import Tuned
from weft.units import size_of

if TYPE_CHECKING:
    from weft.tune.study import Study

Names = str | Iterable[str]
Watch = Callable[[Board], None]


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
) -> Tuned:
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
    check_space_given(space)
    check_place(name, runs, storage)
    check_numbers(trials=trials, window=window, workers=workers, fuse=fuse, retries=retries, threads=threads)
    check_seconds(seconds)
    check_executor(executor)
    given = enqueued(enqueue)
    names, directions = directed(objective, maximize, minimize)
    if isinstance(objective, Recipe):
        check_recipe(objective, space)
    way = _way(memory, workers, fuse, retries, seconds, window)
    terms = Terms(objective, names, seed)
    name = fresh_name("study") if name is None else name
    from weft.tune.study import Study

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
            for params in () if resume else given:  # a resumed study has them
                study.enqueue(params)
        except BaseException:
            _undo(None if resume else study, run if new else None)
            raise
        stack.enter_context(run.locked())
        shown = _shown(url)
        run.update_manifest(
            study={**law, "objectives": dict(zip(names, directions, strict=True)), "trials": trials, "storage": shown},
            config=None if config is None else dict(config),
            seed=seed,
            space=space.id,
        )
        board = Board(name, trials, names, directions)
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
    terms: Terms,
    way: Way,
    run: Run,
    board: Board,
    watch: Watch | None,
    show: bool,
    storage: str,
) -> Tuned:
    seen = watch
    if show:
        from weft.tune.live import Live

        seen = stack.enter_context(Live()).see
    began = time.perf_counter()
    run.events.drop_from(0)  # the end of an earlier run is not the end
    ended, space = [record for record in study.trials() if record.ended], study.definition.space.to_json()
    run.events.append("started", trials=[], at=len(ended), steps=board.trials, space=space)
    logged = {number for event in run.events.read() if event["event"] == "ended" for number in event["trials"]}
    for record in ended:
        if record.number not in logged:  # a driver was killed between the storage and the log
            run.events.append("ended", trials=[record.number], state=record.state, values=record.values, **record.notes)
    driver = Driver(
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
    found = Tuned(
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
    up, down = names_of("maximize", maximize), names_of("minimize", minimize)
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
) -> Way:
    if fuse > window + 1:
        raise TuneError(
            f"fuse={fuse} trials cannot be open at once with window={window}, which allows {window + 1}: "
            "use a smaller fuse or a larger window"
        )
    return Way(None if memory is None else int(size_of(memory, TuneError)), workers, fuse, retries, seconds)


def _executor(wanted: str | Executor, terms: Terms, devices: list[Device] | None, threads: int) -> Executor:
    if not isinstance(wanted, str):
        return wanted
    if wanted == "local":
        from weft.tune.local import LocalExecutor

        return LocalExecutor(terms, devices, threads=threads)
    if wanted == "ray":
        from weft.tune.cluster import RayExecutor

        if devices is not None:
            raise TuneError("the devices of a Ray cluster are those of its nodes: leave devices out")
        return RayExecutor(terms, threads=threads)
    raise TuneError(f"unknown executor '{wanted}'{nearest(wanted, ('local', 'ray'))}")


def _shown(url: str) -> str:
    """A storage URL without its password."""
    from sqlalchemy.engine import make_url

    return make_url(url).render_as_string(hide_password=True)


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
