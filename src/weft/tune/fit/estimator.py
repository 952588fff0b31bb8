"""What trials need of a device: estimated in processes of their own, so that no device waits, and corrected later."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import traceback
from collections import defaultdict, deque
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

from weft.distributed.env import environment_variables
from weft.errors import PlanError, TuneError, WeftError
from weft.space import Value
from weft.tune.devices import processors
from weft.tune.executors.worker import IN_TRIAL, init_process, pack_spec, process_context, unpack_spec
from weft.tune.fit.fit import fit
from weft.tune.jobs import After, Fit
from weft.tune.recipe import CONTINUOUS, Recipe, trial_config
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
        self._found_here: dict[int, tuple[Params, Requirements | Infeasible]] = {}

    @property
    def open(self) -> dict[int, Params]:
        """Those whose requirements are not known yet."""
        elsewhere = {n: asked.params for one in self._estimators for n, asked in one.asked.items()}
        return elsewhere | {number: params for number, (params, _) in self._found_here.items()}

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
        answers = []
        for one in list(self._estimators):
            alive = one.process.is_alive()
            answers += one.answers()
            if alive:
                one.send()
            else:
                self._lose(one)
        answers += [(number, found) for number, (_, found) in self._found_here.items()]
        self._found_here.clear()
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
        self._found_here[number] = params, find_requirements(self._spec, params, self._device_class, after)


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


# What one trial needs, and which trials run as one.

BEYOND = 0.05
"""The part of its estimate that a trial may take beyond it, since others lie beside it."""
SLACK = 128 * 2**20
"""Bytes that a trial may take of a GPU beyond its estimate: what workers that live on leave lying between blocks."""
TINY = 16 * 2**10
"""The same on a CPU, where the smallest take a little more while they are scored."""
MAX_FUSED = 1 / 32
"""The part of a device above which a trial is not fused: it keeps the device busy by itself."""
FUSED_FACTOR = 2
"""What a fused trial is taken to need, by what it takes alone (1.3 to 1.8 times where it was measured): all gradients
of all trials are there at once."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """``memory`` None: all of a device, or nothing that is counted. ``fusion_key`` is equal for trials that can be
    fused, ``architecture_key`` for those that compute alike. ``note`` says why it was not estimated, where it should
    have been."""

    memory: int | None
    fit: Fit | None = None
    fusion_key: str | None = None
    architecture_key: str = ""
    steps: int | None = None
    note: str = ""

    @property
    def devices(self) -> int:
        return 1 if self.fit is None else self.fit.devices

    @property
    def seconds(self) -> float | None:
        """That the whole training should take, if that can be said."""
        step = None if self.fit is None else self.fit.seconds
        return None if step is None or self.steps is None else step * self.steps

    def memory_of(self, trials: int) -> int:
        """Bytes of a device that so many trials like it take as one; 0 where nothing is counted."""
        alone = self.memory or 0
        return alone if trials == 1 else trials * alone * FUSED_FACTOR


def find_requirements(
    spec: StudySpec, params: Params, devices: DeviceClass, after: After | None = None
) -> Requirements | Infeasible:
    """The requirements of a trial; a model that cannot be made fails this trial, and no other."""
    try:
        return _requirements(spec, params, devices, after)
    except Exception as problem:
        is_own = isinstance(problem, WeftError)
        return Infeasible(str(problem) if is_own else "".join(traceback.format_exception(problem)).strip())


def _requirements(spec: StudySpec, params: Params, devices: DeviceClass, after: After | None) -> Requirements:
    """A function needs what its study says; a recipe's candidate what its fit takes, as a function of the candidate and
    of the devices alone. What cannot be traced, such as a model whose shapes depend on data, gets a whole device."""
    if not isinstance(spec.objective, Recipe):
        return Requirements(devices.memory)
    from weft.tune.fusion.compatibility import fusion_key

    config, memory, kind = trial_config(spec.objective, params), devices.memory, architecture_key(params)
    if memory is None:
        return Requirements(None, None, fusion_key(config) if devices.fuse else None, kind, config.steps)
    config.data()  # made once, here, where tensors are real
    try:
        found = fit(config, devices.devices, memory, devices.kind, after)
    except PlanError as problem:
        log.warning("a trial with %s has a device to itself, not estimated: %s", kind, problem)
        return Requirements(None, None, None, kind, config.steps, note=f"not estimated: {problem}")
    needed = min(int(found.memory * (1 + BEYOND)) + (TINY if devices.kind == "cpu" else SLACK), memory)
    # Fused trials keep all activations: what recomputes, or offloads, is small only while it does.
    fusable = after is None and found.strategy in ("whole", "accumulate") and found.memory <= memory * MAX_FUSED
    return Requirements(needed, found, fusion_key(config) if devices.fuse and fusable else None, kind, config.steps)


def architecture_key(params: Mapping[str, Value]) -> str:
    """Equal for candidates that compute alike and take the same memory: all but continuous choices.

    >>> architecture_key({"width": 64, "lr": 0.1})
    '{"width": 64}'
    """
    return json.dumps({name: value for name, value in sorted(params.items()) if name not in CONTINUOUS})


def fusion_groups(needs: Mapping[int, Requirements], memory: int | None) -> list[tuple[int, ...]]:
    """Trials of one block that train as one, in order of number; as many at once as a device has room for.

    >>> small, other, large = (Requirements(n, fusion_key=key) for n, key in ((4, "a"), (4, "b"), (6, "a")))
    >>> fusion_groups({0: small, 1: other, 2: small, 3: Requirements(4)}, 20)
    [(0, 2), (1,), (3,)]
    >>> fusion_groups({0: large, 1: large}, 20)
    [(0,), (1,)]
    """
    alike: dict[Any, list[int]] = {}
    for number, one in sorted(needs.items()):
        alike.setdefault(one.fusion_key if one.fusion_key is not None else number, []).append(number)
    found = []
    for numbers in alike.values():
        each = max(needs[number].memory_of(2) for number in numbers)
        most = len(numbers) if memory is None or each == 0 else max(1, 2 * memory // each)
        found += [tuple(numbers[at : at + most]) for at in range(0, len(numbers), most)]
    return sorted(found)


# Corrections of estimates by what trials took: for packing, never for how a candidate trains.

RECENT = 32
REPEAT = 0.02
"""Margin of a trial that is alike to the byte to one that ran."""
MARGIN = 0.05
"""Margin of one that is alike in kind."""
GROWTH = 1.25
"""How many times its figure a trial gets at least that went beyond it."""


class MemoryCorrection:
    """Remembers what was observed, by shape (trials that are alike to the byte) and by family (alike in kind).

    Upward only: what a trial takes depends a little on what its worker did before, so that one that took less is no
    promise for the next. A shape that ran before needs at least what it needed, and a margin; a new one of a known
    family its estimate times the largest of the family's recent ratios, and a margin.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self._minimums: dict[str, int] = {}
        self._ratios: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    def apply(self, estimate: int, shape: str, family: str) -> int:
        """Bytes to reserve for a trial.

        >>> correction = MemoryCorrection()
        >>> correction.on_finished(1000, 1200, "gpt x1", "alone")
        >>> correction.apply(2000, "mlp x1", "alone"), correction.apply(2000, "mlp x2", "fused")
        (2520, 2000)
        """
        least = max(estimate, self._minimums.get(shape, 0))
        if shape in self._peaks:
            return max(ceil(self._peaks[shape] * (1.0 + REPEAT)), least)
        factor = max(self._ratios[family], default=0.0) * (1.0 + MARGIN)
        return max(ceil(estimate * max(factor, 1.0)), least)

    def on_finished(self, estimate: int, peak: int, shape: str, family: str) -> None:
        """A trial of that estimate, uncorrected, took so many bytes at its peak."""
        self._peaks[shape] = max(peak, self._peaks.get(shape, 0))
        self._ratios[family].append(peak / estimate)

    def on_oom(self, estimate: int, limit: int, needed: int | None, shape: str, family: str) -> int:
        """A trial wanted more than its limit, and at least ``needed`` if it said so; returns the bytes to reserve
        when it is tried again."""
        again = max(ceil(limit * GROWTH), needed or 0, self._minimums.get(shape, 0))
        again = self._minimums[shape] = max(again, ceil(self._peaks.get(shape, 0) * (1.0 + REPEAT)))
        # It was at least this much, and the next attempt says how much it really is.
        self._ratios[family].append(max(limit, needed or 0) / estimate)
        return again
