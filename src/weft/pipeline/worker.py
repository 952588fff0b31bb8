"""Runs one stage: takes messages in, does the operation that the scheduler chooses, sends messages out.

The links are not known here, so that tests can step many workers in one process under any timing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from weft.data import Batch
from weft.engine.grad_exchange import SharedSum
from weft.engine.layer_state import CheckpointPart
from weft.errors import PipelineError
from weft.pipeline.message import Message
from weft.pipeline.scheduler import Op, SchedulePolicy, Scheduler
from weft.pipeline.stage import Stage
from weft.supernet import Activations

Send = Callable[[int, Message], None]
"""Takes the number of a stage and what goes to it."""

BatchOf = Callable[[int], Batch]
"""The batch of a micro-batch by its number; asked for once."""


@dataclass(slots=True)
class OpResult:
    """When an operation ran, and when its updates did.

    ``deferred_updates`` counts earlier updates that were applied just before it, since it had to read them.
    """

    op: Op
    start: float
    end: float
    update: tuple[float, float] | None = None
    updates: int = 0
    deferred_updates: int = 0
    prepared: float = 0.0
    snapshots: list[CheckpointPart] = field(default_factory=list)


class Worker:
    """Steps one stage from micro-batch ``first`` to ``until``; a checkpoint reads it every ``every`` steps."""

    def __init__(
        self,
        stage: Stage,
        policy: SchedulePolicy,
        first: int,
        until: int,
        batch_of: BatchOf,
        send: Send,
        every: int | None = None,
    ) -> None:
        self.stage = stage
        # Updates that wait for later forwards would keep layers on the device in the place that those need.
        stage.one_copy = stage.one_copy and policy.max_in_flight >= stage.stages - stage.index and stage.offload is None
        counters = stage.counters if stage.one_copy or stage.sums else None
        can_admit = None if stage.offload is None else stage.offload.can_start
        if stage.offload is not None:
            stage.offload.begin_run(first, until)
        self.scheduler = Scheduler(
            stage.index, stage.stages, stage.dependencies, until, policy, first, counters, can_admit
        )
        stage.forwarded = first
        for sums in stage.sums:
            self.scheduler.advance_counter(sums.counter, sums.count)
        self.deciding = 0.0
        """Seconds that decisions have taken so far."""
        self.peak = 0
        self.reports: list[tuple[int, Tensor]] = []
        """Loss and metrics by micro-batch, in order of arrival; the caller takes them out."""
        self.on_start: Callable[[Op], None] | None = None
        self._batch_of = batch_of
        self._send = send
        self._inbox: dict[tuple[str, int], Message] = {}
        self._reports: dict[int, Tensor] = {}
        self._span = span = (every or 0) * stage.config.microbatches
        self._boundary = -(-(first + 1) // span) * span if span else 0

    @property
    def done(self) -> bool:
        return self.scheduler.done and self.stage.has_sums(self.scheduler.total)

    def receive(self, message: Message) -> None:
        match message.kind:
            case "end":
                self.end(message.microbatch)
            case "norm" | "total" | "tie" as kind:
                sums = next(sums for sums in self.stage.sums if kind in sums.kinds)
                self._send_sums(sums.received(kind, message.microbatch, message.tensors[0]))
                self._exchange()
            case kind:
                self._inbox[kind, message.microbatch] = message
                if kind == "B" and message.report is not None:
                    self.reports.append((message.microbatch, message.report))
                self.scheduler.arrived(kind, message.microbatch)

    def end(self, until: int) -> None:
        """Stops before micro-batch ``until``, and tells the stages behind."""
        self.scheduler.end(until)
        if not self.stage.is_last:
            self._send(self.stage.index + 1, Message("end", until))

    def work(self) -> OpResult | None:
        """Does the next operation; None where the stage has to wait for a message."""
        before = time.perf_counter()
        op = self.scheduler.next()
        if op is None:
            return None
        self.peak = max(self.peak, len(self.scheduler.in_flight))
        dependencies = self.scheduler.dependencies(op)
        if self.on_start is not None:
            self.on_start(op)
        offload = self.stage.offload
        if offload is not None and op.kind == "F":
            offload.start(op.microbatch)
        start = time.perf_counter()
        self._register_snapshots()
        updates = self.stage.updates
        self.stage.apply_due(dependencies, op.kind, self.scheduler.oldest)
        deferred, prepared = self.stage.updates - updates, time.perf_counter()
        if op.kind == "F":
            self._forward(op.microbatch)
            end = time.perf_counter()
            done = OpResult(op, start, end)
            self.scheduler.complete_op(op)
            self.stage.forwarded = self.scheduler.forwarded
            now = time.perf_counter()
        else:
            self._backward(op.microbatch)
            self.stage.weight_gradients(op.microbatch)
            between = time.perf_counter()
            ready = self.scheduler.complete_op(op)
            decided = time.perf_counter()
            self.deciding += decided - between
            updates = self.stage.updates
            self.stage.commit(ready, self.scheduler)
            end = now = time.perf_counter()
            updated = self.stage.updates - updates
            done = OpResult(op, start, end, (decided, end) if updated else None, updated)
            self._exchange()
            done.snapshots = self.stage.ready_snapshots(self.scheduler.oldest) if self.stage.snapshots else []
            if offload is not None:
                offload.finish(op.microbatch)
        done.deferred_updates, done.prepared = deferred, prepared
        self.deciding += start - before + (now - end)
        return done

    def finish(self, save: bool = False) -> list[CheckpointPart]:
        """After the last operation: applies updates that still wait, and returns the last parts of checkpoints.

        With ``save`` the end is a checkpoint whatever its number.
        """
        until = self.scheduler.total
        self._register_snapshots(until)
        if save and (not self._span or until % self._span):  # else it is a regular checkpoint
            self.stage.snapshots.append(CheckpointPart(until))
        self.stage.finish(until)
        return self.stage.ready_snapshots(until)

    def _exchange(self) -> None:
        """Sends sums on as far as they are known, and applies the updates that have waited for them."""
        for sums in self.stage.sums:
            self._send_sums(sums.advance(self.scheduler.oldest))
        if self.stage.sums:
            self.stage.apply_ready(self.scheduler.oldest)
        for sums in self.stage.sums:
            self.scheduler.advance_counter(sums.counter, sums.count)

    def _send_sums(self, sent: list[SharedSum]) -> None:
        for to, kind, number, value in sent:
            self._send(to, Message(kind, number, (value,), (False,)))

    def _register_snapshots(self, until: int | None = None) -> None:
        reach = self.scheduler.known if until is None else until
        while self._span and self._boundary <= reach:
            self.stage.snapshots.append(CheckpointPart(self._boundary))
            self._boundary += self._span

    def _forward(self, n: int) -> None:
        message = self._inbox.pop(("F", n), None)
        activations: Activations = ()
        if message is not None:
            activations = tuple(
                x.requires_grad_(wanted)  # type: ignore[union-attr]
                for x, wanted in zip(message.tensors, message.needs_grad, strict=True)
            )
        batch = self._batch_of(n) if self.stage.reads_batch() else {}
        outputs, report = self.stage.forward(n, activations, batch)
        if self.stage.is_last:
            assert report is not None
            self._reports[n] = report
            if self.stage.is_first:
                self.reports.append((n, report))
            return
        try:
            self._send(self.stage.index + 1, Message("F", n, outputs, tuple(x.requires_grad for x in outputs)))
        except PipelineError as problem:
            last = self.stage.route(self.stage.config.subnet(n))[-1:]  # none where the blocks of this stage are skipped
            raise PipelineError(f"layer '{last[0].name}': {problem}" if last else str(problem)) from problem

    def _backward(self, n: int) -> None:
        message = self._inbox.pop(("B", n), None)
        report = self._reports.pop(n, None) if message is None else message.report
        assert report is not None
        # Only the last stage has its report on a device, and reads it only where that is worth the wait.
        checks = report.device.type == "cpu" or self.stage.config.on_nonfinite == "skip"
        counts = not checks or bool(report[1])
        stops = checks and self.stage.config.on_nonfinite == "stop" and not math.isfinite(float(report[0]))
        note = ""
        if stops:
            note = (message.note if message is not None else "") or self.stage.first_nonfinite_layer(n)
        gradients = self.stage.backward(n, () if message is None else message.tensors, counts)
        if not self.stage.is_first:
            self._send(self.stage.index - 1, Message("B", n, tuple(gradients), (), report, note))
        if stops and self.stage.is_first:  # by now every stage has looked for the cause
            raise self.stage.nonfinite_loss(n, note)
