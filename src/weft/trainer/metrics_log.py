"""Losses on their way from the device to the log, without making the device wait for the host."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from weft.pipeline.sequential import StepResult


class Readback:
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
