"""Losses on their way from the device to the log, without making the device wait for the host."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.elastic.mixture import choice_options
from weft.engine.layer_state import LossDigest
from weft.engine.reference import StepResult
from weft.engine.weight_versions import VersionedLayer
from weft.runs import Run
from weft.supernet import Chain
from weft.supernet.mixed_chain import MixedChain
from weft.trainer.config import Settings


class AsyncReadback:
    """Takes step results as they are made and gives them back with their numbers, in order, once they have arrived.

    On the CPU that is at once. On a GPU the numbers of ``every`` steps travel together into pinned memory and are read
    when the next ones are sent, so that nothing waits.
    """

    def __init__(self, device: torch.device, every: int = 32) -> None:
        self._direct = device.type == "cpu"
        self._every = every
        self._new: list[StepResult] = []
        self._sent: deque[tuple[list[StepResult], Tensor, torch.cuda.Event]] = deque()

    def add(self, result: StepResult) -> Iterator[tuple[StepResult, list[float], dict[str, Average]]]:
        """The results whose numbers are here by now."""
        self._new.append(result)
        if self._direct:
            yield from self.drain()
        elif len(self._new) >= self._every:
            self._send()
            while len(self._sent) > 1:
                yield from self._receive()

    def drain(self) -> Iterator[tuple[StepResult, list[float], dict[str, Average]]]:
        """All that are left; waits for the device."""
        if self._direct:
            for result in self._new:
                losses = [loss.item() for loss in result.losses]
                yield result, losses, {name: averaged(t, count) for name, (t, count) in result.metrics.items()}
            self._new = []
            return
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
        packed = torch.cat([x.reshape(-1).to(torch.float64) for x in numbers])
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._sent.append((self._new, host, event))
        self._new = []

    def _receive(self) -> Iterator[tuple[StepResult, list[float], dict[str, Average]]]:
        results, host, event = self._sent.popleft()
        event.synchronize()
        values = iter(host.tolist())
        for result in results:
            losses = [next(values) for _ in result.losses]
            metrics = {}
            for name, (total, count) in result.metrics.items():
                metrics[name] = average([next(values) for _ in range(torch.as_tensor(total).numel())], count)
            yield result, losses, metrics


Average = float | list[float]


def average(sums: list[float], count: float) -> Average:
    """A metric's mean; of a vector its numbers, to as many digits as a log is read with."""
    return sums[0] / count if len(sums) == 1 else [round(value / count, 6) for value in sums]


def averaged(total: Tensor | float, count: float) -> Average:
    """The same from a tensor."""
    return average(torch.as_tensor(total).double().reshape(-1).tolist(), count)


def mean(losses: list[float]) -> float:
    """The loss of a step: the mean over its micro-batches whose loss is a number."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else math.nan


# The ledger of a pipeline run: losses arrive in any order and are written down in the order of their steps.


Log = Callable[..., None]


class StepLog:
    """Keeps the reports of micro-batches until a step is whole, then logs it; ``digests`` has the losses before it."""

    def __init__(self, settings: Settings, losses: LossDigest, first: int, log: Log) -> None:
        self.losses = losses
        self.digests: dict[int, str] = {first: losses.value}
        self.next = first
        """The first step that is not yet written down."""
        self._settings = settings
        self._log = log
        self._waiting: dict[int, list[float]] = {}

    def add(self, n: int, report: Tensor) -> None:
        """The report of micro-batch n: loss, whether it counts, and sum and count of every metric."""
        self._waiting[n] = report.tolist()
        m = self._settings.microbatches
        while all(k in self._waiting for k in range(self.next * m, (self.next + 1) * m)):
            self._write([self._waiting.pop(k) for k in range(self.next * m, (self.next + 1) * m)])

    def forget_before(self, step: int) -> None:
        """Digests of earlier steps are not asked for any more."""
        self.digests = {at: value for at, value in self.digests.items() if at >= step}

    def _write(self, reports: list[list[float]]) -> None:
        step = self.next
        losses = [report[0] for report in reports]
        fields: dict[str, Any] = {"step": step, "loss": mean(losses)}
        counted = [report for report in reports if report[1]]
        place = 2
        for name, metric in self._settings.metrics.items():
            size = int(getattr(metric, "size", 1))
            count = sum(report[place + size] for report in counted)
            if count:
                fields[name] = average([sum(r[place + k] for r in counted) for k in range(size)], count)
            place += size + 1
        fields["rate"] = self._settings.schedule(step, self._settings.steps)
        fields |= phase(self._settings, step)
        fields["subnets"] = [subnet.id for subnet in self._settings.stream[step]]
        skipped = sum(not math.isfinite(loss) for loss in losses)
        if skipped:
            fields["skipped"] = skipped
        self.losses.add(losses)
        self.next += 1
        self.digests[self.next] = self.losses.value
        self._log("step", **fields)


# What the log of a run says beside losses and scores.


def begun(run: Run, chain: Chain, at: int, steps: int) -> dict[str, Any]:
    """What the log says at the start; of a mixture also what each of the numbers stands for that every step tells."""
    told = {"law": dict(run.manifest.get("law") or {}), "at": at, "steps": steps}
    if isinstance(chain, MixedChain):
        told["choices"] = [{"name": name, "options": choice_options(chain.space, name)} for name in chain.order]
    return told


def drift(weights: Mapping[str, VersionedLayer]) -> dict[str, dict[str, int]]:
    """For the log: by how many updates backwards were ahead of their forwards, by layer, and how often."""
    return {name: {str(k): count for k, count in sorted(w.drifts.items())} for name, w in weights.items() if w.drifts}


def phase(settings: Settings, step: int) -> dict[str, Any]:
    """What the log says of a step's part in a run of two levels."""
    if settings.bilevel is None:
        return {}
    return {"phase": "architecture" if settings.bilevel.architecture(step) else "weights"}
