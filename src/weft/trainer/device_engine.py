"""The engine of one device: the sequential reference, step after step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from weft.data import Data, Loader
from weft.engine.cuda_graphs import CudaGraphCache
from weft.engine.layer_state import CheckpointPart
from weft.engine.reference import SequentialReference
from weft.engine.train_step import TrainStep
from weft.offload import OffloadManager
from weft.offload.config import OffloadConfig
from weft.offload.setup import attach, move_buffers
from weft.space import Subnet
from weft.supernet import Chain
from weft.trainer.config import Execution, Validation
from weft.trainer.evaluate import evaluate, recalibrated
from weft.trainer.metrics_log import AsyncReadback, StepRecord
from weft.trainer.trainer import Event

OFFLOAD_EVENT = 0.5
"""Seconds between two events about what lies on the device."""


class DeviceEngine:
    """Trains the whole chain in this process."""

    def __init__(self, chain: Chain, data: Data, config: TrainStep, execution: Execution) -> None:
        self.chain, self.data, self.config = chain, data, config
        device, offloaded = torch.device(execution.device), execution.offload is not None
        # A captured layer reads its weights at one address, and an offload gives them many.
        graphs = CudaGraphCache() if device.type == "cuda" and execution.cuda_graphs and not offloaded else None
        if offloaded:
            move_buffers(chain, device)
        self.layers = self._reference = SequentialReference(chain, config, device, graphs)
        self.loader = config.loader(data, device, execution.data_workers)
        self.reached = 0
        self.stopped = False
        self.offload: OffloadManager | None = None
        self._offload_config = execution.offload
        self._readback = AsyncReadback(device)
        self._last_offload_event = 0.0

    def start_offload(self, subnets: Mapping[str, Subnet]) -> None:
        """Where the run offloads, layers live on the host from here on; ``subnets`` are those that are scored on the
        way."""
        if isinstance(self._offload_config, OffloadConfig):
            self.offload = attach(self._reference, self._offload_config, subnets.values())

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
                yield self._offload_event(step=self.reached)
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
        loader = Loader(self.data.validation, validation.batch_size, 0, shuffle=False, device=self.layers.device)
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

    def _offload_event(self, **fields: Any) -> Event:
        assert self.offload is not None
        self._last_offload_event = time.perf_counter()
        return "offload", {**fields, "stages": [self.offload.stats()]}

    def _finite(self, records: Iterator[StepRecord]) -> Iterator[StepRecord]:
        """The records; on a GPU a loss that is not a number is seen some steps late, and explained then."""
        for record in records:
            bad = next((j for j, loss in enumerate(record.losses) if not math.isfinite(loss)), None)
            if self.config.on_nonfinite == "stop" and bad is not None:
                # The batch is a function of its number, so the forward can be run again.
                part = self.config.parts(self.loader.batch(record.step))[bad]
                raise self._reference.explain_nonfinite(record.step * self.config.microbatches + bad, part)
            yield record
