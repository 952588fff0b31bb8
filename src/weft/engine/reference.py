"""The reference: one process, one device, one micro-batch after the other under the versions that it must read.

Written from the formulas of ``consistency``, with kept versions, and not from an order of execution. This is the oracle
that every pipeline run must equal bit for bit, and the engine of runs on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.data import Batch
from weft.engine.bilevel import check_unrolled, look_ahead
from weft.engine.cuda_graphs import CudaGraphCache
from weft.engine.layer_state import CheckpointPart
from weft.engine.tape import Tape
from weft.engine.train_step import Outputs, TrainedLayers, TrainStep
from weft.engine.weight_versions import VersionedLayer
from weft.errors import NonFiniteError
from weft.space import Subnet
from weft.supernet import Chain


@dataclass(frozen=True, slots=True)
class StepResult:
    """The losses of a step by micro-batch (not yet read from the device), and the sums of its metrics."""

    step: int
    subnets: tuple[Subnet, ...]
    losses: tuple[Tensor, ...]
    metrics: Mapping[str, tuple[Tensor, float]]
    skipped: int = 0


class SequentialReference(TrainedLayers):
    def __init__(
        self, chain: Chain, config: TrainStep, device: torch.device, graphs: CudaGraphCache | None = None
    ) -> None:
        check_unrolled(config)
        super().__init__(chain, config, device)
        self._graphs = graphs
        self._reached = -2

    def step(self, i: int, batch: Batch) -> StepResult:
        """Forward, backward and every update that falls due in step i."""
        m, subnets = self.config.microbatches, self.config.subnets(i)
        losses: list[Tensor] = []
        sums: dict[str, tuple[Tensor, float]] = {}
        skipped = 0
        for j, part in enumerate(self.config.parts(batch)):
            n = i * m + j
            if self.offload is not None:
                self._load(n)
            loss, metrics, counts = self._microbatch(n, subnets[j % len(subnets)], part)
            losses.append(loss)
            skipped += not counts
            for name, (total, count) in metrics.items():
                before = sums.get(name)
                if before is not None:
                    total, count = torch.as_tensor(before[0], dtype=torch.float64) + total, before[1] + count
                sums[name] = total, count
            self._update(n)
            if self.offload is not None:
                self.offload.finish(n)
        return StepResult(i, subnets, tuple(losses), sums, skipped)

    def restore(self, part: CheckpointPart) -> None:
        super().restore(part)
        self._reached = -2

    def train_mode(self) -> None:
        self.chain.train()
        super().train_mode()

    def eval_mode(self) -> None:
        super().eval_mode()
        self.chain.eval()

    def explain_nonfinite(self, n: int, batch: Batch) -> NonFiniteError:
        """The error for the loss of micro-batch n: runs the forward again to find the first bad layer."""
        names = [layer.name for layer in self.route(self.config.subnet(n))]
        with nullcontext() if self.offload is None else self.offload.pinned_on_device(names):
            return self.nonfinite_loss(n, self.first_nonfinite(n, self.chain.enter(batch), batch))

    def _load(self, n: int) -> None:
        assert self.offload is not None
        if n != self._reached + 1:
            self.offload.begin_run(n, self.config.steps * self.config.microbatches)
        self._reached = n
        self.offload.start(n)

    def _microbatch(self, n: int, subnet: Subnet, batch: Batch) -> tuple[Tensor, dict[str, tuple[Tensor, float]], bool]:
        config = self.config
        step, search = n // config.microbatches, config.architecture_search
        if search is not None and search.order == 2 and search.architecture(step):
            outputs, loss, gradients = look_ahead(self, step, batch)
            return self._backward(n, batch, outputs, loss, lambda: gradients, list(self.weights.values()))
        in_background = None if self.offload is None else self.offload.prefetch_during
        tape = Tape(n, self.chain.enter(batch), self._graphs, in_background=in_background)
        with config.autocast(self.device):
            for _ in self.run_layers(tape, n, subnet, self.chain.route(subnet), batch):
                pass
            outputs, loss = self.compute_loss(tape, n, batch)
        backward = partial(tape.backward, (loss,), (self._loss_gradient,))
        return self._backward(n, batch, outputs, loss, backward, tape.used)

    def _backward(
        self,
        n: int,
        batch: Batch,
        outputs: Outputs,
        loss: Tensor,
        backward: Callable[[], Mapping[str, list[Tensor | None]]],
        used: Sequence[VersionedLayer],
    ) -> tuple[Tensor, dict[str, tuple[Tensor, float]], bool]:
        """The loss, its metrics, and whether the micro-batch counts; its gradients join those of their slots."""
        metrics = self.config.measure(outputs, batch)
        # On a CPU this check costs nothing; on a GPU it would stall every step, so the run checks later.
        checks = self.device.type == "cpu" or self.config.on_nonfinite == "skip"
        if checks and not math.isfinite(loss.item()):
            if self.config.on_nonfinite == "stop":
                raise self.explain_nonfinite(n, batch)
            for weights in used:
                weights.undo_forward(n)
            return loss.detach(), {}, False
        gradients = backward()
        for weights in used:
            if weights.layer.name in gradients and (weights.parameters or weights.batch_stats.norms):
                weights.add(n, gradients[weights.layer.name])
                self._unfinished[weights.layer.name] = weights
        return loss.detach(), metrics, True

    def _update(self, n: int) -> None:
        """Applies the updates of all slots that end with micro-batch n."""
        due = [weights for weights in self._unfinished.values() if weights.last_microbatch() <= n]
        for weights in due:
            del self._unfinished[weights.layer.name]
            for sums in self.sums:
                sums.record(weights)
        for sums in self.sums:
            sums.advance(n + 1)
        self.apply(due, lambda weights: n + 1)
        for sums in self.sums:
            sums.forget(n + 1)
        self.prune(lambda weights: n + 1)
