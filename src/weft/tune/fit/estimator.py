"""Requirements of trials, found in processes of their own, so that devices never wait for an estimate."""

from __future__ import annotations

import logging
import multiprocessing
import os
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.errors import TuneError, WeftError
from weft.space import Value
from weft.tune.devices import processors
from weft.tune.executors.processes import IN_TRIAL, environment_variables, init_process, process_context
from weft.tune.executors.worker import pack_spec, unpack_spec
from weft.tune.fit.fit import Requirements, architecture_key, requirements
from weft.tune.jobs import After
from weft.tune.recipe import Recipe
from weft.tune.training.run_job import StudySpec

log = logging.getLogger("weft.tune")

Params = Mapping[str, Value]

UNDER_WAY = 4
"""Questions that a process has at once, so that it need not wait for the next."""
MOST = 8
"""Processes that estimate: devices wait for them when a study begins, and later they have little to do."""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """What trials are fitted to; with a trial's values, this is all that its requirements depend on."""

    memory: int | None
    devices: int
    kind: str
    fuse: bool


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A trial that cannot be run, and why."""

    reason: str


class _Asked(NamedTuple):
    params: Params
    after: After | None
    kind: str


@dataclass(eq=False, slots=True)
class _Estimator:
    """A pool of one process, which keeps the traces that it made."""

    pool: ProcessPoolExecutor
    process: Any
    asked: dict[int, _Asked] = field(default_factory=dict)
    sent: dict[int, Future[Requirements | Infeasible]] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)

    def send(self) -> None:
        """Submit the next trials; first those of an architecture that is known, which take no time."""
        rest = [number for number in self.asked if number not in self.sent]
        rest.sort(key=lambda number: self.asked[number].kind not in self.answered)
        with suppress(BrokenProcessPool):  # answers() sees that it is gone
            for number in rest[: UNDER_WAY - len(self.sent)]:
                params, after, _ = self.asked[number]
                self.sent[number] = self.pool.submit(_found, params, after)

    def answers(self) -> list[tuple[int, Requirements | Infeasible]]:
        """Those that are there; the other questions stay in ``asked``."""
        ready = {number: future for number, future in self.sent.items() if future.done()}
        found = []
        for number, future in ready.items():
            del self.sent[number]
            problem = future.exception()
            if isinstance(problem, BrokenProcessPool):
                continue
            self.answered.add(self.asked.pop(number).kind)
            found.append((number, future.result() if problem is None else Infeasible(repr(problem))))
        return found

    def work(self) -> int:
        """How many traces it has to make."""
        return len({asked.kind for asked in self.asked.values()} - self.answered)

    def kill(self) -> None:
        self.process.kill()
        self.pool.shutdown()


class EstimatorPool:
    """Answers come in any order. Where nothing has to be estimated they are there at once, without a process."""

    def __init__(self, spec: StudySpec, devices: DeviceClass, processes: int | None = None) -> None:
        self._spec, self._device_class = spec, devices
        most = max(1, min(MOST, processors()[1] // 2)) if processes is None else processes
        self._most = most if isinstance(spec.objective, Recipe) and devices.memory is not None else 0
        self._estimators: list[_Estimator] = []
        self._by_kind: dict[str, _Estimator] = {}
        self._known: list[tuple[int, Requirements | Infeasible]] = []
        self._unreported: dict[int, Params] = {}

    @property
    def open(self) -> dict[int, Params]:
        """Those whose requirements are not known yet."""
        return {n: asked.params for one in self._estimators for n, asked in one.asked.items()} | self._unreported

    def ask(self, number: int, params: Params, after: After | None = None) -> None:
        """``after``: how it was fitted when it took more than a device has, and is to be fitted otherwise."""
        estimator = self._of_kind(kind := architecture_key(params))
        if estimator is None:
            self._find(number, params, after)
        else:
            estimator.asked[number] = _Asked(dict(params), after, kind)
            estimator.send()

    def completed(self) -> list[tuple[int, Requirements | Infeasible]]:
        """The answers since the last call."""
        for one in list(self._estimators):
            alive = one.process.is_alive()
            self._known += one.answers()
            if alive:
                one.send()
            else:
                self._lose(one)
        answers, self._known = self._known, []
        self._unreported.clear()
        return answers

    def close(self) -> None:
        for one in self._estimators:
            one.kill()
        self._estimators.clear()
        self._by_kind.clear()
        self._most = 0

    def _of_kind(self, kind: str) -> _Estimator | None:
        """The process that has estimated a trial of that architecture, else the one that has least to do."""
        if kind not in self._by_kind and self._most:
            if len(self._estimators) < self._most and all(one.asked for one in self._estimators):
                self._start()
            if self._estimators:
                self._by_kind[kind] = min(self._estimators, key=_Estimator.work)
        return self._by_kind.get(kind)

    def _start(self) -> None:
        try:
            payload = pack_spec(self._spec)
        except TuneError:  # what another process cannot import is estimated here
            self._most = 0
            return
        before = multiprocessing.active_children()
        with environment_variables({IN_TRIAL: "1", "OMP_NUM_THREADS": "1"}):
            given = (os.getpid(), dict(os.environ), payload, self._device_class)
            pool = ProcessPoolExecutor(1, process_context(True), _begin, given)
            pool.submit(os.getpid)  # which starts the process
        (process,) = (child for child in multiprocessing.active_children() if child not in before)
        self._estimators.append(_Estimator(pool, process))

    def _lose(self, one: _Estimator) -> None:
        log.warning("a process that estimates memory is gone; its trials are estimated in this process")
        one.pool.shutdown()
        self._estimators.remove(one)
        self._by_kind = {kind: other for kind, other in self._by_kind.items() if other is not one}
        self._most = len(self._estimators)
        for number, (params, after, _) in one.asked.items():
            self._find(number, params, after)

    def _find(self, number: int, params: Params, after: After | None) -> None:
        """In this process."""
        self._known.append((number, find_requirements(self._spec, params, self._device_class, after)))
        self._unreported[number] = params


def find_requirements(
    spec: StudySpec, params: Params, devices: DeviceClass, after: After | None = None
) -> Requirements | Infeasible:
    """The requirements of a trial; a model that cannot be made fails this trial, and no other."""
    try:
        return requirements(spec, params, devices.memory, devices.devices, devices.kind, devices.fuse, after)
    except Exception as problem:
        is_own = isinstance(problem, WeftError)
        return Infeasible(str(problem) if is_own else "".join(traceback.format_exception(problem)).strip())


_given: tuple[StudySpec, DeviceClass]
"""Of a process that estimates."""


def _begin(parent: int, environment: Mapping[str, str], payload: bytes, devices: DeviceClass) -> None:
    global _given
    init_process(parent, environment)
    import torch

    torch.set_num_threads(1)
    _given = unpack_spec(payload), devices


def _found(params: Params, after: After | None) -> Requirements | Infeasible:
    spec, devices = _given
    return find_requirements(spec, params, devices, after)
