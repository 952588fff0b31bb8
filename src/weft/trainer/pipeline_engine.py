"""The engine of one stage of a pipeline, in a process of its own: a worker that the rank's loop drives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from weft.data import Batch, Data, Loader, MicroBatches
from weft.distributed.rank_loop import RankLoop
from weft.distributed.store import ControlStore
from weft.engine.layer_state import CheckpointPart
from weft.engine.train_step import TrainStep
from weft.errors import TrainError
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.stage import Stage
from weft.pipeline.worker import Worker
from weft.space import Subnet
from weft.supernet import Chain
from weft.supernet.partition import Cut
from weft.trainer.config import Execution, Validation
from weft.trainer.evaluate import Calibration, ForwardPipeline, Scores
from weft.trainer.metrics_log import StepCollector, StepRecord
from weft.trainer.trainer import Engine, Event


class PipelineEngine(Engine):
    """Trains the blocks of one stage; ``loop`` carries messages between it and the others."""

    loop: RankLoop

    def __init__(
        self,
        chain: Chain,
        data: Data,
        config: TrainStep,
        execution: Execution,
        store: ControlStore,
        cut: Cut,
        policies: Sequence[SchedulePolicy],
    ) -> None:
        super().__init__(chain, data, config, execution)
        self.store = store
        # A graph needs an exact layer to have one user in flight, which it has when a step is one micro-batch.
        graphs = self.graphs(one_at_a_time=False) if config.microbatches == 1 else None
        self.layers = self.stage = Stage(chain, config, self.device, cut, store.rank, graphs, execution.split_backward)
        self._policies = policies
        self._batches: MicroBatches | None = None
        self._last_status = 0.0

    def begin(self, step: int) -> None:
        self.reached = self._began = step
        self._collector = StepCollector(self.config, step)
        if self.stage.reads_batch():
            config, loader = self.config, self._loader()
            self._batches = MicroBatches(loader, step, config.steps, config.microbatches, config.parts)

    def train(
        self, stop: int, checkpoint_every: int, stopping: Callable[[], bool]
    ) -> Iterator[StepRecord | CheckpointPart | Event | None]:
        m, stage = self.config.microbatches, self.stage
        batch_of = self._batches or _no_batch
        policy = self._policies[stage.index]
        worker = Worker(stage, policy, self.reached * m, stop * m, batch_of, self.loop.send, checkpoint_every)
        for done in self.loop.drive(worker, stopping):
            yield from self._records(worker)
            yield from done.snapshots if done is not None else ()
            yield from self._status()
            yield None
        end = worker.scheduler.total
        self.reached, self.stopped = end // m, end < stop * m
        # A run that is stopped where it began has a checkpoint of that step already.
        save = self.reached == self.config.steps or (self.stopped and self.reached > self._began)
        snapshots = worker.finish(save)
        yield from self._records(worker)
        yield from snapshots

    def evaluate(
        self, step: int, subnets: Mapping[str, Subnet], validation: Validation
    ) -> Iterator[tuple[str, Mapping[str, float]]]:
        """The subnets go through the stages in order, forwards only: first the batches that set the norms, then all
        validation data."""
        assert self.data.validation is not None
        config, stage = self.config, self.stage
        # A rank that still puts its last weights in order would take a message of this for one of training.
        self.store.gather(f"trained/{step}", None)
        held = Loader(self.data.validation, validation.batch_size, 0, shuffle=False, device=stage.device)
        train = self._loader()
        most = max(policy.max_in_flight for policy in self._policies)
        pipeline = ForwardPipeline(self.loop.transport, stage, most)
        for name, subnet in subnets.items():
            scores = Scores(config.loss, config.metrics)
            layers = stage.route(subnet)
            modules = [stage.chain.module(layer) for layer in layers] if validation.bn_batches else ()
            names = [layer.name for layer in layers]
            with (
                nullcontext() if self.offload is None else self.offload.pinned_on_device(names),
                Calibration(modules) as norms,
            ):
                first = (train.batch(k) if stage.reads_batch() else {} for k in range(validation.bn_batches))
                for _ in pipeline.forward(subnet, first):
                    pass
                norms.freeze()
                for outputs, batch in pipeline.forward(subnet, config.validation_batches(held, step)):
                    with torch.inference_mode(), config.autocast(stage.device):
                        scores.add(outputs, batch)
            if stage.is_last:
                self.store.set(f"scores/{step}/{name}", scores.means())
            if stage.is_first:
                yield name, self.store.get(f"scores/{step}/{name}")
        pipeline.close()
        # A rank that still waits here for word of the next one would take a message of training for one of this.
        self.store.gather(f"validated/{step}", None)

    def end(self) -> list[Any]:
        return [] if self.offload is None else self.store.gather("offload", self.offload.stats())

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()

    def _loader(self) -> Any:
        return self.config.loader(self.data, self.device, self.execution.data_workers)

    def _records(self, worker: Worker) -> Iterator[StepRecord]:
        for n, report in worker.reports if self.stage.is_first else ():
            if self.config.on_nonfinite == "skip" or bool(torch.isfinite(report[0])):
                yield from self._collector.add(n, report)  # else the backward of this micro-batch will explain it
        worker.reports.clear()

    def _status(self) -> Iterator[Event]:
        """How busy all ranks are, as often as they exchange it."""
        loop = self.loop
        if not self.stage.is_first or loop.last_status == self._last_status:
            return
        self._last_status = loop.last_status
        by_rank = {0: loop.status, **loop.heartbeat.others()}
        statuses = [by_rank.get(rank, {}) for rank in range(self.store.world)]
        yield (
            "pipeline",
            {
                "busy": [status.get("busy") for status in statuses],  # None: it has sent none yet
                "in_flight": [int(status.get("in_flight", 0)) for status in statuses],
            },
        )
        if self.offload is not None:
            yield "offload", {"stages": [status["offload"] for status in statuses if "offload" in status]}


def _no_batch(n: int) -> Batch:
    raise TrainError(f"a stage without inputs, loss or extra inputs asked for micro-batch {n}")
