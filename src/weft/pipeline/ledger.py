"""The ledger of a pipeline run: losses arrive in any order and are written down in the order of their steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.pipeline.fingerprint import LossDigest
from weft.pipeline.logged import phase
from weft.pipeline.readback import average, mean
from weft.pipeline.settings import Settings

Log = Callable[..., None]


class Ledger:
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
