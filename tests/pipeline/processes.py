"""What tests of real processes share."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def wait_for(true: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "what was waited for did not happen"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def processes() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts processes, which are ended with the block."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: object, **options: Any) -> subprocess.Popen[str]:
        words = [sys.executable, *map(str, command)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(words, **{**pipes, **options}))
        return started[-1]

    try:
        yield begin
    finally:
        for process in started:
            process.kill()
            process.communicate()
