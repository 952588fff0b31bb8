"""A seat: what runs jobs on a node of a cluster, as a plain class that an actor is made of."""

from __future__ import annotations

import json
import os
import queue
import threading
from typing import Any

from weft.tune.job import Ended, Job, Reported
from weft.tune.process import surroundings
from weft.tune.wire import event_message, job_of
from weft.tune.worker import prepare, unpacked, worn, written


class Seat:
    """Runs one job at a time in a thread of its own; its methods are called from others, and speak JSON text."""

    def __init__(self, payload: bytes, device: str, threads: int | None) -> None:
        self._payload, self._device, self._threads = payload, device, threads
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._terms: Any = None
        self._store: Any = None

    def pid(self) -> int:
        return os.getpid()

    def meeting(self, world: int) -> dict[str, str]:
        """Where the processes of a split job meet, which all are on this node."""
        from weft.tune.meeting import open_meeting

        variables, self._store = open_meeting(world)
        return variables

    def start(self, job: str, rank: int, variables: dict[str, str], output: str) -> None:
        threading.Thread(
            target=self._run, args=(job_of(json.loads(job)), rank, variables, output), name="weft-trial", daemon=True
        ).start()

    def answer(self, prune: bool) -> None:
        self._answers.put(prune)

    def poll(self, timeout: float = 10.0) -> str:
        """What was said since the last call, waited for if nothing was."""
        found = []
        try:
            found.append(self._said.get(timeout=timeout))
            while True:
                found.append(self._said.get_nowait())
        except queue.Empty:
            return json.dumps(found)

    def _run(self, job: Job, rank: int, variables: dict[str, str], output: str) -> None:
        from weft.tune.attempt import attempt

        try:
            if self._terms is None:
                self._terms = unpacked(self._payload)
                prepare(self._device, self._threads)
        except Exception as problem:
            self._said.put({"say": "broken", "why": f"{type(problem).__name__}: {problem}"})
            return
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if variables else {}
        with surroundings({**variables, **ranks}), written(output):
            self._said.put({"say": "began"})
            attempt(job, self._terms, self._device, rank, self._ask, self._tell)
        self._said.put({"say": "idle", "worn": worn(self._device)})

    def _ask(self, report: Reported) -> bool:
        self._said.put({"say": "event", "event": event_message(report)})
        return self._answers.get()

    def _tell(self, ended: Ended) -> None:
        self._said.put({"say": "event", "event": event_message(ended)})
