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

from weft.pipeline import Law
from weft.pipeline.batches import Batches
from weft.pipeline.consistency import Bounded, Consistency, Exact, Lagged, Recomputed, Stashed
from weft.pipeline.placement import place
from weft.pipeline.runtime import Runtime
from weft.pipeline.scheduler import Rule
from weft.pipeline.stage import Stage
from weft.pipeline.transport import Transport
from weft.pipeline.watch import Watch
from weft.pipeline.worker import Done, Worker
from weft.space import Fixed

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """A schedule: what layers promise for K micro-batches an update on S stages, and how the rule is set. On stage s at
    most S - s micro-batches are in flight, as under 1F1B; S or K of them where ``places`` says so."""

    consistency: Callable[[int, int], Consistency]
    prefer: str = "backward"
    defer: bool = False
    places: str = "S - s"
    chunks: int = 1
    """Stages a rank."""


KINDS = {
    "flush": Kind(lambda k, stages: Exact()),
    "gpipe": Kind(lambda k, stages: Exact(), prefer="forward", places="K"),
    "zbh1": Kind(lambda k, stages: Exact(), defer=True, places="S"),
    "interleaved": Kind(lambda k, stages: Exact(), places="2 K", chunks=2),
    "bounded": Kind(Bounded),
    "bounded-w": Kind(Bounded, defer=True, places="S"),
    "stashed": Kind(Stashed),
    "recomputed": Kind(Recomputed),
    "2bw": Kind(lambda k, stages: Lagged(1), places="S"),
}
"""1F1B with a flush, GPipe, zero-bubble H1, interleaved 1F1B, PACI, PACI with put-off gradients of weights, PipeDream
(with K micro-batches an update), PACI that recomputes, PipeDream-2BW."""


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
        places = {"S - s": world - rank, "S": world, "K": k, "2 K": 2 * k}[told.places]
        self.rule = Rule(window or places, told.prefer, told.defer)
        self.placement = place(told.chunks * world, world, "loop" if told.chunks > 1 else None)
        self.cut = task.v_cut if told.chunks > 1 else task.cut
        self.transport = Transport(rank, world, CPU, None, self.placement.links())
        self.watch = Watch(store, rank, world, lambda rank, message: None)
        self.drawn = task.draw()
        self.peak = 0
        self.deciding = 0.0
        self.stages: list[Stage] = []

    def warm(self, steps: int) -> None:
        """A stage of its own goes through the first steps, over the same links."""
        self._drive(steps)

    def train(self, steps: int) -> None:
        """From the first weights on."""
        self.meter.clear()
        self._drive(steps)

    def figures(self) -> dict[str, Any]:
        drifts = sum((w.drifts for stage in self.stages for w in stage.weights.values()), Counter[int]())
        one_copy = all(stage.one_copy for stage in self.stages)
        return {"peak": self.peak, "deciding": self.deciding, "drifts": dict(drifts), "one_copy": one_copy}

    def close(self) -> None:
        self.watch.close()
        self.transport.close()

    def prepare(self, steps: int) -> tuple[list[Worker], Runtime]:
        task, ends = self.task, (0, *self.cut, None)
        runtime = Runtime(self.rank, self.transport, self.watch, None, lambda: False, self.placement)
        workers = []
        self.stages = []
        for index in self.placement.stages_of(self.rank):
            chain = task.built(ends[index] or 0, ends[index + 1])
            promised = dict.fromkeys(chain.layers, self.consistency)
            optimizer, schedule, seed = task.optimizer(self.k), task.schedule(self.k), task.seed
            law = Law(steps, self.k, self._loss, optimizer, schedule, seed, promised, precision=self.precision)
            stream = Fixed(chain.space, chain.largest())
            stage = Stage(chain, law, stream, CPU, self.cut, index, split=self.rule.defer)
            stage.train_mode()
            self.stages.append(stage)
            batches = Batches(Steps(self.drawn, task.rows * self.k), 0, steps, self.k)  # type: ignore[arg-type]
            workers.append(Worker(stage, self.rule, 0, steps * self.k, batches, runtime.send))
        return workers, runtime

    def _drive(self, steps: int) -> None:
        workers, runtime = self.prepare(steps)
        dist.barrier()
        self.meter.began = time.perf_counter()
        runtime.drive(workers, self._done)
        for worker in workers:
            worker.finish()
        self.peak = sum(worker.figures.peak for worker in workers)
        self.deciding = sum(worker.figures.deciding for worker in workers)

    def _done(self, done: Done | None) -> None:
        if done is not None:
            self.meter.spans.append((done.start, done.end))

    def _loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return self.meter.loss(outputs, batch["targets"])
