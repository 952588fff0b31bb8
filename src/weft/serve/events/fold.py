"""A fold over files that grow: what their lines come to so far, each read once and in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from weft.serve.events.grown import Grown
from weft.serve.memo import Memo

KEPT = 64
"""The most files whose sums are kept in memory."""

LONGEST, CHUNK = 1 << 20, 1 << 16


class Sum(Protocol):
    """What lines come to; its size must not depend on how many there were."""

    damaged: int
    """Lines that could not be read; those that are too long to be held are added."""

    def see(self, line: bytes) -> None:
        """Take in one line; one that is damaged changes nothing."""


S = TypeVar("S", bound=Sum)
T = TypeVar("T")


class Fold(Generic[S]):
    """The sums of files, read on from where they were; threads may share it."""

    def __init__(self, begin: Callable[[], S]) -> None:
        self._begin = begin
        self._kept: Memo[Follower[S]] = Memo(KEPT)

    def ask(self, path: Path, question: Callable[[S], T]) -> T:
        """The answer to a question about a file as it is now; of one that is not there, about no lines."""
        return self._kept.get(path, "", lambda: Follower(path, self._begin)).ask(question)


class Follower(Generic[S]):
    """The sum of one file."""

    def __init__(self, path: Path, begin: Callable[[], S]) -> None:
        self._file, self._begin, self._sum = Grown(path, LONGEST, CHUNK), begin, begin()
        self._lock = threading.Lock()

    def ask(self, question: Callable[[S], T]) -> T:
        """The answer to a question about all that is there up to now."""
        with self._lock:
            if self._file.changed():
                if self._file.replaced():
                    self._sum = self._begin()
                before = self._file.skipped
                for line in self._file.lines():
                    self._sum.see(line)
                self._sum.damaged += self._file.skipped - before
            return question(self._sum)
