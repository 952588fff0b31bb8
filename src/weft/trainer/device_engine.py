"""The engine of one device: the sequential reference, step after step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from weft.data import Data, Loader
from weft.engine.layer_state import CheckpointPart
from weft.engine.reference import SequentialReference
from weft.engine.train_step import TrainStep
from weft.space import Subnet
from weft.supernet import Chain
from weft.trainer.config import Execution, Validation
from weft.trainer.evaluate import evaluate, recalibrated
from weft.trainer.metrics_log import AsyncReadback, StepRecord
from weft.trainer.trainer import Engine, Event

OFFLOAD_EVENT = 0.5
"""Seconds between two events about what lies on the device."""


class DeviceEngine(Engine):
    """Trains the whole chain in this process."""

    def __init__(self, chain: Chain, data: Data, config: TrainStep, execution: Execution) -> None:
        super().__init__(chain, data, config, execution)
        self.layers = self._reference = SequentialReference(chain, config, self.device, self.graphs(one_at_a_time=True))
        self.loader = config.loader(data, self.device, execution.data_workers)
        self._readback = AsyncReadback(self.device)
        self._last_offload_event = 0.0

    def begin(self, step: int) -> None:
        self.reached = step
        self._batches = self.loader.iterate(step, self.config.steps)

    def train(
        self, stop: int, checkpoint_every: int, stopping: Callable[[], bool]
    ) -> Iterator[StepRecord | CheckpointPart | Event]:
        config = self.config
        while self.reached < stop:
            result = self._reference.step(self.reached, next(self._batches))
            yield from self._finite(self._readback.add(result))
            if self.offload is not None and time.perf_counter() - self._last_offload_event > OFFLOAD_EVENT:
                self._last_offload_event = time.perf_counter()
                yield "offload", {"step": self.reached, "stages": [self.offload.stats()]}
            self.reached += 1
            self.stopped = stopping()
            if self.stopped or self.reached % checkpoint_every == 0 or self.reached == config.steps:
                yield from self._finite(self._readback.drain())
                yield self._reference.snapshot(self.reached * config.microbatches)
            if self.stopped:
                return
        yield from self._finite(self._readback.drain())

    def evaluate(
        self, step: int, subnets: Mapping[str, Subnet], validation: Validation
    ) -> Iterator[tuple[str, Mapping[str, float]]]:
        assert self.data.validation is not None
        config = self.config
        loader = Loader(self.data.validation, validation.batch_size, 0, shuffle=False, device=self.device)
        for name, subnet in subnets.items():
            with recalibrated(self.chain, subnet, (self.loader.batch(k) for k in range(validation.bn_batches))):
                batches = config.validation_batches(loader, step)
                yield name, evaluate(self.chain, subnet, batches, config.loss, config.metrics, config.precision)

    def end(self) -> list[Any]:
        if self.offload is None:
            return []
        self.offload.flush()
        return [self.offload.stats()]

    def close(self) -> None:
        self._batches.close()

    def _finite(self, records: Iterator[StepRecord]) -> Iterator[StepRecord]:
        """The records; on a GPU a loss that is not a number is seen some steps late, and explained then."""
        for record in records:
            bad = next((j for j, loss in enumerate(record.losses) if not math.isfinite(loss)), None)
            if self.config.on_nonfinite == "stop" and bad is not None:
                # The batch is a function of its number, so the forward can be run again.
                part = self.config.parts(self.loader.batch(record.step))[bad]
                raise self._reference.explain_nonfinite(record.step * self.config.microbatches + bad, part)
            yield record
