"""The runner of a study: asks for trials, packs them onto devices, answers their reports, and handles their ends."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import SpaceError
from weft.runs.events import Events
from weft.tune.config import StudyConfig, StudyExecution
from weft.tune.devices import kind, most_together, nominal
from weft.tune.fit.estimator import (
    DeviceClass,
    EstimatorPool,
    Infeasible,
    MemoryCorrection,
    Requirements,
    architecture_key,
    fusion_groups,
)
from weft.tune.jobs import (
    Ended,
    Event,
    Executor,
    Job,
    Lost,
    PendingJob,
    Reported,
    StudyProgress,
    TrialProgress,
)
from weft.tune.packing.packer import Dispatcher
from weft.tune.recipe import Recipe
from weft.tune.study.optuna import with_derived
from weft.tune.training.run_job import StudySpec
from weft.utils.rng import key

if TYPE_CHECKING:
    from weft.tune.study.study import Study

log = logging.getLogger("weft.tune")

PAUSE = 0.5
"""Seconds between two looks at devices that may have come or gone."""
SOON = 0.02
"""Seconds between two looks at estimates that are being made."""


class StudyRunner:
    """Runs a study to its end. ``callbacks`` are called after everything that happens."""

    def __init__(
        self,
        study: Study,
        executor: Executor,
        spec: StudySpec,
        config: StudyConfig,
        execution: StudyExecution,
        path: Path,
        events: Events,
        progress: StudyProgress,
        callbacks: Sequence[Callable[[StudyProgress], None]] = (),
    ) -> None:
        self.study, self.executor, self.config, self.execution = study, executor, config, execution
        self.progress, self.events, self.path, self._callbacks = progress, events, path, callbacks
        self._is_recipe = isinstance(spec.objective, Recipe)
        memory = config.memory_of(spec.objective)
        self._dispatcher = Dispatcher(executor, execution.jobs_per_device, self._is_recipe or memory is not None)
        devices = progress.devices = self._dispatcher.devices
        # Fixed at the start: a machine that goes or comes must not change how trials are fitted.
        self._nominal = nominal(memory, devices) if self._is_recipe else memory
        self._estimators = EstimatorPool(
            spec, DeviceClass(self._nominal, most_together(devices), kind(devices), config.fuse > 1)
        )
        self._correction = MemoryCorrection()
        self._newest = -1
        self._all_estimated = not self._is_recipe
        """Whether all of the first trials are estimated: until then only half of the slots are filled."""
        self._estimated: dict[int, tuple[dict[str, Any], Requirements]] = {}
        self._unestimated: dict[int, dict[str, Any]] = {}
        """The values of trials whose requirements are not known yet, with derived dimensions."""
        self._waiting: dict[str, PendingJob] = {}
        self._running: dict[str, PendingJob] = {}
        self._refitted: dict[int, PendingJob] = {}
        """The last job of trials that took more than a device has and are fitted otherwise."""
        self._token = f"{key(os.getpid(), time.time_ns()) & 0xFFFF:04x}"

    def run(self) -> None:
        """Until every trial has ended. What a trial does never ends it; only Ctrl-C and lost storage do."""
        try:
            self._run()
        finally:
            self._estimators.close()

    def _run(self) -> None:
        self._log_devices()
        self._newest = sum(record.state != "waiting" for record in self.study.trials()) - 1
        for proposal in self.study.open_trials():
            self._add_trial(proposal.number, dict(proposal.params))
        while not self.study.finished():
            asked = self.study.askable() is not None
            if asked:
                proposal = self.study.ask()
                self._newest = proposal.number
                self._add_trial(proposal.number, dict(proposal.params))
            for number, found in self._estimators.completed():
                self._add_estimate(number, found)
            open = self._estimators.open
            self._all_estimated = self._all_estimated or not (asked or open)
            self._group(open, final=not (asked or open or self._waiting or self._running))
            if self._dispatcher.update_devices():
                self._log_devices()
                self.progress.devices = self._dispatcher.devices
            if self._all_estimated or len(self._running) < max(1, self._dispatcher.slots() // 2):
                self._start_jobs()
            for event in self.executor.poll(0.0 if asked else SOON if open else PAUSE):
                self._handle(event)
            for callback in self._callbacks:
                callback(self.progress)

    # -- from a proposal to a job

    def _add_trial(self, number: int, params: dict[str, Any]) -> None:
        self.progress.trials[number] = TrialProgress(number, params)
        self._log("proposed", number, params=params)
        try:
            self._unestimated[number] = with_derived(self.study.definition.space, params)
        except SpaceError as problem:  # such as a division by 0
            self._refuse(number, str(problem))
            return
        self._estimators.ask(number, self._unestimated[number])

    def _add_estimate(self, number: int, found: Requirements | Infeasible) -> None:
        if isinstance(found, Infeasible):
            del self._unestimated[number]
            self._refuse(number, found.reason, self._refitted.pop(number, None))
            return
        self.progress.trials[number].memory = found.memory
        self._estimated[number] = (self._unestimated.pop(number), found)

    def _group(self, open: Mapping[int, Mapping[str, Any]], final: bool) -> None:
        """Let whole blocks of consecutive trials wait for devices, those of one shape as one.

        Only trials of one block are fused, never those that happen to wait together. The last block may be shorter. A
        trial that is fused with none need not wait for the others of its block. Of ``open`` ones nothing is known yet,
        but that those of another architecture are of another shape.
        """
        size, blocks = self.config.fuse, dict[int, dict[int, Requirements]]()
        unknown = {(number // size, architecture_key(params)) for number, params in open.items()}
        for number, (_, found) in self._estimated.items():
            if found.fusion_key is None:
                blocks[-1 - number] = {number: found}
            elif (number // size, found.architecture_key) in unknown:
                continue
            elif final or self._newest + 1 >= min((number // size + 1) * size, self.config.trials):
                blocks.setdefault(number // size, {})[number] = found
        for needs in blocks.values():
            for numbers in fusion_groups(needs, self._nominal):
                trials = {number: self._estimated.pop(number)[0] for number in numbers}
                # Where some have no momentum or dropout, fused trials take what those with it do.
                pending = PendingJob(trials, max((needs[n] for n in numbers), key=lambda one: one.memory or 0))
                if (before := self._refitted.pop(numbers[0], None)) is not None:
                    pending.attempts, pending.crashes, pending.exclusive = before.attempts, before.crashes, True
                self._wait(pending)

    def _wait(self, pending: PendingJob) -> None:
        first = min(pending.trials)
        pending.id = f"{first}-{pending.attempts}-{self._token}"
        pending.job, pending.last_report = None, None
        if not pending.exclusive and pending.needs.memory is not None:
            pending.memory = pending.needs.memory_of(len(pending.trials))
            if self._is_recipe:
                corrected = self._correction.apply(pending.memory, *pending.likeness())
                pending.memory = max(pending.min_memory, corrected)
                if not self._dispatcher.has_room_for(pending.memory):
                    pending.memory = None  # a device by itself has room for what was fitted to it
        for number in pending.trials:
            trial = self.progress.trials[number]
            trial.state, trial.memory, trial.places, trial.device = "waiting", pending.memory or trial.memory, (), ""
            trial.proposed = time.monotonic()
        self._waiting[pending.id] = pending

    def _start_jobs(self) -> None:
        for id in self._dispatcher.impossible(self._waiting):
            pending = self._waiting.pop(id)
            for number in pending.trials:
                needed = f"{pending.needs.devices} devices of one machine with {pending.memory} bytes each"
                self._refuse(number, f"it needs {needed}: none has")
        for id, devices in self._dispatcher.admit(self._waiting):
            self._start(self._waiting.pop(id), devices)

    def _start(self, pending: PendingJob, indices: tuple[int, ...]) -> None:
        now = time.monotonic()
        pending.attempts += 1
        numbers = tuple(sorted(pending.trials))
        params = tuple(pending.trials[number] for number in numbers)
        memory = self._nominal if pending.takes_whole_device and self._is_recipe else pending.memory
        fit, folder, timeout = pending.needs.fit, str(self.path), self.execution.timeout
        job = pending.job = Job(pending.id, numbers, params, fit, indices, memory, folder, timeout)
        self._running[pending.id] = pending
        devices = [self._dispatcher.devices[index] for index in indices]
        names = " ".join(device.name for device in devices)
        for number in numbers:
            trial = self.progress.trials[number]
            trial.state, trial.places, trial.device, trial.started = "starting", indices, names, now
            trial.attempts, trial.waited = pending.attempts, trial.waited + now - trial.proposed
        where = {"devices": names, "node": devices[0].node, "places": indices}
        self._log("placed", *numbers, job=job.id, **where, memory=pending.memory, estimated=pending.estimate())
        self.executor.start(job)

    # -- what an executor reports

    def _handle(self, event: Event) -> None:
        pending = self._running.get(event.job)
        if pending is None:
            return
        if isinstance(event, Reported):
            self._reported(pending, event)
        elif isinstance(event, Lost):
            self._crashed(pending, event)
        elif event.state == "out-of-memory":
            self._out_of_memory(pending, event)
        else:
            self._ended(pending, event)

    def _reported(self, pending: PendingJob, event: Reported) -> None:
        prune = self.study.report(event.trial, event.step, event.values)
        self.executor.answer(event.job, event.trial, prune)
        trial = self.progress.trials[event.trial]
        trial.state, trial.step, trial.values = "running", event.step, event.values
        self._log("reported", event.trial, at=event.step, values=event.values, prune=prune)
        now = time.monotonic()
        if event.trial == min(pending.trials):
            if pending.last_report is not None and event.step > pending.last_report[1]:
                since, step = pending.last_report
                self._dispatcher.measured(pending.running, event.step - step, since, now)
            pending.last_report = (now, event.step)

    def _ended(self, pending: PendingJob, event: Ended) -> None:
        trial = self.progress.trials[event.trial]
        trial.peak = event.peak
        state = event.state if event.state in ("complete", "pruned") else "failed"
        if self._is_recipe and pending.needs.memory is not None and event.peak and state != "failed":
            self._correction.on_finished(pending.needs.memory_of(pending.fused), event.peak, *pending.likeness())
        trial.add_time(event.seconds)
        pending.trials.pop(event.trial, None)
        info = {**self._info(pending, event), **({"error": event.error} if event.error else {})}
        if event.state == "timeout":
            info["timeout"] = True
        self._end(event.trial, state, event.values, info)
        if not pending.trials:
            self._release_devices(pending)

    def _crashed(self, pending: PendingJob, event: Lost) -> None:
        self._release_devices(pending)
        self._log("lost", *pending.trials, job=event.job, why=event.reason)
        pending.crashes += 1
        for number in pending.trials:
            self.progress.trials[number].add_time(None)
        retries = self.execution.max_retries
        if pending.crashes > retries:
            error = f"{event.reason}; it was tried {pending.attempts} times, and {retries} retries are allowed"
            for number in pending.trials:
                self._end(number, "failed", None, {**self._info(pending, None), "error": error})
            return
        log.warning("trial %s: %s; it continues from its checkpoint", pending, event.reason)
        self._wait(pending)

    def _out_of_memory(self, pending: PendingJob, event: Ended) -> None:
        """Again with more memory, then with the whole device; then with the next strategy that fits, if any."""
        job = pending.running
        self.progress.trials[event.trial].peak = event.peak
        self._log("exceeded", event.trial, job=event.job, memory=job.memory, needed=event.peak)
        self._release_devices(pending)
        self.executor.stop(event.job)
        for number in pending.trials:
            self.progress.trials[number].add_time(event.seconds)
        if pending.exclusive or (pending.takes_whole_device and len(job.trials) == 1):
            params, fit = pending.trials.pop(event.trial, None), pending.needs.fit
            if fit is not None and params is not None:
                self._unestimated[event.trial], self._refitted[event.trial] = params, pending
                self._estimators.ask(event.trial, params, (fit.strategy, fit.devices))
            else:
                info = {**self._info(pending, event), "error": event.error, "alone": True}
                self._end(event.trial, "failed", None, info)
            if pending.trials:
                self._wait(pending)
            return
        pending.oom_count += 1
        if self._is_recipe and pending.memory is not None:
            estimate = pending.needs.memory_of(len(job.trials))
            pending.min_memory = self._correction.on_oom(estimate, pending.memory, event.peak, *pending.likeness())
        if pending.oom_count > 1 or pending.memory is None or not self._is_recipe:
            # One by one: a fused training that takes too much is not tried as one again.
            for number, params in pending.trials.items():
                attempts, crashes = pending.attempts, pending.crashes
                self._wait(
                    PendingJob({number: params}, pending.needs, attempts=attempts, crashes=crashes, exclusive=True)
                )
            return
        self._wait(pending)

    def _refuse(self, number: int, why: str, before: PendingJob | None = None) -> None:
        info = {} if before is None else self._info(before, None)
        self._end(number, "failed", None, {**info, "error": why, "refused": True})

    def _end(self, number: int, state: Any, values: tuple[float, ...] | None, info: Mapping[str, Any]) -> None:
        self.study.tell(number, state, values, info)
        trial = self.progress.trials[number]
        trial.state, trial.values = state, values if values is not None else trial.values
        trial.reason = str(info.get("error", "")).strip().rpartition("\n")[2]
        self._log("ended", number, state=state, values=values, **info)
        self.events.flush()
        if state == "failed":
            log.warning("trial %d failed: %s", number, trial.reason)

    def _info(self, pending: PendingJob, event: Ended | None) -> dict[str, Any]:
        """What is kept with a trial beside its values."""
        devices = [self._dispatcher.devices[index] for index in (pending.job.devices if pending.job else ())]
        found = {
            "fit": None if pending.needs.fit is None else asdict(pending.needs.fit),
            "estimate": pending.needs.note or None,
            "devices": [f"{device.node}/{device.name}" for device in devices],
            "memory": pending.memory if pending.memory is not None else pending.needs.memory,
            "peak": None if event is None else event.peak,
            "seconds": None if event is None else event.seconds,
            "attempts": pending.attempts,
            "fused": pending.fused if pending.job else 1,
        }
        return {name: value for name, value in found.items() if value is not None}  # each is a transaction

    def _release_devices(self, pending: PendingJob) -> None:
        self._running.pop(pending.running.id, None)
        self._dispatcher.released(pending.running)

    def _log_devices(self) -> None:
        """By index, as jobs name them."""
        devices = self._dispatcher.devices
        names = [f"{device.node}/{device.name}" for device in devices]
        gone = [name for name, device in zip(names, devices, strict=True) if device.gone]
        self._log("devices", now=names, gone=gone, memory=[device.memory for device in devices])

    def _log(self, event: str, *trials: int, **fields: Any) -> None:
        self.events.append(event, trials=list(trials), **fields)
