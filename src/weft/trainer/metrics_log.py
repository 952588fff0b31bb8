"""Losses and metrics on their way to the log: from a device without making it wait, and from stages in any order."""

from __future__ import annotations

import hashlib
import importlib
import math
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.engine.reference import StepResult
from weft.engine.train_step import TrainStep
from weft.errors import TrainError
from weft.runs.events import Event
from weft.space import Subnet

Average = float | list[float]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The numbers of a step, as its line in the log has them."""

    step: int
    subnets: tuple[Subnet, ...]
    losses: list[float]
    metrics: Mapping[str, Average]
    skipped: int
    """Micro-batches that do not count."""

    def fields(self, config: TrainStep) -> dict[str, Any]:
        """What the log says of the step."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        fields: dict[str, Any] = {"step": self.step, "loss": sum(finite) / len(finite) if finite else math.nan}
        fields |= self.metrics
        fields["rate"] = config.optimizer.lr_factor(self.step, config.steps)
        if config.architecture_search is not None:
            fields["phase"] = "architecture" if config.architecture_search.architecture(self.step) else "weights"
        fields["subnets"] = [subnet.id for subnet in self.subnets]
        return {**fields, "skipped": self.skipped} if self.skipped else fields


class AsyncReadback:
    """Takes step results as they are made and gives their records, in order, once the numbers have arrived.

    On the CPU that is at once. On a GPU the numbers of ``every`` steps travel together into pinned memory and are read
    when the next ones are sent, so that nothing waits.
    """

    def __init__(self, device: torch.device, every: int = 32) -> None:
        self._direct = device.type == "cpu"
        self._every = every
        self._new: list[StepResult] = []
        self._sent: deque[tuple[list[StepResult], Tensor, torch.cuda.Event | None]] = deque()

    def add(self, result: StepResult) -> Iterator[StepRecord]:
        """The records whose numbers are here by now."""
        self._new.append(result)
        if self._direct:
            yield from self.drain()
        elif len(self._new) >= self._every:
            self._send()
            while len(self._sent) > 1:
                yield from self._receive()

    def drain(self) -> Iterator[StepRecord]:
        """All that are left; waits for the device."""
        if self._new:
            self._send()
        while self._sent:
            yield from self._receive()

    def _send(self) -> None:
        numbers = [
            x
            for r in self._new
            for x in (*r.losses, *(torch.as_tensor(t, device=r.losses[0].device) for t, _ in r.metrics.values()))
        ]
        packed, event = torch.cat([x.reshape(-1).to(torch.float64) for x in numbers]), None
        if not self._direct:
            on_device = packed
            packed = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            packed.copy_(on_device, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._sent.append((self._new, packed, event))
        self._new = []

    def _receive(self) -> Iterator[StepRecord]:
        results, host, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        values = iter(host.tolist())
        for result in results:
            losses = [next(values) for _ in result.losses]
            metrics = {
                name: _average([next(values) for _ in range(torch.as_tensor(total).numel())], count)
                for name, (total, count) in result.metrics.items()
            }
            yield StepRecord(result.step, result.subnets, losses, metrics, result.skipped)


class StepCollector:
    """Takes the reports of micro-batches in any order, and gives the records of whole steps, in order."""

    def __init__(self, config: TrainStep, first: int) -> None:
        self._config, self._next = config, first
        self._reports: dict[int, list[float]] = {}

    def add(self, n: int, report: Tensor) -> Iterator[StepRecord]:
        """The report of micro-batch n has its loss, whether it counts, and sum and count of every metric."""
        self._reports[n] = report.tolist()
        m = self._config.microbatches
        while all(k in self._reports for k in range(self._next * m, (self._next + 1) * m)):
            yield self._record([self._reports.pop(k) for k in range(self._next * m, (self._next + 1) * m)])
            self._next += 1

    def _record(self, reports: list[list[float]]) -> StepRecord:
        losses = [report[0] for report in reports]
        counted = [report for report in reports if report[1]]
        metrics = {}
        place = 2
        for name, metric in self._config.metrics.items():
            size = int(getattr(metric, "size", 1))
            count = sum(report[place + size] for report in counted)
            if count:
                metrics[name] = _average([sum(r[place + k] for r in counted) for k in range(size)], count)
            place += size + 1
        skipped = sum(not math.isfinite(loss) for loss in losses)
        return StepRecord(self._next, self._config.stream[self._next], losses, metrics, skipped)


class LossDigest:
    """A chain of hashes over the losses in step order; its 64 hex digits are all that a checkpoint needs."""

    def __init__(self, value: str = "0" * 64) -> None:
        self.value = value

    def add(self, losses: Iterable[float]) -> None:
        for loss in losses:
            self.value = hashlib.sha256(bytes.fromhex(self.value) + struct.pack("<d", loss)).hexdigest()


def _average(sums: list[float], count: float) -> Average:
    """A metric's mean; of a vector its numbers, to as many digits as a log is read with."""
    return sums[0] / count if len(sums) == 1 else [round(value / count, 6) for value in sums]


# A callback is any function that takes the events of a run as they are written. This one writes them for TensorBoard.

_ENDS = ("finished", "stopped", "failed")


def scalars(event: Event) -> dict[str, float]:
    """The numbers of a step or validation event under the names that trackers show.

    >>> scalars({"event": "step", "step": 3, "loss": 0.5, "subnets": ["a"]})
    {'train/loss': 0.5}
    """
    if event["event"] == "step":
        return {f"train/{k}": float(v) for k, v in event.items() if isinstance(v, float) and k != "time"}
    if event["event"] == "validation":
        return {f"validation/{event['pick']}/{k}": float(v) for k, v in event["scores"].items()}
    return {}


class TensorBoard:
    """Writes the losses and scores of a run into a folder for TensorBoard: ``callbacks=[weft.TensorBoard("logs")]``.

    Needs ``pip install tensorboard``.
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            self._make = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            raise TrainError("weft.TensorBoard needs the package tensorboard: pip install tensorboard") from None
        self._folder = str(folder)
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        for tag, value in scalars(event).items():
            self._writer = self._writer or self._make(self._folder)
            self._writer.add_scalar(tag, value, int(event["step"]))
        if event["event"] in _ENDS and self._writer is not None:
            self._writer.close()
            self._writer = None
