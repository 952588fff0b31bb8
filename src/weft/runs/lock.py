"""The lock of a run: held by one living process, gone with it however it dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.errors import RunError
from weft.runs.files import room

TRIES, PAUSE = 20, 0.025
"""How often a taken lock is tried, and the seconds between: someone who only looks holds it for an instant."""

_handles: set[int] = set()


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold the lock file for a block; `RunError` that names the holder if another holder lives."""
    with room(path, 0):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _handles.add(handle)
    try:
        _take(handle, path)
        try:
            yield
        finally:
            if handle in _handles:
                os.ftruncate(handle, 0)
    finally:
        if handle in _handles:  # a forked child has let go of it already
            _handles.discard(handle)
            os.close(handle)


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock file."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _take(handle: int, path: Path) -> None:
    for left in reversed(range(TRIES)):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if left:
                time.sleep(PAUSE)
                continue
            raise RunError(
                f"run '{path.parent}' is in use by {_holder(path)}; wait for it, stop it, or use another run"
            ) from error
    with room(path, 0):
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())


def _holder(path: Path) -> str:
    try:
        said = json.loads(path.read_bytes())
        return f"process {said['pid']} on {said['host']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"


def _let_go() -> None:
    """In a forked child: close the handles, lest an orphan keeps the lock of its dead parent."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_let_go)
