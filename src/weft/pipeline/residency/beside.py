"""A thread that prepares what comes next while the program's own waits outside of Python, as in a backward."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Work = Callable[[], None]

SWITCH = 1e-4
"""Seconds that either may keep the other from Python meanwhile: a backward comes back to it for a moment whenever a
tensor that Python once knew goes, and would lose up to 5 ms each time."""


class Beside:
    """Runs one thing in the thread, another one here, and returns when both are done: they never see each other's
    halves, so that nothing of either has to be locked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked: SimpleQueue[tuple[Work, Any] | None] = SimpleQueue()
        self._told: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: Thread | None = None

    def __call__(self, there: Work, here: Callable[[], T]) -> T:
        """What ``here`` gives. An error of ``there`` is raised where there is none of ``here``."""
        if self._thread is None:
            # It knows the queues alone: whoever forgets this object ends it.
            self._thread = Thread(target=_serve, args=(self._asked, self._told), name="weft-residency", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._asked.put, None)
        cuda = self._device.type == "cuda"
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH)
        self._asked.put((there, torch.cuda.current_stream(self._device) if cuda else None))
        try:
            found = here()
        finally:
            problem = self._told.get()
            sys.setswitchinterval(before)
        if problem is not None:
            raise problem
        return found


def _serve(asked: SimpleQueue[tuple[Work, Any] | None], told: SimpleQueue[BaseException | None]) -> None:
    while (job := asked.get()) is not None:
        work, stream = job
        problem: BaseException | None = None
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                work()
        except BaseException as caught:
            problem = caught
        del job, work, stream
        told.put(problem)
        problem = None
