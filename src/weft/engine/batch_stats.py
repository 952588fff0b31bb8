"""Batch statistics of training forwards, folded into the running buffers of batch norms in micro-batch order.

While a layer trains, each of its batch norms writes the plain statistics of the batch into scratch buffers (momentum
1), so a forward never touches the running buffers. They are folded in when the micro-batch's update is applied.

A forward of an elastic layer may use a part of a norm's channels, or leave a norm out. So its scratch buffers start
each time with a variance of -1, which no batch has: channels that still have it were not used, and are not folded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.elastic import Module as ElasticModule
from weft.errors import ConsistencyError
from weft.nn.checkpointing import running_norms
from weft.utils import foreach

BatchStatsRecord = list[Tensor]
"""The statistics of one forward: the scratch buffers, one after another."""


class BatchStats:
    """Holds the running buffers of one layer's norms while it trains."""

    def __init__(self, name: str, module: nn.Module, exact_single: bool) -> None:
        self.norms = running_norms(module)
        for norm in self.norms:
            if norm.momentum is None and not exact_single:
                raise ConsistencyError(
                    f"layer '{name}' has a norm with momentum=None, whose forward reads its own buffers: "
                    "that needs 'exact' and one micro-batch a step. Give the norm a momentum"
                )
        # A cumulative average reads its count in the forward, so it stays as torch runs it.
        self.norms = [norm for norm in self.norms if norm.momentum is not None]
        self.momenta = [float(norm.momentum or 0.0) for norm in self.norms]
        self._running: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._scratch: list[Tensor] = []
        self._folded = 0  # counted on the host: one launch a norm and step would be a high price for a number
        self._frozen: set[int] = set()
        self._elastic = module if isinstance(module, ElasticModule) and self.norms else None
        self._unseen: list[Tensor] = []
        self._hook: Any = None
        self.attached = False

    def attach(self) -> None:
        """Gives the modules scratch buffers to write to."""
        if self.attached:
            return
        self._running = [
            buffer for norm in self.norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None
        ]
        self._counts = [norm.num_batches_tracked for norm in self.norms if norm.num_batches_tracked is not None]
        self._scratch = self._scratch or [buffer.clone() for buffer in self._running]
        self._frozen = {index for index, norm in enumerate(self.norms) if not norm.training}
        for index, norm in enumerate(self.norms):
            if index not in self._frozen:  # a norm that the user holds in evaluation mode reads its running buffers
                norm.running_mean, norm.running_var = self._scratch[2 * index], self._scratch[2 * index + 1]
                norm.num_batches_tracked = None
                norm.momentum = 1.0
        if self._elastic is not None:
            self._unseen = [torch.full_like(b, -(index % 2)) for index, b in enumerate(self._scratch)]
            self._hook = self._elastic.register_forward_pre_hook(self._blank)
        self.attached = True

    def detach(self) -> None:
        """Gives the modules their running buffers back, as evaluation needs them."""
        if not self.attached:
            return
        for index, count in enumerate(self._counts):
            if index not in self._frozen:
                count.add_(self._folded)
        self._folded = 0
        for index, norm in enumerate(self.norms):
            norm.running_mean, norm.running_var = self._running[2 * index], self._running[2 * index + 1]
            norm.num_batches_tracked = self._counts[index]
            norm.momentum = self.momenta[index]
        if self._hook is not None:
            self._hook.remove()
        self.attached = False

    def record(self, copy: bool) -> BatchStatsRecord:
        """The statistics of the last forward; without a copy the next one overwrites them."""
        return [tensor.clone() for tensor in self._scratch] if copy else self._scratch

    def clear(self) -> None:
        """Clears a forward that does not count (its loss was not a number), lest 0 * nan survive in the scratch."""
        for tensor in self._scratch:
            tensor.data.zero_()  # autograd has noted the buffers of a norm, though a training backward reads none

    def fold(self, record: BatchStatsRecord) -> None:
        if not self.norms:
            return
        if self._elastic is not None:
            record = self._seen(record)
        if len(set(self.momenta)) == 1 and not self._frozen:
            foreach.lerp_(self._running, record, self.momenta[0])
        else:
            for index, momentum in enumerate(self.momenta):
                if index not in self._frozen:
                    pair = slice(2 * index, 2 * index + 2)
                    foreach.lerp_(self._running[pair], record[pair], momentum)
        self._folded += 1

    def _blank(self, module: nn.Module, inputs: Any) -> None:
        foreach.copy_([tensor.data for tensor in self._scratch], self._unseen)

    def _seen(self, record: BatchStatsRecord) -> BatchStatsRecord:
        """The record, with the running values in channels that its forward did not use."""
        merged = []
        for index in range(0, len(record), 2):
            unseen = record[index + 1] < 0
            pair = zip(self._running[index : index + 2], record[index : index + 2], strict=True)
            merged += [torch.where(unseen, running, new) for running, new in pair]
        return merged
