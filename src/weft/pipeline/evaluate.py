"""The score of one subnet with the weights that the supernet has now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from weft.data import Batch
from weft.pipeline.sequential import Loss, Metric
from weft.pipeline.statistics import running_norms
from weft.space import Subnet
from weft.supernet import Chain


def evaluate(
    chain: Chain,
    subnet: Subnet,
    batches: Iterable[Batch],
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    precision: str = "fp32",
) -> dict[str, float]:
    """Mean loss and metrics over the batches, weighted by their sizes. The chain must be in evaluation mode."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, float] = {}
    with torch.inference_mode():
        for batch in batches:
            size = len(next(iter(batch.values())))
            with torch.autocast(_device(batch).type, torch.bfloat16) if precision == "bf16" else nullcontext():
                outputs = chain(batch, subnet)
                found = {name: metric(outputs, batch) for name, metric in (metrics or {}).items()}
                if loss is not None:
                    found["loss"] = (loss(outputs, batch) * size, size)
            for name, (total, count) in found.items():
                total = torch.as_tensor(total).double()
                sums[name] = sums[name] + total if name in sums else total
                counts[name] = counts.get(name, 0.0) + count
    return {name: float(total) / counts[name] for name, total in sums.items()}


@contextmanager
def recalibrated(chain: Chain, subnet: Subnet, batches: Iterable[Batch]) -> Iterator[None]:
    """Within the block, the subnet's batch norms hold statistics of these batches for this subnet alone.

    The running statistics of a supernet mix many subnets, so inherited weights score badly with them. Afterwards the
    buffers are as they were. Without batches nothing changes.
    """
    batches = list(batches)
    norms = [norm for layer in chain.route(subnet) for norm in running_norms(chain.module(layer))]
    if not norms or not batches:
        yield
        return
    saved = [(norm, {name: b.clone() for name, b in norm.named_buffers()}, norm.momentum) for norm in norms]
    try:
        with torch.no_grad():
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a plain average over the batches
                norm.train()
            for batch in batches:
                chain(batch, subnet)
            for norm in norms:
                norm.eval()
        yield
    finally:
        for norm, buffers, momentum in saved:
            norm.momentum = momentum
            norm.eval()
            for name, buffer in norm.named_buffers():
                buffer.copy_(buffers[name])


def _device(batch: Batch) -> torch.device:
    return next(iter(batch.values())).device
