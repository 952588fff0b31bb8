"""The engine of one stage of a pipeline, in a process of its own, and the loop that drives its worker.

The loop takes messages from the links, lets the worker do what is next, and sends what comes out. Signals, heartbeats
and traces are here, so that ``worker`` and ``stage`` know nothing of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from weft.data import Batch, Data, Loader, MicroBatches
from weft.distributed.heartbeat import Heartbeat
from weft.distributed.store import ControlStore
from weft.distributed.transport import Received, Transport
from weft.engine.consistency import VersionSchedule
from weft.engine.layer_state import CheckpointPart
from weft.engine.train_step import TrainStep
from weft.engine.weight_versions import Offload
from weft.errors import TrainError
from weft.pipeline.message import Message
from weft.pipeline.scheduler import Kind, Op, SchedulePolicy
from weft.pipeline.stage import Stage
from weft.pipeline.worker import OpResult, Worker
from weft.space import Subnet
from weft.supernet import Chain
from weft.supernet.partition import Cut
from weft.trace.recorder import TraceRecorder
from weft.trainer.config import Execution, Validation
from weft.trainer.evaluate import Calibration, ForwardPipeline, Scores
from weft.trainer.metrics_log import StepCollector, StepRecord
from weft.trainer.trainer import Engine, Event

IDLE = 0.5
"""Seconds after which a rank that waits looks for signals."""


class PipelineEngine(Engine):
    """Trains the blocks of one stage; ``loop`` carries messages between it and the others."""

    loop: RankLoop

    def __init__(
        self,
        chain: Chain,
        data: Data,
        config: TrainStep,
        execution: Execution,
        store: ControlStore,
        cut: Cut,
        policies: Sequence[SchedulePolicy],
    ) -> None:
        super().__init__(chain, data, config, execution)
        self.store = store
        # A graph needs an exact layer to have one user in flight, which it has when a step is one micro-batch.
        graphs = self.graphs(one_at_a_time=False) if config.microbatches == 1 else None
        self.layers = self.stage = Stage(chain, config, self.device, cut, store.rank, graphs, execution.split_backward)
        self._policies = policies
        self._batches: MicroBatches | None = None
        self._last_status = 0.0

    def begin(self, step: int) -> None:
        self.reached = self._began = step
        self._collector = StepCollector(self.config, step)
        if self.stage.reads_batch():
            config, loader = self.config, self._loader()
            self._batches = MicroBatches(loader, step, config.steps, config.microbatches, config.parts)

    def train(
        self, stop: int, checkpoint_every: int, stopping: Callable[[], bool]
    ) -> Iterator[StepRecord | CheckpointPart | Event | None]:
        m, stage = self.config.microbatches, self.stage
        batch_of = self._batches or _no_batch
        policy = self._policies[stage.index]
        worker = Worker(stage, policy, self.reached * m, stop * m, batch_of, self.loop.send, checkpoint_every)
        for done in self.loop.drive(worker, stopping):
            yield from self._records(worker)
            yield from done.snapshots if done is not None else ()
            yield from self._status()
            yield None
        end = worker.scheduler.total
        self.reached, self.stopped = end // m, end < stop * m
        # A run that is stopped where it began has a checkpoint of that step already.
        save = self.reached == self.config.steps or (self.stopped and self.reached > self._began)
        snapshots = worker.finish(save)
        yield from self._records(worker)
        yield from snapshots

    def evaluate(
        self, step: int, subnets: Mapping[str, Subnet], validation: Validation
    ) -> Iterator[tuple[str, Mapping[str, float]]]:
        """The subnets go through the stages in order, forwards only: first the batches that set the norms, then all
        validation data."""
        assert self.data.validation is not None
        config, stage = self.config, self.stage
        # A rank that still puts its last weights in order would take a message of this for one of training.
        self.store.gather(f"trained/{step}", None)
        held = Loader(self.data.validation, validation.batch_size, 0, shuffle=False, device=stage.device)
        train = self._loader()
        most = max(policy.max_in_flight for policy in self._policies)
        pipeline = ForwardPipeline(self.loop.transport, stage, most)
        for name, subnet in subnets.items():
            scores = Scores(config.loss, config.metrics)
            layers = stage.route(subnet)
            modules = [stage.chain.module(layer) for layer in layers] if validation.bn_batches else ()
            names = [layer.name for layer in layers]
            with (
                nullcontext() if self.offload is None else self.offload.pinned_on_device(names),
                Calibration(modules) as norms,
            ):
                first = (train.batch(k) if stage.reads_batch() else {} for k in range(validation.bn_batches))
                for _ in pipeline.forward(subnet, first):
                    pass
                norms.freeze()
                for outputs, batch in pipeline.forward(subnet, config.validation_batches(held, step)):
                    with torch.inference_mode(), config.autocast(stage.device):
                        scores.add(outputs, batch)
            if stage.is_last:
                self.store.set(f"scores/{step}/{name}", scores.means())
            if stage.is_first:
                yield name, self.store.get(f"scores/{step}/{name}")
        pipeline.close()
        # A rank that still waits here for word of the next one would take a message of training for one of this.
        self.store.gather(f"validated/{step}", None)

    def end(self) -> list[Any]:
        return [] if self.offload is None else self.store.gather("offload", self.offload.stats())

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()

    def _loader(self) -> Any:
        return self.config.loader(self.data, self.device, self.execution.data_workers)

    def _records(self, worker: Worker) -> Iterator[StepRecord]:
        for n, report in worker.reports if self.stage.is_first else ():
            if self.config.on_nonfinite == "skip" or bool(torch.isfinite(report[0])):
                yield from self._collector.add(n, report)  # else the backward of this micro-batch will explain it
        worker.reports.clear()

    def _status(self) -> Iterator[Event]:
        """How busy all ranks are, as often as they exchange it."""
        loop = self.loop
        if not self.stage.is_first or loop.last_status == self._last_status:
            return
        self._last_status = loop.last_status
        by_rank = {0: loop.status, **loop.heartbeat.others()}
        statuses = [by_rank.get(rank, {}) for rank in range(self.store.world)]
        yield (
            "pipeline",
            {
                "busy": [status.get("busy") for status in statuses],  # None: it has sent none yet
                "in_flight": [int(status.get("in_flight", 0)) for status in statuses],
            },
        )
        if self.offload is not None:
            yield "offload", {"stages": [status["offload"] for status in statuses if "offload" in status]}


def _no_batch(n: int) -> Batch:
    raise TrainError(f"a stage without inputs, loss or extra inputs asked for micro-batch {n}")


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
