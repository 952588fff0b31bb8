"""Jobs in processes of this machine: workers that run one job after another, and are replaced when they die."""

from __future__ import annotations

import atexit
import math
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from typing import Any

from weft.errors import TuneError
from weft.tune.devices import local_devices, reserve
from weft.tune.executors.worker import (
    JsonConnection,
    Message,
    kill_process,
    open_rendezvous,
    pack_spec,
    run_worker,
    start_process,
)
from weft.tune.jobs import Device, Ended, Event, Job, Lost, event_from_json
from weft.tune.recipe import Recipe

MAX_FAILED_STARTS = 3
"""So many workers in a row that die before they are ready end the study: it is not the trials' fault."""


class LocalExecutor:
    """An `Executor` on this machine's devices. Nothing listens beyond loopback; workers die with this process.

    ``threads`` of each worker on a CPU; results depend on it, and so it is 1 however many run.
    """

    def __init__(self, spec: Any, devices: Sequence[Device] | None = None, *, threads: int = 1) -> None:
        self.devices: Sequence[Device] = tuple(local_devices() if devices is None else devices)
        self._payload, self._recipe = pack_spec(spec), isinstance(spec.objective, Recipe)
        self._threads = threads
        self._contexts = [reserve(device) for device in self.devices]
        self._workers: list[WorkerHandle] = []
        self._jobs: dict[str, RunningLocalJob] = {}
        self._events: list[Event] = []
        self._failed_starts = 0
        atexit.register(self.close)  # before multiprocessing waits for its children, who wait for us

    def start(self, job: Job) -> None:
        workers: list[WorkerHandle] = []
        for index in job.devices:
            idle = [w for w in self._workers if w.device == index and self._is_free(w) and w not in workers]
            workers.append(idle[0] if idle else self._spawn(index))
            beside = [other.job for other in self._jobs.values() if index in other.job.devices]
            keep = idle_workers(self.devices[index].memory, self._contexts[index], [job, *beside])
            for other in [] if keep is None else idle[1 + keep :]:
                self._retire(other)
        running = self._jobs[job.id] = RunningLocalJob(job, workers)
        rendezvous: dict[str, str] = {}
        if len(workers) > 1:
            rendezvous, running.store = open_rendezvous(len(workers))
        for rank, worker in enumerate(workers):
            worker.job = running
            worker.send({"type": "job", "job": asdict(job), "rank": rank, "rendezvous": rendezvous})

    def answer(self, job: str, trial: int, prune: bool) -> None:
        if job in self._jobs:
            self._jobs[job].workers[0].send({"type": "answer", "trial": trial, "prune": prune})

    def stop(self, job: str) -> None:
        running = self._jobs.pop(job, None)
        if running is not None:
            self._events = [event for event in self._events if event.job != job]
            for worker in running.workers:
                self._retire(worker)

    def poll(self, timeout: float) -> list[Event]:
        until = time.monotonic() + timeout
        while not self._events:
            left = min([until, *(running.next_deadline() for running in self._jobs.values())]) - time.monotonic()
            watched: dict[Any, WorkerHandle] = {worker.connection: worker for worker in self._workers}
            watched |= {worker.process.sentinel: worker for worker in self._workers}
            if not watched and not self._jobs:
                time.sleep(max(0.0, min(left, timeout)))
            ready = wait(list(watched), max(0.0, left)) if watched else []
            for worker in dict.fromkeys(watched[item] for item in ready):
                self._receive(worker)
            self._check_time()
            if time.monotonic() >= until:
                break
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        atexit.unregister(self.close)
        self._jobs.clear()
        for worker in list(self._workers):
            self._retire(worker)

    def _is_free(self, worker: WorkerHandle) -> bool:
        """Its last job is over, even if it has not reported so yet: it starts the next one when it has."""
        last = worker.job
        return last is None or (last.job.id not in self._jobs and len(last.workers) == 1)

    def _spawn(self, index: int) -> WorkerHandle:
        name = self.devices[index].name
        threads = self._threads if name == "cpu" else None
        given = (self._payload, name, threads)
        process, connection = start_process(f"weft-worker-{name}", threads, run_worker, *given, recipe=self._recipe)
        worker = WorkerHandle(process, connection, index)
        self._workers.append(worker)
        return worker

    def _retire(self, worker: WorkerHandle) -> None:
        """At once: checkpoints are whole at every moment, so nothing is lost by it."""
        if worker in self._workers:
            self._workers.remove(worker)
        worker.connection.close()
        kill_process(worker.process)
        worker.job = None

    def _receive(self, worker: WorkerHandle) -> None:
        messages, alive = worker.connection.receive_all() if worker in self._workers else ([], True)
        for message in messages:
            self._handle(worker, message)
        if worker in self._workers and (not alive or not worker.process.is_alive()):
            self._died(worker)

    def _handle(self, worker: WorkerHandle, message: Message) -> None:
        running, kind = worker.job, message.pop("type")
        if kind == "ready":
            worker.ready, self._failed_starts = True, 0
        elif kind == "broken":
            raise TuneError(
                f"a worker cannot import what it is to run: {message['reason']}; the objective and all that it names "
                "must be importable: in a module, not in a notebook cell or inside another function"
            )
        elif running is None or message.pop("job", running.job.id) != running.job.id:
            return  # it is about the job before
        elif kind == "began":
            running.begin()
        elif kind == "idle":
            worker.job = None
            # A fresh process is sure to have left every group of a split job, and all memory.
            if len(running.workers) > 1 or message.get("leaked"):
                self._retire(worker)
        elif kind == "event" and running.job.id in self._jobs:
            event = event_from_json(message["event"])
            if isinstance(event, Ended) and event.state not in ("complete", "pruned") and len(running.workers) > 1:
                running.fail(event)
            else:
                self._emit(running, event)

    def _emit(self, running: RunningLocalJob, event: Event) -> None:
        self._events.append(event)
        if running.is_over(event):
            self._jobs.pop(running.job.id, None)

    def _died(self, worker: WorkerHandle) -> None:
        worker.process.join(5.0)  # the connection may break an instant before the process is gone
        reason = exit_reason(worker)
        running = worker.job
        self._retire(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise TuneError(
                    f"workers end before they are ready: {reason}. A script that calls weft.tune must do so under "
                    "`if __name__ == '__main__':`, since every worker imports it"
                )
        if running is not None and running.job.id in self._jobs:
            if len(running.workers) > 1:
                running.fail(Lost(running.job.id, reason))
            else:
                self._lose(running, Lost(running.job.id, reason))

    def _lose(self, running: RunningLocalJob, event: Lost) -> None:
        self._jobs.pop(running.job.id, None)
        self._events.append(event)
        self._retire_all(running)

    def _check_time(self) -> None:
        """Jobs past their time limit, and failures of split jobs whose other processes had time to report theirs."""
        now = time.monotonic()
        for running in list(self._jobs.values()):
            if running.failures and now >= running.decided_at:
                cause = running.cause()
                if isinstance(cause, Lost):
                    self._lose(running, cause)
                else:
                    self._emit(running, cause)
                    self._retire_all(running)
            elif now >= running.deadline:
                del self._jobs[running.job.id]
                self._retire_all(running)
                self._events += running.timeouts(now)

    def _retire_all(self, running: RunningLocalJob) -> None:
        for worker in running.workers:
            if worker in self._workers:
                self._retire(worker)


def idle_workers(memory: int | None, context: int, jobs: Sequence[Job]) -> int | None:
    """How many idle workers may stay on a device beside its jobs, since each holds a context; None: any number."""
    if context == 0:
        return None
    if memory is None or any(job.memory is None for job in jobs):
        return 0  # a job may want all that there is
    return max(0, (memory - sum((job.memory or 0) + context for job in jobs)) // context)


# The workers of a job, on this machine or on others, and what goes wrong with them.

GRACE = 1.0
"""Seconds that a failure in one process of a split job waits for the others', of which it may only be a consequence."""


@dataclass(eq=False)
class WorkerHandle:
    """A process, and the connection to it."""

    process: Any
    connection: JsonConnection
    device: int
    ready: bool = False
    job: RunningLocalJob | None = None

    def send(self, message: Message) -> None:
        with suppress(OSError):  # its sentinel shows that it is gone
            self.connection.send(message)


@dataclass(eq=False)
class RunningJob:
    """A job with its workers, rank by rank."""

    job: Job
    workers: list[Any]
    ended: set[int] = field(default_factory=set)
    began: float = 0.0
    deadline: float = math.inf

    def begin(self) -> None:
        """A worker began; the time of all runs from the first."""
        if self.deadline == math.inf:
            self.began = time.monotonic()
            self.deadline = self.began + (self.job.timeout or math.inf)

    def is_over(self, event: Event) -> bool:
        """Whether this is the end of its last trial."""
        if isinstance(event, Ended):
            self.ended.add(event.trial)
        return self.ended >= set(self.job.trials)

    def timeouts(self, now: float) -> list[Event]:
        """The ends of the trials of a job that is past its deadline."""
        limit, spent = f"it ran longer than its limit of {self.job.timeout:g} s", now - self.began
        left = [trial for trial in self.job.trials if trial not in self.ended]
        return [Ended(self.job.id, trial, "timeout", error=limit, seconds=spent) for trial in left]


@dataclass(eq=False)
class RunningLocalJob(RunningJob):
    """On this machine, with what failed in several processes, and when that is decided."""

    workers: list[WorkerHandle]
    failures: list[Ended | Lost] = field(default_factory=list)
    decided_at: float = math.inf
    store: Any = None

    def fail(self, event: Ended | Lost) -> None:
        """One process of a split job failed, perhaps only since another did."""
        self.failures.append(event)
        self.decided_at = min(self.decided_at, time.monotonic() + GRACE)

    def cause(self) -> Ended | Lost:
        """The cause: too little memory, else a process that is gone, else what was raised first."""

        def rank(event: Ended | Lost) -> int:
            return 1 if isinstance(event, Lost) else 0 if event.state == "out-of-memory" else 2

        return min(self.failures, key=rank)

    def next_deadline(self) -> float:
        """When time may decide something about it."""
        return min(self.deadline, self.decided_at)


def exit_reason(worker: WorkerHandle) -> str:
    """Why a worker's process is gone."""
    code, pid = worker.process.exitcode, worker.process.pid
    if code is not None and code < 0:
        hint = " (the machine may have run out of memory)" if code == -signal.SIGKILL else ""
        return f"worker process {pid} was killed by signal {-code}{hint}"
    return f"worker process {pid} ended with exit code {code}"
