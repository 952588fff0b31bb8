"""The loop of a rank's process: takes messages from its links, lets a worker do what is next, sends what comes out.

Signals, heartbeats and traces are here, so that ``worker`` and ``stage`` know nothing of processes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.pipeline.consistency import Clock
from weft.pipeline.crew import Crew
from weft.pipeline.message import Message, handed
from weft.pipeline.placement import Placement
from weft.pipeline.residency import Resident
from weft.pipeline.residency.entry import figures as moved
from weft.pipeline.scheduler import Kind, Op
from weft.pipeline.tracer import Tracer
from weft.pipeline.transport import Arrived, Transport
from weft.pipeline.watch import Watch
from weft.pipeline.worker import Done, Worker

IDLE = 0.5
"""Seconds after which a rank that waits looks for signals."""


class Runtime:
    """Drives the workers of one rank over the same links, however often new ones take over.

    ``tracers`` are those of its stages. ``stopping`` says whether the user wants to stop; the first stage then ends the
    run at the next whole step. A rank has the stage of its number, unless a ``placement`` gives it several.
    """

    def __init__(
        self,
        rank: int,
        transport: Transport,
        watch: Watch,
        tracers: Mapping[int, Tracer] | None,
        stopping: Callable[[], bool],
        placement: Placement | None = None,
    ) -> None:
        self.rank, self.transport, self.watch = rank, transport, watch
        self._tracers = tracers or {}
        self._placement = None if placement is None or placement.chunks == 1 else placement
        self._handed: deque[Arrived] = deque()
        self.busy = 0.0
        self.deciding = 0.0
        self.ops = 0
        self._began = time.perf_counter()
        self._wall = time.time() - time.perf_counter()
        self._stopping = stopping
        self.told = 0.0
        """When the figures were last shown to the others."""
        self._in_flight = 0
        self._residents: list[Resident] = []
        self._clocks: dict[int, list[Clock]] = {}
        self._updates: dict[int, int] = {}

    def send(self, to: int, message: Message) -> None:
        """For a worker: a message goes to the stage before or behind it."""
        size = self.transport.send(to, message) if self._placement is None else self._send(to, message, self._placement)
        if self._tracers and (message.kind == "F" or message.kind == "B" or message.kind == "E"):
            source = to + 1 if message.kind == "B" else to - 1
            self._tracers[source].sent(message.kind, message.microbatch, time.time(), size)

    def drive(self, workers: Worker | Sequence[Worker], on_done: Callable[[Done | None], None]) -> None:
        """Works until all workers are done. ``on_done`` is told of every operation, and (None) of every idle round."""
        group = 1 if self._placement is None else self._placement.group
        crew = Crew([workers] if isinstance(workers, Worker) else workers, group)
        self._residents = [worker.stage.memory for worker in crew.workers if worker.stage.memory is not None]
        for worker in crew.workers:
            worker.on_start = self._starts
            if self._tracers:
                self._clocks[worker.stage.index] = _moving(worker)
                self._updates[worker.stage.index] = worker.stage.updates
        ended = not crew.first.stage.is_first
        while not crew.done:
            while (arrived := self._take(0)) is not None:
                self._receive(crew, arrived)
            if not ended and self._stopping():
                m = crew.first.stage.law.microbatches
                until = -(-crew.first.scheduler.known // m) * m
                if until < crew.first.scheduler.total:
                    crew.first.end(until)
                ended = True
            done = crew.work()
            if done is None:
                self.watch.idle()
                on_done(None)
                waited = None if crew.done else self._take(IDLE)
                if waited is not None:
                    self._receive(crew, waited)
                continue
            self.busy += done.end - done.start
            self.ops += 1
            self._in_flight = crew.in_flight
            if self._tracers:
                self._trace(self._tracers[done.op.stage], done, crew.of(done.op.stage))
            self._tell()
            on_done(done)
        self.deciding += sum(worker.figures.deciding for worker in crew.workers)
        self.watch.idle()
        self._tell(now=True)

    @property
    def figures(self) -> dict[str, Any]:
        """What the progress line shows of this rank."""
        passed = time.perf_counter() - self._began
        told: dict[str, Any] = {"busy": self.busy / passed if passed else 0.0, "in_flight": float(self._in_flight)}
        return {**told, "residency": moved(self._residents)} if self._residents else told

    def _starts(self, op: Op) -> None:
        self.watch.doing(str(op))

    def _send(self, to: int, message: Message, placement: Placement) -> int:
        addressed, rank = message.to(to), placement.rank_of(to)
        if rank != self.rank:
            return self.transport.send(rank, addressed)
        self._handed.append(Arrived(handed(addressed, self.transport.device), time.time()))
        return 0

    def _take(self, timeout: float) -> Arrived | None:
        return self._handed.popleft() if self._handed else self.transport.take(timeout)

    def _receive(self, crew: Crew, arrived: Arrived) -> None:
        message = arrived.message
        if not self._tracers:
            crew.receive(message)
            return
        stage = crew.first.stage.index if message.stage is None else message.stage
        if message.kind == "F" or message.kind == "B" or message.kind == "E":
            self._tracers[stage].received(message.kind, message.microbatch, arrived.time)
        begin = time.perf_counter()
        crew.receive(message)
        self._trace_rest(self._tracers[stage], crew.of(stage), begin)  # the norm that an update waited for, perhaps

    def _tell(self, now: bool = False) -> None:
        clock = time.perf_counter()
        if now or clock - self.told > 0.5:
            self.told = clock
            self.watch.figures = self.figures
            for tracer in self._tracers.values():
                tracer.flush()

    def _trace(self, tracer: Tracer, done: Done, worker: Worker) -> None:
        stage, kind, n = done.op
        begin, end = done.start, done.end if done.update is None else done.update[0]
        if done.late:
            self._trace_update(tracer, stage, done.late, begin, done.prepared)
            begin = done.prepared
        left = kind == "W" or (kind == "B" and not worker.scheduler.rule.defer)
        at = n if kind != "E" or worker.evaluation is None else worker.evaluation.flow.at(n)
        in_flight, versions = len(worker.scheduler.in_flight) + left, _seen(self._clocks[stage], kind, at)
        tracer.op(done.op, begin + self._wall, end + self._wall, in_flight, versions)
        if done.update is not None:
            self._trace_update(tracer, stage, done.updated, *done.update)
        self._trace_rest(tracer, worker, done.end)

    def _trace_update(self, tracer: Tracer, stage: int, layers: int, begin: float, end: float) -> None:
        self._updates[stage] += layers
        tracer.update(layers, self._updates[stage], begin + self._wall, end + self._wall)

    def _trace_rest(self, tracer: Tracer, worker: Worker, begin: float) -> None:
        """Updates that came neither before nor with an operation, but since ``begin``."""
        more = worker.stage.updates - self._updates[worker.stage.index]
        if more:
            self._trace_update(tracer, worker.stage.index, more, begin, time.perf_counter())


def _moving(worker: Worker) -> list[Clock]:
    """The clocks of layers whose backwards move on to newer weights, those that may be farthest ahead first."""
    found = {weights.clock for weights in worker.stage.weights.values() if weights.parameters}
    return sorted((at for at in found if at.moves_on), key=lambda at: (-at.drift, -at.window, at.span))


def _seen(clocks: Sequence[Clock], kind: Kind, n: int) -> tuple[int, ...]:
    """What the layer sees whose backward is farthest ahead of its forward: there, and here if this is the backward."""
    if not clocks or kind == "W":
        return ()
    forward, backward = max(
        ((at.forward_reads(n), at.backward_reads(n)) for at in clocks), key=lambda seen: seen[1] - seen[0]
    )
    return (forward, backward) if kind == "B" else (forward,)
