"""The loop of a stage's process: takes messages from its links, lets the worker do what is next, sends what comes out.

Signals, heartbeats and traces are here, so that ``worker`` and ``stage`` know nothing of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.pipeline.message import Message
from weft.pipeline.scheduler import Op
from weft.pipeline.tracer import Tracer
from weft.pipeline.transport import Arrived, Transport
from weft.pipeline.watch import Watch
from weft.pipeline.worker import Done, Worker

IDLE = 0.5
"""Seconds after which a stage that waits looks for signals."""


class Runtime:
    """Drives the workers of one stage, one after the other, over the same links.

    ``stopping`` says whether the user wants to stop; the first stage then ends the run at the next whole step.
    """

    def __init__(
        self, stage: int, transport: Transport, watch: Watch, tracer: Tracer | None, stopping: Callable[[], bool]
    ) -> None:
        self.stage, self.transport, self.watch = stage, transport, watch
        self.tracer = tracer
        self.busy = 0.0
        self.deciding = 0.0
        self.ops = 0
        self._began = time.perf_counter()
        self._wall = time.time() - time.perf_counter()
        self._stopping = stopping
        self.told = 0.0
        """When the figures were last shown to the others."""
        self._in_flight = 0

    def send(self, to: int, message: Message) -> None:
        """For the worker: a message goes to a neighbour."""
        size = self.transport.send(to, message)
        if self.tracer is not None and message.kind != "end":
            self.tracer.sent(message.kind, message.microbatch, time.time(), size)

    def drive(self, worker: Worker, on_done: Callable[[Done | None], None]) -> None:
        """Works until the worker is done. ``on_done`` is told of every operation, and (None) of every idle round."""
        worker.on_start = self._starts
        ended = self.stage != 0
        while not worker.done:
            while (arrived := self.transport.take(0)) is not None:
                self._receive(worker, arrived)
            if not ended and self._stopping():
                m = worker.stage.law.microbatches
                until = -(-worker.scheduler.known // m) * m
                if until < worker.scheduler.total:
                    worker.end(until)
                ended = True
            done = worker.work()
            if done is None:
                self.watch.idle()
                on_done(None)
                waited = None if worker.done else self.transport.take(IDLE)
                if waited is not None:
                    self._receive(worker, waited)
                continue
            self.busy += done.end - done.start
            self.ops += 1
            self._in_flight = len(worker.scheduler.in_flight)
            if self.tracer is not None:
                self._trace(self.tracer, done, worker)
            self._tell()
            on_done(done)
        self.deciding += worker.figures.deciding
        self.watch.idle()
        self._tell(now=True)

    @property
    def figures(self) -> dict[str, float]:
        """What the progress line shows of this stage."""
        passed = time.perf_counter() - self._began
        return {"busy": self.busy / passed if passed else 0.0, "in_flight": float(self._in_flight)}

    def _starts(self, op: Op) -> None:
        self.watch.doing(str(op))

    def _receive(self, worker: Worker, arrived: Arrived) -> None:
        message = arrived.message
        if self.tracer is not None and message.kind != "end":
            self.tracer.received(message.kind, message.microbatch, arrived.time)
        worker.receive(message)

    def _tell(self, now: bool = False) -> None:
        clock = time.perf_counter()
        if now or clock - self.told > 0.5:
            self.told = clock
            self.watch.figures = self.figures
            if self.tracer is not None:
                self.tracer.flush()

    def _trace(self, tracer: Tracer, done: Done, worker: Worker) -> None:
        end = done.end if done.update is None else done.update[0]
        in_flight = self._in_flight + (done.op.kind == "B")
        tracer.op(done.op, done.start + self._wall, end + self._wall, in_flight)
        if done.update is not None:
            begin, over = done.update
            tracer.update(done.updated, worker.stage.updates, begin + self._wall, over + self._wall)
