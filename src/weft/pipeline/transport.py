"""Links between neighbouring stages: messages over torch.distributed's gloo, each direction with a group of its own.

    stage 0  --F-->  stage 1  --F-->  stage 2        Every link has a thread that sends and, on the other side, one
             <--B--           <--B--                 that receives into the inbox of the stage: neither waits for other
                                                     links, and both work while the stage computes.

A message is two transfers: its lengths, for which a receive is always posted, then one block of bytes. Tensors of a GPU
go through pinned host memory, so that any number of stages can share a device.
"""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import PipelineError
from weft.pipeline.message import Message, decode, encode, offsets, pack

_FOREVER = timedelta(days=365)
_LARGEST = 1 << 40


class Lost(Exception):
    """The connection to a neighbour broke."""

    def __init__(self, stage: int, reason: str) -> None:
        super().__init__(f"stage {stage} is lost: {reason}")
        self.stage = stage


class Arrived(NamedTuple):
    """A message, and the time at which it was here."""

    message: Message
    time: float


class _Block(NamedTuple):
    """What a link took from its wire."""

    bytes: Tensor
    header: int
    time: float


class Transport:
    """All links of one stage; made by every stage at once, after ``init_process_group``."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self._device = device
        self._inbox: queue.SimpleQueue[_Block | Exception] = queue.SimpleQueue()
        self._outgoing: dict[int, _Sender] = {}
        self._receivers: list[threading.Thread] = []
        for left in range(world - 1):
            right = left + 1
            # Every process makes every group, in one order: torch asks for it.
            forward = dist.new_group([left, right], timeout=_FOREVER, backend="gloo")
            backward = dist.new_group([left, right], timeout=_FOREVER, backend="gloo")
            if rank == left:
                self._open(right, outgoing=forward, incoming=backward)
            if rank == right:
                self._open(left, outgoing=backward, incoming=forward)

    def send(self, to: int, message: Message) -> int:
        """Sends without waiting, and returns how many bytes. The tensors are copied before this returns (on a GPU: in
        the order of its stream)."""
        return self._outgoing[to].put(message)

    def take(self, timeout: float | None = None) -> Arrived | None:
        """The next message; None after ``timeout`` seconds without one (0: do not wait). Raises Lost."""
        try:
            found = self._inbox.get(timeout != 0, timeout)
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise found
        # Copies to a device are issued here, by the stage itself, so that they lie on its own stream.
        return Arrived(decode(found.bytes, found.header, self._device), found.time)

    def close(self) -> None:
        """Says goodbye to the neighbours and waits until they have, so that no link breaks while it is in use."""
        for sender in self._outgoing.values():
            sender.close()
        for thread in self._receivers:
            thread.join()

    def _open(self, other: int, outgoing: Any, incoming: Any) -> None:
        self._outgoing[other] = _Sender(outgoing, other, self._device, self._inbox)
        thread = threading.Thread(
            target=_receive, args=(incoming, other, self._device, self._inbox), name=f"weft-from-{other}", daemon=True
        )
        self._receivers.append(thread)
        thread.start()


class _Sender:
    """A link to one neighbour: blocks leave in order, from a thread that may wait for the device."""

    def __init__(self, group: Any, to: int, device: torch.device, inbox: queue.SimpleQueue[Any]) -> None:
        self._group, self._to, self._inbox = group, to, inbox
        self._pinned = device.type == "cuda"
        self._queue: queue.SimpleQueue[tuple[Tensor, Tensor, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"weft-to-{to}", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> int:
        header, parts = encode(message)
        places, length = offsets(len(header), [layout for layout, _ in parts])
        block = torch.empty(length, dtype=torch.uint8, pin_memory=self._pinned)
        pack(header, parts, block, places)
        copied = None
        if self._pinned and parts:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._queue.put((torch.tensor([len(header), length]), block, copied))
        return length

    def close(self) -> None:
        self._queue.put((torch.tensor([0, 0]), torch.empty(0, dtype=torch.uint8), None))
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                lengths, block, copied = item
                if copied is not None:
                    copied.synchronize()
                dist.send(lengths, self._to, group=self._group)
                if len(block):
                    dist.send(block, self._to, group=self._group)
        except Exception as problem:  # whatever breaks a link ends this stage too, in its main thread
            self._inbox.put(Lost(self._to, _first_line(problem)))


def _receive(group: Any, source: int, device: torch.device, inbox: queue.SimpleQueue[Any]) -> None:
    try:
        lengths = torch.empty(2, dtype=torch.int64)
        while True:
            dist.recv(lengths, source, group=group)
            header, length = lengths.tolist()
            if not length:  # the other side has said goodbye
                return
            if not 0 < header <= length <= _LARGEST:
                raise PipelineError(f"it sent no message, but lengths of {header} and {length} bytes")
            block = torch.empty(length, dtype=torch.uint8, pin_memory=device.type == "cuda")
            dist.recv(block, source, group=group)
            inbox.put(_Block(block, header, time.time()))
    except Exception as problem:
        inbox.put(Lost(source, _first_line(problem)))


def _first_line(problem: Exception) -> str:
    text = str(problem).strip().splitlines()
    return text[0] if text else type(problem).__name__
