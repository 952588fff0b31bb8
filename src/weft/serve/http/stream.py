"""The stream of changes: who listens is told which runs have changed, and loads what it shows of them again."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from weft.serve.library import Library

EVERY = 0.5
"""Seconds between two looks at the files."""

BEAT = 15.0
"""Seconds of silence after which a comment says that the server is still there."""

KEPT = 1000


class Changes:
    """What changed, numbered; while anybody listens, one task looks at the files for all of them.

    Numbers begin at the milliseconds of the clock, so those of a server that was started again are greater than any
    that its listeners know.
    """

    def __init__(self, library: Library, every: float = EVERY) -> None:
        self._library = library
        self._every = every
        self._next = int(time.time() * 1000)
        self._kept: deque[tuple[int, dict[str, Any]]] = deque(maxlen=KEPT)
        self._seen: dict[str, str] | None = None
        self._plans = ""
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None

    def note(self, found: dict[str, str], plans: str) -> None:
        """Number what has changed, by the signatures of the runs and the plans now."""
        if self._seen is not None:
            if found.keys() != self._seen.keys() or plans != self._plans:
                self._add({"runs": True})
            for name, signature in found.items():
                if self._seen.get(name) != signature:
                    self._add({"run": name, "revision": self._library.revision(name, signature)})
        self._seen, self._plans = found, plans

    def since(self, last: int | None) -> list[tuple[int, dict[str, Any]]]:
        """What came after a number; all runs for one who does not say, or whose number is too old to know."""
        oldest = self._kept[0][0] if self._kept else self._next
        if last is not None and oldest - 1 <= last < self._next:
            return [change for change in self._kept if change[0] > last]
        now = self._next - 1
        runs: list[dict[str, Any]] = [{"runs": True}]
        runs += [{"run": name, "revision": self._library.revision(name, at)} for name, at in (self._seen or {}).items()]
        return [(now, change) for change in runs]

    async def listen(self, last: int | None, closing: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Server-sent events, until the server closes or the listener goes."""
        self._listeners += 1
        try:
            if self._task is None:
                await self._look()
                self._task = self._task or asyncio.create_task(self._watch())
            yield b"retry: 2000\n\n"
            spoke = time.monotonic()
            while not closing():
                for at, change in self.since(last):
                    last, spoke = at, time.monotonic()
                    yield _event(at, change)
                if time.monotonic() - spoke > BEAT:
                    spoke = time.monotonic()
                    yield b": still here\n\n"
                await asyncio.sleep(self._every / 2)
        finally:
            self._listeners -= 1

    async def _watch(self) -> None:
        try:
            while self._listeners:
                began = time.monotonic()
                await self._look()
                # Many runs on a slow disk: at most a tenth of the time is spent on looking.
                await asyncio.sleep(max(self._every, 9 * (time.monotonic() - began)))
        finally:
            self._task = None

    async def _look(self) -> None:
        self.note(*await asyncio.to_thread(lambda: (self._library.signatures(), self._library.of_plans())))

    def _add(self, change: dict[str, Any]) -> None:
        self._kept.append((self._next, change))
        self._next += 1


def _event(at: int, change: dict[str, Any]) -> bytes:
    return f"event: changed\nid: {at}\ndata: {json.dumps(change)}\n\n".encode()
