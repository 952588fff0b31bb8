"""The loop of a rank's process: takes messages from its links, lets its worker do what is next, sends what comes out.

Signals, heartbeats and traces are here, so that ``worker`` and ``stage`` know nothing of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from weft.distributed.heartbeat import Heartbeat
from weft.distributed.transport import Received, Transport
from weft.engine.consistency import VersionSchedule
from weft.engine.weight_versions import Offload
from weft.pipeline.message import Message
from weft.pipeline.scheduler import Kind, Op
from weft.pipeline.worker import OpResult, Worker
from weft.trace.recorder import TraceRecorder

IDLE = 0.5
"""Seconds after which a rank that waits looks for signals."""


class RankLoop:
    """Drives the worker of one stage over the same links, however often a new one takes over."""

    def __init__(
        self,
        transport: Transport,
        heartbeat: Heartbeat,
        tracer: TraceRecorder | None,
        stop_confirmed: Callable[[], bool] = lambda: True,
    ) -> None:
        """``stop_confirmed`` says, after a signal, whether it is the user who wants to stop."""
        self.transport, self.heartbeat = transport, heartbeat
        self._tracer, self._stop_confirmed = tracer, stop_confirmed
        self.busy = 0.0
        self.deciding = 0.0
        self.ops = 0
        self._began = time.perf_counter()
        self._wall = time.time() - time.perf_counter()
        self.last_status = 0.0
        """When the status was last given to the others."""
        self._in_flight = 0
        self._offload: Offload | None = None
        self._schedules: list[VersionSchedule] = []
        self._updates = 0

    def send(self, to: int, message: Message) -> None:
        """For a worker: a message goes to the stage before or behind it."""
        size = self.transport.send(to, message)
        if self._tracer is not None and (message.kind == "F" or message.kind == "B"):
            self._tracer.sent(message.kind, message.microbatch, time.time(), size)

    def drive(self, worker: Worker, stopping: Callable[[], bool]) -> Iterator[OpResult | None]:
        """Works until the worker is done; gives every operation, and None for every idle round.

        ``stopping`` says whether a signal has come; the first stage then ends the run at the next whole step.
        """
        self._offload = worker.stage.offload
        worker.on_start = self._starts
        if self._tracer is not None:
            self._schedules = _moving(worker)
            self._updates = worker.stage.updates
        ended = not worker.stage.is_first
        while not worker.done:
            while (arrived := self.transport.take(0)) is not None:
                self._receive(worker, arrived)
            if not ended and stopping() and self._stop_confirmed():
                m = worker.stage.config.microbatches
                until = -(-worker.scheduler.known // m) * m
                if until < worker.scheduler.total:
                    worker.end(until)
                ended = True
            done = worker.work()
            if done is None:
                self.heartbeat.op = None
                yield None
                arrived = None if worker.done else self.transport.take(IDLE)
                if arrived is not None:
                    self._receive(worker, arrived)
                continue
            self.busy += done.end - done.start
            self.ops += 1
            self._in_flight = len(worker.scheduler.in_flight)
            if self._tracer is not None:
                self._trace(self._tracer, done, worker)
            self._publish()
            yield done
        self.deciding += worker.deciding
        self.heartbeat.op = None
        self._publish(now=True)

    @property
    def status(self) -> dict[str, Any]:
        """What the progress line shows of this rank."""
        passed = time.perf_counter() - self._began
        status: dict[str, Any] = {"busy": self.busy / passed if passed else 0.0, "in_flight": float(self._in_flight)}
        return status if self._offload is None else {**status, "offload": self._offload.stats()}

    def _starts(self, op: Op) -> None:
        self.heartbeat.op = (str(op), time.monotonic())

    def _receive(self, worker: Worker, arrived: Received) -> None:
        message = arrived.message
        if self._tracer is None:
            worker.receive(message)
            return
        if message.kind == "F" or message.kind == "B":
            self._tracer.received(message.kind, message.microbatch, arrived.time)
        begin = time.perf_counter()
        worker.receive(message)
        self._trace_rest(self._tracer, worker, begin)  # the norm that an update waited for, perhaps

    def _publish(self, now: bool = False) -> None:
        clock = time.perf_counter()
        if now or clock - self.last_status > 0.5:
            self.last_status = clock
            self.heartbeat.figures = self.status
            if self._tracer is not None:
                self._tracer.flush()

    def _trace(self, tracer: TraceRecorder, done: OpResult, worker: Worker) -> None:
        _, kind, n = done.op
        begin, end = done.start, done.end if done.update is None else done.update[0]
        if done.deferred_updates:
            self._trace_update(tracer, done.deferred_updates, begin, done.prepared)
            begin = done.prepared
        in_flight, versions = len(worker.scheduler.in_flight) + (kind == "B"), _versions_read(self._schedules, kind, n)
        tracer.op(done.op, begin + self._wall, end + self._wall, in_flight, versions)
        if done.update is not None:
            self._trace_update(tracer, done.updates, *done.update)
        self._trace_rest(tracer, worker, done.end)

    def _trace_update(self, tracer: TraceRecorder, layers: int, begin: float, end: float) -> None:
        self._updates += layers
        tracer.update(layers, self._updates, begin + self._wall, end + self._wall)

    def _trace_rest(self, tracer: TraceRecorder, worker: Worker, begin: float) -> None:
        """Updates that came neither before nor with an operation, but since ``begin``."""
        more = worker.stage.updates - self._updates
        if more:
            self._trace_update(tracer, more, begin, time.perf_counter())


def _moving(worker: Worker) -> list[VersionSchedule]:
    """The schedules of layers whose backwards move on to newer weights, those that may be farthest ahead first."""
    schedules = {weights.schedule for weights in worker.stage.weights.values() if weights.parameters}
    moving = [at for at in schedules if at.backward_reads_newest]
    return sorted(moving, key=lambda at: (-at.max_version_lag, -at.window, at.microbatches_per_update))


def _versions_read(schedules: Sequence[VersionSchedule], kind: Kind, n: int) -> tuple[int, ...]:
    """The versions that forward and backward read, of the layer in which they differ most; a forward has one."""
    if not schedules:
        return ()
    forward, backward = max(
        ((at.forward_reads(n), at.backward_reads(n)) for at in schedules), key=lambda read: read[1] - read[0]
    )
    return (forward, backward) if kind == "B" else (forward,)
