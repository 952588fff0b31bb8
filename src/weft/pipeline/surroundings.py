"""What torch elastic needs around it while it runs stages: environment, signals, silence, and nobody left behind."""

from __future__ import annotations

import logging
import multiprocessing.resource_tracker
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from weft.pipeline.parent import ATTEMPT, PARENT

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


@contextmanager
def inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Adds the variables for a while: stages inherit them, and libraries read them before any code of ours runs."""
    multiprocessing.resource_tracker.ensure_running()  # it outlives the launch, so it must not pass for a stage
    touched = [*variables, PARENT, "MASTER_ADDR", "MASTER_PORT", ATTEMPT, "TORCHELASTIC_SIGNALS_TO_HANDLE"]
    before = {name: os.environ.get(name) for name in touched}
    os.environ.update({**variables, PARENT: str(os.getpid())})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP go to the handler. Only the main thread can listen; what is ignored (nohup) stays
    ignored."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        known = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
        before = {number: signal.getsignal(number) for number in known}
        before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Deaths(logging.Handler):
    """Reads in elastic's log which stage died first, since elastic says so nowhere else before the last death."""

    last: tuple[int, int] | None = None
    """Rank and exit code."""

    def emit(self, record: logging.LogRecord) -> None:
        values = record.args
        if str(record.msg).startswith("failed (exitcode") and isinstance(values, tuple) and len(values) > 1:
            code, rank = values[:2]
            if isinstance(code, int) and isinstance(rank, int):
                self.last = rank, code


@contextmanager
def quiet(deaths: Deaths) -> Iterator[None]:
    """Elastic's log goes to `deaths` alone; its tables and tracebacks are for those who set WEFT_DEBUG."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [item.propagate for item in loggers]
    for item in loggers:
        item.addHandler(deaths)
        item.propagate = item.propagate and bool(os.environ.get("WEFT_DEBUG"))
    try:
        yield
    finally:
        for item, propagate in zip(loggers, before, strict=True):
            item.removeHandler(deaths)
            item.propagate = propagate


def kill_stages() -> None:
    """Ends whatever stage is left, with the processes of its session. Linux only: elsewhere they end with the
    parent."""
    mark = f"{PARENT}={os.getpid()}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                pid = int(folder.name)
                (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
        except (OSError, ValueError):
            continue  # it ended meanwhile, or is not ours to read
