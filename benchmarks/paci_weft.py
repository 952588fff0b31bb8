"""One process of weft in `paci.py`: one stage, under settings that make the one rule each of the known schedules."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from paci_task import Meter, Steps, Task
from torch import Tensor

from weft.data import MicroBatches
from weft.distributed.heartbeat import Heartbeat
from weft.distributed.transport import Transport
from weft.engine.consistency import Bounded, Consistency, Exact, Lagged, Stashed
from weft.engine.train_step import TrainStep
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.stage import Stage
from weft.pipeline.worker import Worker
from weft.space import Fixed
from weft.trainer.pipeline_engine import RankLoop

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """A schedule: what layers promise for K micro-batches an update on S stages, and how the rule is set. On stage s at
    most S - s micro-batches are in flight, as under 1F1B; S or K of them where ``places`` says so."""

    consistency: Callable[[int, int], Consistency]
    schedule: str = "1f1b"
    places: str = "S - s"


KINDS = {
    "flush": Kind(lambda k, stages: Exact()),
    "gpipe": Kind(lambda k, stages: Exact(), schedule="gpipe", places="K"),
    "bounded": Kind(Bounded),
    "stashed": Kind(Stashed),
    "2bw": Kind(lambda k, stages: Lagged(1), places="S"),
}
"""1F1B with a flush, GPipe, PACI, PipeDream (with K micro-batches an update), PipeDream-2BW."""


class WeftPeer:
    """Trains its stage under one of the ``KINDS``, or with another ``window``."""

    def __init__(
        self,
        task: Task,
        k: int,
        kind: str,
        rank: int,
        world: int,
        store: Any,
        window: int | None = None,
        precision: str = "fp32",
    ) -> None:
        self.task, self.k, self.rank, self.world = task, k, rank, world
        self.meter = Meter()
        told = KINDS[kind]
        self.consistency = told.consistency(k, world)
        self.precision = precision
        places = {"S - s": world - rank, "S": world, "K": k}[told.places]
        self.policy = SchedulePolicy(window or places, told.schedule)
        self.transport = Transport(rank, world, CPU)
        self.heartbeat = Heartbeat(store, rank, world, lambda rank, message: None)
        self.drawn = task.draw()
        self.peak = 0
        self.deciding = 0.0
        self.stage: Stage | None = None

    def warm(self, steps: int) -> None:
        """A stage of its own goes through the first steps, over the same links."""
        self._drive(steps)

    def train(self, steps: int) -> None:
        """From the first weights on."""
        self.meter.clear()
        self._drive(steps)

    def figures(self) -> dict[str, Any]:
        assert self.stage is not None
        drifts = sum((w.version_lags for w in self.stage.weights.values()), Counter[int]())
        return {"peak": self.peak, "deciding": self.deciding, "drifts": dict(drifts), "one_copy": self.stage.one_copy}

    def close(self) -> None:
        self.heartbeat.close()
        self.transport.close()

    def prepare(self, steps: int) -> tuple[Worker, RankLoop]:
        task, ends = self.task, (0, *self.task.cut, None)
        loop = RankLoop(self.transport, self.heartbeat, None)
        chain = task.built(ends[self.rank] or 0, ends[self.rank + 1])
        config = TrainStep(
            steps=steps,
            stream=Fixed(chain.space, chain.largest()),
            consistency=dict.fromkeys(chain.layers, self.consistency),
            microbatches=self.k,
            loss=self._loss,
            optimizer=task.optimizer(self.k),
            precision=self.precision,
            seed=task.seed,
        )
        self.stage = Stage(chain, config, CPU, task.cut, self.rank)
        self.stage.train_mode()
        batches = MicroBatches(Steps(self.drawn, task.rows * self.k), 0, steps, self.k, config.parts)
        return Worker(self.stage, self.policy, 0, steps * self.k, batches, loop.send), loop

    def _drive(self, steps: int) -> None:
        worker, loop = self.prepare(steps)
        dist.barrier()
        self.meter.began = time.perf_counter()
        for done in loop.drive(worker, lambda: False):
            if done is not None:
                self.meter.spans.append((done.start, done.end))
        worker.finish()
        self.peak, self.deciding = worker.peak, worker.deciding

    def _loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return self.meter.loss(outputs, batch["targets"])
