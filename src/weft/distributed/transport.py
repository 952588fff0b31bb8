"""Links between ranks: messages over torch.distributed's gloo, each direction with a group of its own.

    rank 0   --F-->  rank 1   --F-->  rank 2         Every link has a thread that sends and, on the other side, one
             <--B--           <--B--                 that receives into the inbox of the stage: neither waits for other
                                                     links, and both work while the stage computes.

A receive is always posted, for as many bytes as the largest of the last messages had; a message is one transfer then.
A larger one goes in two: its lengths alone, and once there is room for it, all of it. Tensors of a GPU go through
pinned host memory, so that any number of stages can share a device; or, where every stage has a device of its own, as a
payload of its own over NCCL.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import PipelineError
from weft.pipeline.message import PREFIX, Message, pack, pack_with_payload, prefix, read_lengths, unpack

_FOREVER = timedelta(days=365)
_LARGEST = 1 << 40


class PeerLost(Exception):
    def __init__(self, stage: int, reason: str) -> None:
        super().__init__(f"rank {stage} is lost: {reason}")
        self.stage = stage


class Received(NamedTuple):
    """A message, and the time at which it was here."""

    message: Message
    time: float


class _Block(NamedTuple):
    """What a link took from its wire."""

    bytes: Tensor
    time: float
    payload: Tensor | None = None


class _ReceiveSize:
    """How many bytes a receive is posted for; both ends of a link follow the same messages to the same number."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=16)
        self.bytes = PREFIX

    def add(self, length: int) -> None:
        self._last.append(length)
        self.bytes = max(PREFIX, *self._last)


class Transport:
    """All links of one rank; made by every rank at once, after ``init_process_group``.

    Tensors go from device to device over the ``payload_backend``, such as ``nccl``; None: through the host. Each rank
    has a link to the next.
    """

    def __init__(self, rank: int, world: int, device: torch.device, payload_backend: str | None = None) -> None:
        self.device = device
        self._inbox: queue.SimpleQueue[_Block | Exception] = queue.SimpleQueue()
        self._outgoing: dict[int, _Sender] = {}
        self._receivers: list[threading.Thread] = []
        for left, right in pairwise(range(world)):
            # Every process makes every group, in one order: torch asks for it.
            forward, backward = (_Wire.between(left, right, payload_backend) for _ in range(2))
            if rank == left:
                self._open(right, outgoing=forward, incoming=backward)
            if rank == right:
                self._open(left, outgoing=backward, incoming=forward)

    def send(self, to: int, message: Message) -> int:
        """Sends to a rank without waiting, and returns how many bytes. The tensors are copied before this returns (on a
        GPU: in the order of its stream)."""
        return self._outgoing[to].put(message)

    def take(self, timeout: float | None = None) -> Received | None:
        """The next message; None after ``timeout`` seconds without one (0: do not wait). Raises PeerLost."""
        try:
            arrived = self._inbox.get(timeout != 0, timeout)
        except queue.Empty:
            return None
        if isinstance(arrived, Exception):
            raise arrived
        if arrived.payload is not None and arrived.payload.is_cuda:
            arrived.payload.record_stream(torch.cuda.current_stream())
        # Copies to a device are issued here, by the stage itself, so that they lie on its own stream.
        return Received(unpack(arrived.bytes, self.device, arrived.payload), arrived.time)

    def close(self) -> None:
        """Tells the neighbours that nothing follows and waits for their last message, so that no link breaks in use."""
        for sender in self._outgoing.values():
            sender.close()
        for thread in self._receivers:
            thread.join()

    def _open(self, other: int, outgoing: _Wire, incoming: _Wire) -> None:
        self._outgoing[other] = _Sender(outgoing, other, self.device, self._inbox)
        thread = threading.Thread(
            target=_receive, args=(incoming, other, self.device, self._inbox), name=f"weft-from-{other}", daemon=True
        )
        self._receivers.append(thread)
        thread.start()


class _Wire(NamedTuple):
    """The groups of one direction between two neighbours, whose own methods are used: those of torch.distributed check
    again, at every message, what was checked when the groups were made."""

    host: Any
    device_group: Any

    @classmethod
    def between(cls, left: int, right: int, backend: str | None) -> _Wire:
        host, other = (
            None if name is None else dist.new_group([left, right], timeout=_FOREVER, backend=name)
            for name in ("gloo", backend)
        )
        return cls(host, other)

    def peer(self, rank: int) -> int:
        return dist.get_group_rank(self.host, rank)


class _Sender:
    """A link to one neighbour. Messages leave in order; a thread waits for what has to be waited for."""

    def __init__(self, wire: _Wire, to: int, device: torch.device, inbox: queue.SimpleQueue[Any]) -> None:
        self._wire, self._to, self._inbox = wire, to, inbox
        self._peer = wire.peer(to)
        self._device = device
        self._receive_size = _ReceiveSize()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"weft-to-{to}", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> int:
        if self._wire.device_group is not None:
            payload, block_of = pack_with_payload(message, self._device)
            copied = _recorded(self._device)
            self._queue.put(lambda: self._send_payload(copied, payload, block_of))
            return len(payload)
        block = pack(message, self._device.type == "cuda")
        if self._device.type == "cuda":
            copied = _recorded(self._device)
            self._queue.put(lambda: self._send_copied(copied, block))  # once it is on the host
            return len(block)
        try:
            works = self._send(block)
        except RuntimeError as problem:
            raise PeerLost(self._to, _first_line(problem)) from problem
        self._queue.put(lambda: _wait(works, block))
        return len(block)

    def close(self) -> None:
        last = torch.frombuffer(bytearray(prefix(0, 0, 0)), dtype=torch.uint8)
        self._queue.put(lambda: _wait(self._send(last), last))
        self._queue.put(None)
        self._thread.join()

    def _send(self, block: Tensor) -> list[Any]:
        works = []
        if len(block) > self._receive_size.bytes:
            works.append(self._wire.host.send([block[:PREFIX].clone()], self._peer, 0))
        works.append(self._wire.host.send([block], self._peer, 0))
        self._receive_size.add(len(block))
        return works

    def _send_copied(self, copied: Any, block: Tensor) -> None:
        copied.synchronize()
        _wait(self._send(block), block)

    def _send_payload(self, copied: Any, payload: Tensor, block_of: Callable[[], Tensor]) -> None:
        if copied is not None:
            copied.synchronize()
        block = block_of()
        works = self._send(block)
        if len(payload):
            with _side(self._device):
                _wait([self._wire.device_group.send([payload], self._peer, 0)], payload)
        _wait(works, block)

    def _run(self) -> None:
        try:
            while (work := self._queue.get()) is not None:
                work()
                del work  # and with it the memory of its message
        except Exception as problem:  # whatever breaks a link ends this stage too, in its main thread
            self._inbox.put(PeerLost(self._to, _first_line(problem)))


def _receive(wire: _Wire, source: int, device: torch.device, inbox: queue.SimpleQueue[Any]) -> None:
    try:
        receive_size = _ReceiveSize()
        peer = wire.peer(source)
        pinned = device.type == "cuda" and wire.device_group is None
        while True:
            block = torch.empty(receive_size.bytes, dtype=torch.uint8, pin_memory=pinned)
            wire.host.recv([block], peer, 0).wait()
            _, length, payload_length = read_lengths(block)
            if not length:  # the other side closes the link
                return
            if not PREFIX < length <= _LARGEST or payload_length > _LARGEST:
                raise PipelineError(f"it sent no message, but lengths of {length} and {payload_length} bytes")
            if length > receive_size.bytes:
                block = torch.empty(length, dtype=torch.uint8, pin_memory=pinned)
                wire.host.recv([block], peer, 0).wait()
            receive_size.add(length)
            payload = None
            if wire.device_group is not None:
                with _side(device):
                    payload = torch.empty(payload_length, dtype=torch.uint8, device=device)
                    _wait([wire.device_group.recv([payload], peer, 0)] if payload_length else [], payload)
            inbox.put(_Block(block, time.time(), payload))
    except Exception as problem:
        inbox.put(PeerLost(source, _first_line(problem)))


def _wait(works: list[Any], held: Tensor) -> None:
    """Until the transfers are over; what they read or write lives as long."""
    for work in works:
        work.wait()
    if held.is_cuda:
        torch.cuda.current_stream().synchronize()


def _side(device: torch.device) -> AbstractContextManager[Any]:
    """A stream apart from that of the stage, which must not wait for messages that it does not need yet."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()  # type: ignore[no-untyped-call]


def _recorded(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _first_line(problem: Exception) -> str:
    text = str(problem).strip().splitlines()
    # Gloo begins with a place in its own source, and ends with advice.
    return re.sub(r"^\[\S+\] ", "", text[0]).split(". ")[0] if text else type(problem).__name__
