"""Forwards alone, in order, through all stages: how subnets are evaluated where no device holds the whole supernet."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from weft.data import Batch
from weft.pipeline.message import Message
from weft.pipeline.stage import Stage
from weft.pipeline.transport import Transport
from weft.space import Subnet
from weft.supernet import Carry, run_layer, side_inputs


class Relay:
    """One stage of it. A stage is at most ``window`` batches ahead of the next one, which says what it has taken."""

    def __init__(self, transport: Transport, stage: Stage, window: int) -> None:
        self._transport, self._stage, self._window = transport, stage, window
        self._waiting: deque[Carry] = deque()
        self._ahead = 0
        self._number = 0

    def forward(self, subnet: Subnet, batch: Batch) -> Any:
        """The next batch through this stage's layers; the outputs on the last stage, None on the others."""
        stage = self._stage
        with torch.inference_mode(), stage.precision():
            carry = stage.chain.enter(batch) if stage.is_first else self._take()
            for layer in stage.route(subnet):
                carry = run_layer(layer, stage.chain.module(layer), carry, side_inputs(layer, batch, subnet))
        self._number += 1
        if stage.is_last:
            return carry[0] if len(carry) == 1 else carry
        while self._ahead >= self._window:
            self._receive()
        self._ahead += 1
        self._transport.send(stage.index + 1, Message("F", self._number, carry, (False,) * len(carry)))
        return None

    def close(self) -> None:
        """Waits until the next stage has taken everything."""
        while self._ahead:
            self._receive()

    def _take(self) -> Carry:
        while not self._waiting:
            self._receive()
        self._transport.send(self._stage.index - 1, Message("B", self._number))
        return self._waiting.popleft()

    def _receive(self) -> None:
        arrived = self._transport.take()
        assert arrived is not None
        if arrived.message.kind == "B":
            self._ahead -= 1
        else:
            self._waiting.append(tuple(x for x in arrived.message.tensors if x is not None))
