"""Links between neighbouring stages: messages over torch.distributed's gloo, each direction with a group of its own.

    stage 0  --F-->  stage 1  --F-->  stage 2        Every link has a thread that sends and, on the other side, one
             <--B--           <--B--                 that receives into the inbox of the stage: neither waits for other
                                                     links, and both work while the stage computes.

A receive is always posted, for as many bytes as the largest of the last messages had; a message is one transfer then.
One that is larger goes in two: its lengths alone, and once there is room for it, all of it. Tensors of a GPU go through
pinned host memory, so that any number of stages can share a device.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import PipelineError
from weft.pipeline.message import PREFIX, Message, assemble, disassemble, length_prefix, lengths_of

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
    time: float


class _Room:
    """How many bytes a receive is posted for; both ends of a link follow the same messages to the same number."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=16)
        self.bytes = PREFIX

    def saw(self, length: int) -> None:
        self._last.append(length)
        self.bytes = max(PREFIX, *self._last)


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
        return Arrived(disassemble(found.bytes, self._device), found.time)

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
    """A link to one neighbour. Messages leave in order; a thread waits for what has to be waited for."""

    def __init__(self, group: Any, to: int, device: torch.device, inbox: queue.SimpleQueue[Any]) -> None:
        self._group, self._to, self._inbox = group, to, inbox
        # The group's own methods: those of torch.distributed check again, at every message, what was checked here.
        self._peer = dist.get_group_rank(group, to)
        self._pinned = device.type == "cuda"
        self._room = _Room()
        self._queue: queue.SimpleQueue[tuple[Tensor, Any, list[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"weft-to-{to}", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> int:
        block = assemble(message, self._pinned)
        if self._pinned:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._queue.put((block, copied, []))  # the thread sends it, once it is on the host
        else:
            try:
                works = self._send(block)
            except RuntimeError as problem:
                raise Lost(self._to, _first_line(problem)) from problem
            self._queue.put((block, None, works))
        return len(block)

    def close(self) -> None:
        goodbye = torch.frombuffer(bytearray(length_prefix(0, 0)), dtype=torch.uint8)
        self._queue.put((goodbye, None, []))
        self._queue.put(None)
        self._thread.join()

    def _send(self, block: Tensor) -> list[Any]:
        works = []
        if len(block) > self._room.bytes:
            works.append(self._group.send([block[:PREFIX].clone()], self._peer, 0))
        works.append(self._group.send([block], self._peer, 0))
        self._room.saw(len(block))
        return works

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                block, copied, works = item
                if copied is not None:
                    copied.synchronize()
                for work in works or self._send(block):
                    work.wait()
                del block, item, works  # its memory is free for the next one
        except Exception as problem:  # whatever breaks a link ends this stage too, in its main thread
            self._inbox.put(Lost(self._to, _first_line(problem)))


def _receive(group: Any, source: int, device: torch.device, inbox: queue.SimpleQueue[Any]) -> None:
    try:
        room = _Room()
        peer = dist.get_group_rank(group, source)
        pinned = device.type == "cuda"
        while True:
            block = torch.empty(room.bytes, dtype=torch.uint8, pin_memory=pinned)
            group.recv([block], peer, 0).wait()
            _, length = lengths_of(block)
            if not length:  # the other side has said goodbye
                return
            if not PREFIX < length <= _LARGEST:
                raise PipelineError(f"it sent no message, but a length of {length} bytes")
            if length > room.bytes:
                block = torch.empty(length, dtype=torch.uint8, pin_memory=pinned)
                group.recv([block], peer, 0).wait()
            room.saw(length)
            inbox.put(_Block(block, time.time()))
    except Exception as problem:
        inbox.put(Lost(source, _first_line(problem)))


def _first_line(problem: Exception) -> str:
    text = str(problem).strip().splitlines()
    # Gloo begins with a place in its own source, and ends with advice.
    return re.sub(r"^\[\S+\] ", "", text[0]).split(". ")[0] if text else type(problem).__name__
