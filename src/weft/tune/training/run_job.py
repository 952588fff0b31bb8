"""Runs one attempt at a job in this process, as workers of every executor do; and a trial as its objective sees it."""

from __future__ import annotations

import gc
import math
import operator
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from weft.errors import TuneError, WeftError, nearest
from weft.space import Value
from weft.tune.jobs import Ended, Job, Reported
from weft.tune.recipe import Recipe, trial_config
from weft.tune.training.memory_limit import MemoryLimit, OutOfMemory
from weft.tune.training.trainer import Pruned, Report, Result, train
from weft.utils import rng

Objective = Recipe | Callable[["Trial"], Any]
Tell = Callable[[Ended], None]
Ask = Callable[[Reported], bool]
State = Literal["complete", "pruned", "failed", "out-of-memory", "timeout"]

LAST = 2**31 - 1
"""The largest step that every storage has room for."""

OUTPUT = "output.txt"
"""What a trial's code prints goes into this file of its directory."""


@dataclass(frozen=True, slots=True)
class StudySpec:
    """What all trials of a study share; it reaches each worker once, when that starts."""

    objective: Objective
    objectives: tuple[str, ...]
    seed: int


def folder(job: Job, trial: int) -> Path:
    """A trial's own directory."""
    return Path(job.directory) / "trials" / str(trial)


def run_job(job: Job, spec: StudySpec, device: str, rank: int, ask: Ask, tell: Tell) -> None:
    """Run a job to its end; never raises because of what it does. ``ask`` waits for the answer to a report.

    The end of its last trial is reported once the device's memory is free again. Ranks above 0 of a split job report
    failures only.
    """
    ended: set[int] = set()
    held: list[Ended] = []
    for number in job.trials:
        folder(job, number).mkdir(parents=True, exist_ok=True)

    def end(event: Ended) -> None:
        ended.add(event.trial)
        if len(ended) < len(job.trials):
            tell(event)
        else:
            held.append(event)

    began = time.perf_counter()
    state: State = "complete"
    error, needed = None, None
    try:
        _run(job, spec, device, ask, end)
    except Pruned:
        state = "pruned"
    except BaseException as problem:
        state, error, needed = _state_of(problem)
        problem.__traceback__ = problem.__context__ = None  # it would keep every tensor of the training
    peak = needed or (int(torch.cuda.max_memory_reserved(device)) if device.startswith("cuda") else None)
    _release_memory(device)
    seconds = time.perf_counter() - began
    left = [Ended(job.id, number, state, None, error, peak, seconds) for number in job.trials if number not in ended]
    for event in [*held, *left]:
        if rank == 0 or event.state not in ("complete", "pruned"):
            tell(event if event.peak else replace(event, peak=peak))


def _run(job: Job, spec: StudySpec, device: str, ask: Ask, end: Tell) -> None:
    """Trains; a trial that is not reported as ended ends as the job does."""
    began = time.perf_counter()

    def complete(number: int, values: Any, peak: int | None = None) -> None:
        seconds = time.perf_counter() - began
        try:
            found = finite(numbers(values, spec.objectives, "return"), spec.objectives)
        except WeftError as problem:
            end(Ended(job.id, number, "failed", None, str(problem), peak, seconds))
            return
        end(Ended(job.id, number, "complete", found, None, peak, seconds))

    def reporter(number: int) -> Report:
        return lambda step, values: ask(Reported(job.id, number, step, tuple(values)))

    folders = [folder(job, number) for number in job.trials]
    if not isinstance(spec.objective, Recipe):
        for number, params, own in zip(job.trials, job.params, folders, strict=True):
            resumed, seed = any(entry.name != OUTPUT for entry in own.iterdir()), rng.key(spec.seed, "trial", number)
            report = reporter(number)
            trial = Trial(number, params, own, device, job.memory, resumed, seed, spec.objectives, report)
            complete(number, _call(spec.objective, trial))
        return

    configs = [trial_config(spec.objective, params) for params in job.params]
    if len(configs) == 1:
        train_one: Callable[..., Result] = train
        if job.fit is not None and job.fit.devices > 1:
            from weft.tune.training.distributed import train_split

            train_one = train_split
        report = reporter(job.trials[0])
        result = train_one(configs[0], job.fit, device=device, memory=job.memory, directory=folders[0], report=report)
        complete(job.trials[0], result.values, result.peak)
        return
    from weft.tune.fusion.trainer import train_fused

    def leave(index: int, result: Any) -> None:
        if result == "pruned":
            end(Ended(job.id, job.trials[index], "pruned", seconds=time.perf_counter() - began))
        else:
            complete(job.trials[index], result.values, result.peak)

    train_fused(
        configs,
        job.fit,
        device=device,
        memory=job.memory,
        directories=folders,
        report=lambda index, step, values: reporter(job.trials[index])(step, values),
        ended=leave,
    )


def _call(objective: Callable[[Trial], Any], trial: Trial) -> Any:
    """On a GPU the allocator refuses more than the trial may take; elsewhere nothing holds a function to it.

    What it draws from a global generator depends on the trial alone, not on what this process ran before.
    """
    limit = MemoryLimit(torch.device(trial.device), trial.memory)
    rng.seed(trial.seed)
    torch.manual_seed(trial.seed)
    try:
        with limit:
            return objective(trial)
    except Exception as problem:
        exceeded = limit.exceeded(problem)
        if exceeded is None:
            raise
    raise exceeded


def _state_of(problem: BaseException) -> tuple[State, str, int | None]:
    """The state that an exception ends a trial in, its text, and the bytes that were needed where it says so."""
    if isinstance(problem, OutOfMemory):
        return "out-of-memory", str(problem), problem.needed
    if isinstance(problem, WeftError):
        return "failed", str(problem), None
    return "failed", "".join(traceback.format_exception(problem)).strip(), None


def _release_memory(device: str) -> None:
    """Gives back what the last trial held."""
    sys.last_exc = sys.last_value = None  # type: ignore[attr-defined]
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# A trial as an objective that is a function sees it, and the values that it reports and returns.


@dataclass(frozen=True, slots=True)
class Trial:
    """What a function that is an objective is called with; ``trial["lr"]`` reads one of its values."""

    number: int
    params: Mapping[str, Value]
    """Of its choices, and of the derived dimensions of the space."""
    directory: Path
    """Of this trial alone. What is written here is still there when the trial continues after a crash."""
    device: str
    """As torch names it."""
    memory: int | None
    """Bytes that it may take of the device; None: all of it."""
    resumed: bool
    """Whether an earlier attempt at this trial left something in the directory."""
    seed: int
    """Of this trial alone; the global generators of Python, NumPy and torch are seeded with it too."""
    objectives: tuple[str, ...]
    tell: Report

    def __getitem__(self, name: str) -> Value:
        if name not in self.params:
            raise TuneError(f"trial {self.number} has no value '{name}'{nearest(name, self.params)}")
        return self.params[name]

    def report(self, values: Any, step: int) -> None:
        """The objectives' values after so many steps; raises ``Pruned`` where the study ends the trial.

        The same step may be reported again after a resume. Do not catch Pruned, or raise it again.
        """
        number = operator.index(step)
        if not 0 <= number <= LAST:
            raise TuneError(f"a report is made after 0 to {LAST} steps, as databases can keep them, not {number}")
        if self.tell(number, numbers(values, self.objectives, "report")):
            raise Pruned


def numbers(values: Any, objectives: Sequence[str], what: str) -> tuple[float, ...]:
    """One number per objective, from a number, a sequence in the order of the objectives, or a mapping by name.

    >>> numbers({"loss": 1, "size": 2}, ("size", "loss"), "return")
    (2.0, 1.0)
    """
    wanted = f"{len(objectives)} numbers ({', '.join(objectives)})" if len(objectives) > 1 else "a number"
    if values is None:
        raise TuneError(f"the objective must {what} {wanted}, not nothing (None)")
    if isinstance(values, Mapping):
        if set(values) != set(objectives):
            raise TuneError(f"the objective must {what} {wanted}, not values of {', '.join(map(repr, values))}")
        values = [values[name] for name in objectives]
    if hasattr(values, "tolist"):  # NumPy and torch
        values = values.tolist()
    several = list(values) if isinstance(values, (list, tuple)) else [values]
    try:
        if any(isinstance(value, str) for value in several):
            raise TypeError
        found = tuple(float(cast(Any, value)) for value in several)
    except (TypeError, ValueError):
        raise TuneError(f"the objective must {what} {wanted}, not {str(values)[:80]!r}") from None
    if len(found) != len(objectives):
        raise TuneError(f"the objective must {what} {wanted}, not {len(found)}")
    return found


def finite(values: tuple[float, ...], objectives: Sequence[str]) -> tuple[float, ...]:
    """The values of a trial that is complete; TuneError names the objective that is not a finite number."""
    for name, value in zip(objectives, values, strict=True):
        if not math.isfinite(value):
            raise TuneError(f"'{name}' is {value} at the end: a complete trial needs a finite number per objective")
    return values
