"""One process of weft in `paci.py`: a stage with a flush after every update, or `bounded`, without."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from paci_task import Meter, Steps, Task
from torch import Tensor

from weft.pipeline import Law
from weft.pipeline.batches import Batches
from weft.pipeline.consistency import Bounded, Consistency, Exact
from weft.pipeline.runtime import Runtime
from weft.pipeline.scheduler import Rule
from weft.pipeline.stage import Stage
from weft.pipeline.transport import Transport
from weft.pipeline.watch import Watch
from weft.pipeline.worker import Done, Worker
from weft.space import Fixed

CPU = torch.device("cpu")


class WeftPeer:
    """Trains its stage; ``kind`` is ``flush`` or ``bounded``. On stage s at most S - s micro-batches are in flight, as
    under 1F1B, or ``window`` of them."""

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
        self.consistency: Consistency = Bounded(k, world) if kind == "bounded" else Exact()
        self.precision = precision
        self.rule = Rule(window or world - rank)
        self.transport = Transport(rank, world, CPU)
        self.watch = Watch(store, rank, world, lambda rank, message: None)
        self.drawn = task.draw()
        self.peak = 0
        self.deciding = 0.0
        self.stage: Stage | None = None

    def warm(self, steps: int) -> None:
        """A stage of its own goes through the first steps, over the same links."""
        self._drive(steps)
        self.stage = None
        self.meter.clear()

    def train(self, steps: int) -> None:
        self._drive(steps)

    def figures(self) -> dict[str, Any]:
        assert self.stage is not None
        drifts = sum((weights.drifts for weights in self.stage.weights.values()), Counter[int]())
        one_copy = self.stage.one_copy
        return {"peak": self.peak, "deciding": self.deciding, "drifts": dict(drifts), "one_copy": one_copy}

    def close(self) -> None:
        dist.barrier()
        self.watch.close()
        self.transport.close()

    def prepare(self, steps: int) -> tuple[Worker, Runtime]:
        task, ends = self.task, (0, *self.task.cut, None)
        chain = task.built(ends[self.rank] or 0, ends[self.rank + 1])
        promised = dict.fromkeys(chain.layers, self.consistency)
        law = Law(
            steps,
            self.k,
            self._loss,
            task.optimizer(self.k),
            task.schedule(self.k),
            task.seed,
            promised,
            precision=self.precision,
        )
        stream = Fixed(chain.space, chain.largest())
        self.stage = Stage(chain, law, stream, CPU, task.cut, self.rank)
        self.stage.train_mode()
        runtime = Runtime(self.rank, self.transport, self.watch, None, lambda: False)
        batches = Batches(Steps(self.drawn, task.rows * self.k), 0, steps, self.k)  # type: ignore[arg-type]
        return Worker(self.stage, self.rule, 0, steps * self.k, batches, runtime.send), runtime

    def _drive(self, steps: int) -> None:
        worker, runtime = self.prepare(steps)
        dist.barrier()
        self.meter.began = time.perf_counter()
        runtime.drive(worker, self._done)
        worker.finish()
        self.peak, self.deciding = worker.figures.peak, worker.figures.deciding

    def _done(self, done: Done | None) -> None:
        if done is not None:
            self.meter.spans.append((done.start, done.end))

    def _loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return self.meter.loss(outputs, batch["targets"])
