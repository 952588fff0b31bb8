"""The score of one subnet with the weights that the supernet has now."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Batch
from weft.distributed.transport import Transport
from weft.engine.losses import counted
from weft.engine.train_step import Loss, Metric
from weft.nn.checkpointing import running_norms
from weft.offload.setup import on_device
from weft.pipeline.message import Message
from weft.pipeline.stage import Stage
from weft.space import Subnet
from weft.supernet import Activations, Chain, extra_inputs, run_layer


def evaluate(
    chain: Chain,
    subnet: Subnet,
    batches: Iterable[Batch],
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    precision: str = "fp32",
) -> dict[str, float]:
    """Mean loss and metrics over the batches, weighted by their sizes. The chain must be in evaluation mode."""
    scores = Scores(loss, metrics)
    with on_device(chain, subnet), torch.inference_mode():
        for batch in batches:
            device = next(iter(batch.values())).device
            with torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext():
                scores.add(chain(batch, subnet), batch)
    return scores.means()


@contextmanager
def recalibrated(chain: Chain, subnet: Subnet, batches: Iterable[Batch]) -> Iterator[None]:
    """Within the block, the subnet's batch norms hold statistics of these batches for this subnet alone.

    The running statistics of a supernet mix many subnets, so inherited weights score badly with them. Afterwards the
    buffers are as they were. Without batches nothing changes. The subnet's layers are on the device within the block.
    """
    batches = list(batches)
    norms = Calibration([chain.module(layer) for layer in chain.route(subnet)] if batches else ())
    with on_device(chain, subnet), norms as calibration:
        with torch.no_grad():
            for batch in batches if calibration.norms else ():
                chain(batch, subnet)
        calibration.freeze()
        yield


class Calibration:
    """For a block, the batch norms of some modules average over what they see until ``freeze``, and then keep to it."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.norms = [norm for module in modules for norm in running_norms(module)]
        self._saved: list[tuple[dict[str, Tensor], float | None]] = []

    def __enter__(self) -> Calibration:
        for norm in self.norms:
            self._saved.append(({name: b.clone() for name, b in norm.named_buffers()}, norm.momentum))
            norm.reset_running_stats()
            norm.momentum = None  # a plain average over the batches
            norm.train()
        return self

    def freeze(self) -> None:
        for norm in self.norms:
            norm.eval()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with torch.no_grad():
            for norm, (buffers, momentum) in zip(self.norms, self._saved, strict=True):
                norm.momentum = momentum
                norm.eval()
                for name, buffer in norm.named_buffers():
                    buffer.copy_(buffers[name])


class Scores:
    """Sums of loss and metrics over batches, in double precision, and their means."""

    def __init__(self, loss: Loss | None, metrics: Mapping[str, Metric] | None) -> None:
        self._loss, self._metrics = loss, metrics or {}
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}

    def add(self, outputs: Any, batch: Batch) -> None:
        """The outputs of one batch; the loss counts by its size."""
        size = len(next(iter(batch.values())))
        sums = {name: counted(name, metric(outputs, batch)) for name, metric in self._metrics.items()}
        if self._loss is not None:
            sums["loss"] = (self._loss(outputs, batch) * size, size)
        for name, (total, count) in sums.items():
            total = torch.as_tensor(total).double()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            self._counts[name] = self._counts.get(name, 0.0) + count

    def means(self) -> dict[str, float]:
        """By name; what is a vector, as the probabilities of a mixture are, is for the log of steps and no score."""
        return {name: float(total) / self._counts[name] for name, total in self._sums.items() if total.numel() == 1}


# Forwards alone, in order, through all stages: how subnets are evaluated where no device holds the whole supernet.


class ForwardPipeline:
    """One stage of it, at most ``max_in_flight`` batches ahead of the next one, which says what it has taken."""

    def __init__(self, transport: Transport, stage: Stage, max_in_flight: int) -> None:
        self._transport, self._stage, self._max_in_flight = transport, stage, max_in_flight
        self._waiting: deque[Activations] = deque()
        self._ahead = 0

    def forward(self, subnet: Subnet, batches: Iterable[Batch]) -> Iterator[tuple[Any, Batch]]:
        """All batches through this stage's layers; on the last stage, the outputs with their batches.

        Every stage goes through as many batches, and has to exhaust this before it begins anew.
        """
        for number, batch in enumerate(batches):
            while not (self._stage.is_first or self._waiting) or self._ahead == self._max_in_flight:
                self._receive()
            outputs = self._through(subnet, batch, number)
            if self._stage.is_last:
                yield outputs, batch

    def close(self) -> None:
        """Waits until the next stage has taken everything."""
        while self._ahead:
            self._receive()

    def _through(self, subnet: Subnet, batch: Batch, number: int) -> Any:
        stage = self._stage
        with torch.inference_mode(), stage.config.autocast(stage.device):
            activations = stage.chain.enter(batch) if stage.is_first else self._take(number)
            for layer in stage.route(subnet):
                extra = extra_inputs(layer, batch, subnet)
                activations = run_layer(layer, stage.chain.module(layer), activations, extra)
        if stage.is_last:
            return activations[0] if len(activations) == 1 else activations
        self._ahead += 1
        self._transport.send(stage.index + 1, Message("F", number, activations, (False,) * len(activations)))
        return None

    def _take(self, number: int) -> Activations:
        self._transport.send(self._stage.index - 1, Message("B", number))
        return self._waiting.popleft()

    def _receive(self) -> None:
        arrived = self._transport.take()
        assert arrived is not None
        if arrived.message.kind == "B":
            self._ahead -= 1
        else:
            self._waiting.append(tuple(x for x in arrived.message.tensors if x is not None))
