"""A file that only grows: whole records, buffered, and never a torn one left by a full disk."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from weft.runs.files import room


class Appender:
    """Appends records to a file, reaching the operating system at most once in `every` seconds.

    A record that could not be written stays in the buffer and is tried again by the next flush. Threads may share it.
    """

    def __init__(self, path: Path, every: float = 1.0) -> None:
        self.path = path
        self.every = every
        self._records: list[bytes] = []
        self._handle: int | None = None
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def add(self, record: bytes) -> None:
        with self._lock:
            self._records.append(record)
            if time.monotonic() - self._last >= self.every:
                self._write()

    def flush(self, sync: bool = True) -> None:
        """Write what is buffered; with `sync`, not to return before it would survive a power cut."""
        with self._lock:
            self._write()
            if sync and self._handle is not None:
                with room(self.path, 0):
                    os.fsync(self._handle)

    def close(self) -> None:
        """Flush and let go of the file, which a later record opens again."""
        try:
            self.flush()
        finally:
            with self._lock:
                if self._handle is not None:
                    os.close(self._handle)
                    self._handle = None

    def _write(self) -> None:
        if not self._records:
            return
        self._last = time.monotonic()
        data = b"".join(self._records)
        with room(self.path, len(data)):
            if self._handle is None:
                self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            start, written = os.fstat(self._handle).st_size, 0
            try:
                while written < len(data):
                    written += os.write(self._handle, data[written:])
            except OSError:
                # Take the torn part back, unless somebody else has written behind it.
                if written and os.fstat(self._handle).st_size == start + written:
                    os.ftruncate(self._handle, start)
                raise
        self._records.clear()
