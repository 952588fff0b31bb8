"""Callbacks in the process that started the stages: they see the events that stage 0 writes, as it writes them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from weft.pipeline.callbacks import Callback
from weft.runs.events import parse

log = logging.getLogger("weft.pipeline")

PERIOD = 0.1


@contextmanager
def followed(events: Path, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Within the block a thread shows every new event of a run to the callbacks, those of steps that are done again
    after a restart as well; what is left is shown at its end."""
    if not callbacks:
        yield
        return
    over = threading.Event()
    follower = _Follower(events, callbacks)
    thread = threading.Thread(target=_run, args=(follower, over), name="weft-follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        follower.read()


def _run(follower: _Follower, over: threading.Event) -> None:
    while not over.wait(PERIOD):
        follower.read()


class _Follower:
    """Reads a file that grows, and begins anew behind what it knows when it was replaced by a shorter one."""

    def __init__(self, path: Path, callbacks: Sequence[Callback]) -> None:
        self._path, self._callbacks = path, list(callbacks)
        self._file = 0
        self._read = path.stat().st_size if path.exists() else 0
        self._rest = b""
        if path.exists():
            self._file = path.stat().st_ino

    def read(self) -> None:
        try:
            with open(self._path, "rb") as file:
                state = self._path.stat()
                if state.st_ino != self._file or state.st_size < self._read:
                    # A resume has dropped the last events and written the others again: go on behind those.
                    self._read = min(self._read, state.st_size) if self._file else 0
                    self._file, self._rest = state.st_ino, b""
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = parse(line)
            if event is not None:
                for callback in list(self._callbacks):
                    try:
                        callback(event)
                    except Exception:
                        log.exception("a callback failed and sees no more of this run")
                        self._callbacks.remove(callback)
