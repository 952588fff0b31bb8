"""One process of the peers of `paci.py`: torch.distributed.pipelining under 1F1B and ZBV."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from paci_task import Meter, Steps, Task
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleZBVZeroBubble

CPU = torch.device("cpu")
WORK = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", "scale_grads")


class TorchPeer:
    """Trains its stages; ``kind`` is ``1f1b`` or ``zbv``."""

    def __init__(self, task: Task, k: int, kind: str, rank: int, world: int) -> None:
        self.task, self.k, self.rank = task, k, rank
        self.meter = Meter()
        cut = task.v_cut if kind == "zbv" else task.cut
        ends, count = (0, *cut, None), len(cut) + 1
        mine = (rank, count - 1 - rank) if kind == "zbv" else (rank,)
        self.modules = [_part(task, ends[stage] or 0, ends[stage + 1]) for stage in mine]
        self.initial = [{key: value.clone() for key, value in m.state_dict().items()} for m in self.modules]
        stages: list[Any] = [PipelineStage(m, stage, count, CPU) for m, stage in zip(self.modules, mine, strict=True)]
        for stage in stages:
            for name in WORK:
                if hasattr(stage, name):
                    setattr(stage, name, self._spanned(getattr(stage, name)))
        if kind == "zbv":
            self.schedule: Any = ScheduleZBVZeroBubble(stages, k, loss_fn=self._loss)
        else:
            # Schedule1F1B refuses fewer micro-batches than stages; GPipe's order is the same where there is one.
            made = ScheduleGPipe if k < world else Schedule1F1B
            self.schedule = made(stages[0], k, loss_fn=self._loss)
        self.reads, self.ends = 0 in mine, count - 1 in mine
        self.drawn = task.draw()
        self._optimizer()

    def _optimizer(self) -> None:
        parameters = [p for module in self.modules for p in module.parameters()]
        asked = self.task.optimizer(self.k)
        if asked.others is None:
            self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(parameters, **asked.options, fused=True)]
        else:
            matrices, rest = ([p for p in parameters if (p.dim() == 2) is wanted] for wanted in (True, False))
            self.optimizers = [
                torch.optim.Muon(matrices, **asked.options),
                torch.optim.AdamW(rest, **asked.others.options, fused=True),
            ]

    def warm(self, steps: int) -> None:
        """The first steps settle shapes, buffers and caches."""
        self._train(steps)

    def train(self, steps: int) -> None:
        """From the first weights on."""
        self.meter.clear()
        for module, state in zip(self.modules, self.initial, strict=True):
            module.load_state_dict(state)
        self._optimizer()
        dist.barrier()
        self.meter.began = time.perf_counter()
        self._train(steps)

    def figures(self) -> dict[str, Any]:
        return {"schedule": type(self.schedule).__name__}

    def close(self) -> None:
        """It holds nothing that would have to be given back."""

    def _train(self, steps: int) -> None:
        schedule, base = self.task.schedule(self.k), self.task.optimizer(self.k).options["lr"]
        for step, batch in enumerate(Steps(self.drawn, self.task.rows * self.k).iterate(0, steps)):
            inputs = (batch["tokens"],) if self.reads else ()
            target = {"target": batch["targets"]} if self.ends else {}
            self.schedule.step(*inputs, **target, return_outputs=False)
            began = time.perf_counter()
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = base * schedule(step, steps)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.meter.spans.append((began, time.perf_counter()))

    def _loss(self, outputs: Any, targets: Any) -> Any:
        began = time.perf_counter()
        found = self.meter.loss(outputs, targets)
        self.meter.spans.append((began, time.perf_counter()))
        return found

    def _spanned(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = work(*args, **options)
            self.meter.spans.append((began, time.perf_counter()))
            return found

        return timed


def _part(task: Task, first: int, stop: int | None) -> nn.Module:
    chain = task.built(first, stop)
    names = [name for name, layer in chain.layers.items() if layer.block in range(len(chain.blocks))[first:stop]]
    return nn.Sequential(*(chain.module(name) for name in names)).train()
