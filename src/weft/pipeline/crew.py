"""The crew of a rank: the workers of its stages, of which one works at a time. Most ranks have a crew of one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from weft.pipeline.message import Message
from weft.pipeline.turns import Turns
from weft.pipeline.worker import Done, Worker


class Crew:
    """Workers in the order of their stages; ``group`` is that of their placement."""

    def __init__(self, workers: Sequence[Worker], group: int = 1) -> None:
        self.workers = tuple(workers)
        self.first = self.workers[0]
        self._of = {worker.stage.index: worker for worker in self.workers}
        self._turns = Turns([worker.scheduler for worker in self.workers], group)

    @property
    def done(self) -> bool:
        return self.first.done and all(worker.done for worker in self.workers[1:])

    @property
    def in_flight(self) -> int:
        """Micro-batches in flight, each counted on every stage where it is so."""
        return sum(len(worker.scheduler.in_flight) for worker in self.workers)

    def of(self, stage: int) -> Worker:
        return self._of[stage]

    def receive(self, message: Message) -> None:
        """The message goes to the worker that it is for."""
        (self.first if message.stage is None else self._of[message.stage]).receive(message)

    def work(self) -> Done | None:
        """The worker whose turn it is does its next operation; None where all wait for something to arrive."""
        before = time.perf_counter()
        op = self._turns.next()
        return None if op is None else self._of[op.stage].do(op, before)
