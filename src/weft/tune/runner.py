"""The driver of a study: asks for trials, packs them onto devices, answers their reports, and survives their ends."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import SpaceError
from weft.runs.events import Events
from weft.tune.devices import kind, most_together, nominal
from weft.tune.fit.correction import MemoryCorrection
from weft.tune.fit.estimator import DeviceClass, EstimatorPool, Infeasible
from weft.tune.fit.fit import Requirements, architecture_key, fusion_groups
from weft.tune.jobs import Ended, Event, Executor, Job, Lost, Reported
from weft.tune.packing.dispatcher import Dispatcher
from weft.tune.pending import PendingJob, RunOptions, alike, estimated, job_of_task, shown
from weft.tune.progress import StudyProgress, TrialProgress
from weft.tune.recipe import Recipe
from weft.tune.study.distributions import readable
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
    """One run of a study to its end. ``watch`` is called after everything that happens."""

    def __init__(
        self,
        study: Study,
        executor: Executor,
        terms: StudySpec,
        way: RunOptions,
        *,
        trials: int,
        path: Path,
        events: Events,
        board: StudyProgress,
        watch: Callable[[StudyProgress], None] = lambda board: None,
    ) -> None:
        self.study, self.executor, self.terms, self.way = study, executor, terms, way
        self.board, self.events, self.path, self._watch, self._count = board, events, path, watch, trials
        self._recipe = isinstance(terms.objective, Recipe)
        counted = self._recipe or way.memory is not None
        self._places = Dispatcher(executor, way.workers, counted)
        devices = board.devices = self._places.devices
        # Fixed at the start: a machine that goes or comes must not change how candidates are fitted.
        self._nominal = nominal(way.memory, devices) if self._recipe else way.memory
        place = DeviceClass(self._nominal, most_together(devices), kind(devices), way.fuse > 1)
        self._foresight = EstimatorPool(terms, place)
        self._correction = MemoryCorrection()
        self._newest = -1
        self._begun = not self._recipe
        """Whether all of the first trials are known: until then no more start once half of the seats are taken."""
        self._block: dict[int, tuple[dict[str, Any], Requirements]] = {}
        self._readable: dict[int, dict[str, Any]] = {}
        """The values of trials whose need is not known yet, with derived dimensions."""
        self._waiting: dict[str, PendingJob] = {}
        self._running: dict[str, PendingJob] = {}
        self._again: dict[int, PendingJob] = {}
        """The last task of trials that took more than a device has and are fitted otherwise."""
        self._token = f"{key(os.getpid(), time.time_ns()) & 0xFFFF:04x}"

    def run(self) -> None:
        """Until every trial has ended. What a trial does never ends it; only Ctrl-C and lost storage do."""
        try:
            self._run()
        finally:
            self._foresight.close()

    def _run(self) -> None:
        self._tell_devices()
        self._newest = sum(record.state != "waiting" for record in self.study.trials()) - 1
        for proposal in self.study.open_trials():
            self._take(proposal.number, dict(proposal.params))
        while not self.study.finished():
            asked = self.study.askable() is not None
            if asked:
                proposal = self.study.ask()
                self._newest = proposal.number
                self._take(proposal.number, dict(proposal.params))
            for number, found in self._foresight.told():
                self._foreseen(number, found)
            open = self._foresight.open
            self._begun = self._begun or not (asked or open)
            self._release(open, final=not (asked or open or self._waiting or self._running))
            self._devices()
            if self._begun or len(self._running) < max(1, self._places.seats() // 2):
                self._admit()
            for event in self.executor.poll(0.0 if asked else SOON if open else PAUSE):
                self._happened(event)
            self._watch(self.board)

    # -- what is to run

    def _take(self, number: int, params: dict[str, Any]) -> None:
        self.board.rows[number] = TrialProgress(number, params)
        self._note("proposed", number, params=params)
        try:
            self._readable[number] = readable(self.study.definition.space, params)
        except SpaceError as problem:  # such as a division by 0
            self._end(number, "failed", None, {"error": str(problem), "refused": True})
            return
        self._foresight.ask(number, self._readable[number])

    def _foreseen(self, number: int, found: Requirements | Infeasible) -> None:
        if isinstance(found, Infeasible):
            del self._readable[number]
            tried = self._again.pop(number, None)
            notes = {} if tried is None else self._notes(tried, None)
            self._end(number, "failed", None, {**notes, "error": found.why, "refused": True})
            return
        self.board.rows[number].memory = found.memory
        self._block[number] = (self._readable.pop(number), found)

    def _release(self, open: Mapping[int, Mapping[str, Any]], final: bool) -> None:
        """Let whole blocks of consecutive trials wait for devices, those of one shape as one.

        Only trials of one block are fused, never those that happen to wait together. The last block may be shorter. A
        trial that is fused with none need not wait for the others of its block. Of ``open`` ones nothing is known yet,
        but that those of another kind are of another shape.
        """
        size, blocks = self.way.fuse, dict[int, dict[int, Requirements]]()
        unknown = {(number // size, architecture_key(params)) for number, params in open.items()}
        for number, (_, found) in self._block.items():
            if found.fusion_key is None:
                blocks[-1 - number] = {number: found}
            elif (number // size, found.architecture_key) in unknown:
                continue
            elif final or self._newest + 1 >= min((number // size + 1) * size, self._count):
                blocks.setdefault(number // size, {})[number] = found
        for needs in blocks.values():
            for numbers in fusion_groups(needs, self._nominal):
                trials = {number: self._block.pop(number)[0] for number in numbers}
                # Where some have no momentum or dropout, lanes take what those with it do.
                task = PendingJob(trials, max((needs[number] for number in numbers), key=lambda one: one.memory or 0))
                if (before := self._again.pop(numbers[0], None)) is not None:
                    task.attempts, task.lost, task.alone = before.attempts, before.lost, True
                self._wait(task)

    def _wait(self, task: PendingJob) -> None:
        first = min(task.trials)
        task.id = f"{first}-{task.attempts}-{self._token}"
        task.job, task.pace = None, None
        if not task.alone and task.need.memory is not None:
            estimate = task.need.memory_of(len(task.trials))
            task.memory = max(task.floor, self._correction.apply(estimate, **alike(task)))
            if self._recipe and not self._places.shares(task.memory):
                task.memory = None  # a device by itself has room for what was fitted to it
        for number in task.trials:
            row = self.board.rows[number]
            row.state, row.memory, row.places, row.device = "waiting", task.memory or row.memory, (), ""
            row.proposed = time.monotonic()
        self._waiting[task.id] = task

    def _admit(self) -> None:
        for id in self._places.impossible(self._waiting):
            task = self._waiting.pop(id)
            why = f"it needs {task.need.devices} devices of one machine with {task.memory} bytes each: none has"
            for number in list(task.trials):
                self._end(number, "failed", None, {"error": why, "refused": True})
        for id, places in self._places.admit(self._waiting):
            self._start(self._waiting.pop(id), places)

    def _start(self, task: PendingJob, places: tuple[int, ...]) -> None:
        now = time.monotonic()
        task.attempts += 1
        numbers = tuple(sorted(task.trials))
        capped = self._nominal if task.whole and self._recipe else task.memory
        job = task.job = Job(
            task.id,
            numbers,
            tuple(task.trials[number] for number in numbers),
            task.need.fit,
            places,
            capped,
            str(self.path),
            self.way.seconds,
        )
        self._running[task.id] = task
        devices = [self._places.devices[place] for place in places]
        names = " ".join(device.name for device in devices)
        for number in numbers:
            row = self.board.rows[number]
            row.state, row.places, row.device, row.started = "starting", places, names, now
            row.attempts, row.waited = task.attempts, row.waited + now - row.proposed
        where = {"devices": names, "node": devices[0].node, "places": places}
        self._note("placed", *numbers, job=job.id, **where, memory=task.memory, estimated=estimated(task))
        self.executor.start(job)

    # -- what happens to it

    def _happened(self, event: Event) -> None:
        task = self._running.get(event.job)
        if task is None:
            return
        if isinstance(event, Reported):
            self._reported(task, event)
        elif isinstance(event, Lost):
            self._lost(task, event)
        elif event.state == "out-of-memory":
            self._exceeded(task, event)
        else:
            self._ended(task, event)

    def _reported(self, task: PendingJob, event: Reported) -> None:
        prune = self.study.report(event.trial, event.step, event.values)
        self.executor.answer(event.job, event.trial, prune)
        row = self.board.rows[event.trial]
        row.state, row.step, row.values = "running", event.step, event.values
        self._note("reported", event.trial, at=event.step, values=event.values, prune=prune)
        now = time.monotonic()
        if event.trial == min(task.trials):
            if task.pace is not None and event.step > task.pace[1]:
                self._places.measured(job_of_task(task), event.step - task.pace[1], task.pace[0], now)
            task.pace = (now, event.step)

    def _ended(self, task: PendingJob, event: Ended) -> None:
        row = self.board.rows[event.trial]
        row.peak = event.peak
        if task.need.memory is not None and event.peak and event.state in ("complete", "pruned"):
            estimate = task.need.memory_of(len(job_of_task(task).trials))
            self._correction.on_finished(estimate, event.peak, **alike(task))
        state = event.state if event.state in ("complete", "pruned") else "failed"
        self._account(row, event.seconds)
        task.trials.pop(event.trial, None)
        notes = {**self._notes(task, event), **({"error": event.error} if event.error else {})}
        if event.state == "timeout":
            notes["timeout"] = True
        self._end(event.trial, state, event.values, notes)
        if not task.trials:
            self._leave(task)

    def _lost(self, task: PendingJob, event: Lost) -> None:
        self._leave(task)
        self._note("lost", *task.trials, job=event.job, why=event.why)
        task.lost += 1
        for number in task.trials:
            self._account(self.board.rows[number], None)
        if task.lost > self.way.retries:
            why = f"{event.why}; it was tried {task.attempts} times, and {self.way.retries} retries are allowed"
            for number in list(task.trials):
                self._end(number, "failed", None, {**self._notes(task, None), "error": why})
            return
        log.warning("trial %s: %s; it goes on from its checkpoint", shown(task), event.why)
        self._wait(task)

    def _exceeded(self, task: PendingJob, event: Ended) -> None:
        """Again with a larger figure, then with the whole device; then fitted the next way that there is, if any."""
        job = job_of_task(task)
        row = self.board.rows[event.trial]
        row.peak = event.peak
        self._note("exceeded", event.trial, job=event.job, memory=job.memory, needed=event.peak)
        self._leave(task)
        self.executor.stop(event.job)
        for number in task.trials:
            self._account(self.board.rows[number], event.seconds)
        if task.alone or (task.whole and len(job.trials) == 1):
            params, fitted = task.trials.pop(event.trial, None), task.need.fit
            if fitted is not None and params is not None:
                self._readable[event.trial], self._again[event.trial] = params, task
                self._foresight.ask(event.trial, params, (fitted.strategy, fitted.devices))
            else:
                notes = {**self._notes(task, event), "error": event.error, "alone": True}
                self._end(event.trial, "failed", None, notes)
            if task.trials:
                self._wait(task)
            return
        task.exceeded += 1
        if task.memory is not None and task.need.memory is not None:
            estimate = task.need.memory_of(len(job.trials))
            task.floor = self._correction.on_oom(estimate, task.memory, needed=event.peak, **alike(task))
        if task.exceeded > 1 or task.memory is None or not self._recipe:
            # One by one: a fused training that takes too much is not tried as one again.
            for number, params in task.trials.items():
                self._wait(PendingJob({number: params}, task.need, attempts=task.attempts, alone=True, lost=task.lost))
            return
        self._wait(task)

    def _end(self, number: int, state: Any, values: tuple[float, ...] | None, notes: Mapping[str, Any]) -> None:
        self.study.tell(number, state, values, notes)
        row = self.board.rows[number]
        row.state, row.values = state, values if values is not None else row.values
        row.why = _last_line(str(notes.get("error", "")))
        self._note("ended", number, state=state, values=values, **notes)
        self.events.flush()
        if state == "failed":
            log.warning("trial %d failed: %s", number, row.why)

    def _notes(self, task: PendingJob, event: Ended | None) -> dict[str, Any]:
        places = () if task.job is None else task.job.devices
        devices = [self._places.devices[place] for place in places]
        found = {
            "fit": None if task.need.fit is None else asdict(task.need.fit),
            "estimate": task.need.note or None,
            "devices": [f"{device.node}/{device.name}" for device in devices],
            "memory": task.memory if task.memory is not None else task.need.memory,
            "peak": None if event is None else event.peak,
            "seconds": None if event is None else event.seconds,
            "attempts": task.attempts,
            "fused": len(job_of_task(task).trials) if task.job else 1,
        }
        return {name: value for name, value in found.items() if value is not None}  # each is a transaction

    def _leave(self, task: PendingJob) -> None:
        job = job_of_task(task)
        self._running.pop(job.id, None)
        self._places.left(job)

    def _devices(self) -> None:
        if self._places.changed():
            self._tell_devices()
            self.board.devices = self._places.devices

    def _tell_devices(self) -> None:
        """By place, as jobs name them."""
        devices = self._places.devices
        names = [f"{device.node}/{device.name}" for device in devices]
        gone = [name for name, device in zip(names, devices, strict=True) if device.gone]
        self._note("devices", now=names, gone=gone, memory=[device.memory for device in devices])

    def _account(self, row: TrialProgress, seconds: float | None) -> None:
        taken = time.monotonic() - row.started
        row.ran += taken if seconds is None else min(seconds, taken)
        row.starting += 0.0 if seconds is None else max(0.0, taken - seconds)

    def _note(self, event: str, *trials: int, **fields: Any) -> None:
        self.events.append(event, trials=list(trials), **fields)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""
