"""Forwards alone, in order, through all stages: how subnets are evaluated where no device holds the whole supernet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from weft.data import Batch
from weft.pipeline.message import Message
from weft.pipeline.placement import Placement
from weft.pipeline.stage import Stage
from weft.pipeline.transport import Transport
from weft.space import Subnet
from weft.supernet import Carry, run_layer, side_inputs


class Relay:
    """One rank of it. A stage is at most ``window`` batches ahead of the next one, which says what it has taken."""

    def __init__(self, transport: Transport, stages: Sequence[Stage], window: int, placement: Placement) -> None:
        self._transport, self._window, self._placement = transport, window, placement
        self._stages = {stage.index: stage for stage in stages}
        self._waiting: dict[int, deque[Carry]] = {index: deque() for index in self._stages}
        self._ahead = dict.fromkeys(self._stages, 0)

    def forward(self, subnet: Subnet, batches: Iterable[Batch]) -> Iterator[tuple[Any, Batch]]:
        """All batches through this rank's layers; on the rank of the last stage, the outputs with their batches.

        Every rank goes through as many batches, and has to exhaust this before it begins anew.
        """
        source = iter(batches)
        first, last = min(self._stages), max(self._stages)
        through = dict.fromkeys(self._stages, 0)
        held: dict[int, Batch] = {}
        while True:
            if through[first] not in held:
                batch = next(source, None)
                if batch is not None:
                    held[through[first]] = batch
            # What has come furthest goes first; a batch that is not held belongs to those that come after these.
            able = [index for index in through if through[index] in held and self._can(index)]
            if able:
                index = max(able)
                batch = held[through[index]]
                outputs = self._through(self._stages[index], subnet, batch, through[index])
                if index == last:
                    del held[through[index]]
                through[index] += 1
                if self._stages[index].is_last:
                    yield outputs, batch
            elif held:
                self._receive()
            else:
                return

    def close(self) -> None:
        """Waits until the next stages have taken everything."""
        while any(self._ahead.values()):
            self._receive()

    def _can(self, index: int) -> bool:
        there = self._stages[index].is_first or bool(self._waiting[index])
        return there and self._ahead[index] < self._window

    def _through(self, stage: Stage, subnet: Subnet, batch: Batch, number: int) -> Any:
        with torch.inference_mode(), stage.precision():
            carry = stage.chain.enter(batch) if stage.is_first else self._take(stage.index, number)
            for layer in stage.route(subnet):
                carry = run_layer(layer, stage.chain.module(layer), carry, side_inputs(layer, batch, subnet))
        if stage.is_last:
            return carry[0] if len(carry) == 1 else carry
        self._ahead[stage.index] += 1
        if stage.index + 1 in self._stages:
            self._waiting[stage.index + 1].append(carry)
        else:
            self._send(stage.index + 1, Message("F", number, carry, (False,) * len(carry)))
        return None

    def _take(self, index: int, number: int) -> Carry:
        if index - 1 in self._stages:
            self._ahead[index - 1] -= 1
        else:
            self._send(index - 1, Message("B", number))
        return self._waiting[index].popleft()

    def _send(self, stage: int, message: Message) -> None:
        self._transport.send(self._placement.rank_of(stage), message.to(stage))

    def _receive(self) -> None:
        arrived = self._transport.take()
        assert arrived is not None
        message = arrived.message
        assert message.stage is not None
        if message.kind == "B":
            self._ahead[message.stage] -= 1
        else:
            self._waiting[message.stage].append(tuple(x for x in message.tensors if x is not None))
