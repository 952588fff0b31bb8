"""What happened in a run, as JSON lines: appended while it runs, readable after any crash."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weft.utils.files import AppendFile, replacing, to_json

ENDS = ("finished", "stopped", "failed")
"""The events that end a run; a run without one, and without a process, was interrupted."""

Event = Mapping[str, Any]
Callback = Callable[[Event], None]
"""Called with each event as it is written to ``events.jsonl``; ``event["event"]`` says which kind it is."""


class Events:
    """The events of one run, in one file; one process writes, any number read.

    `damaged` counts the lines that the last `read` skipped. `every` is the time in seconds that an event may wait in
    the buffer; `flush` writes at once and lasts through a power cut.
    """

    def __init__(self, path: Path | str, every: float = 1.0) -> None:
        self.path = Path(path)
        self.damaged = 0
        self._appender = AppendFile(self.path, every)
        self._mended = False

    def append(self, event: str, /, **fields: Any) -> None:
        """Add one event. NaN and infinity become strings, which `float()` turns back."""
        line = json.dumps(to_json({"event": event, "time": time.time(), **fields}), allow_nan=False) + "\n"
        if not self._mended:
            self._mended = True
            if _is_torn(self.path):  # a killed writer left half a line: do not glue this one to it
                line = "\n" + line
        self._appender.add(line.encode())

    def flush(self) -> None:
        self._appender.flush()

    def close(self) -> None:
        self._appender.close()

    def read(self) -> Iterator[dict[str, Any]]:
        """Every whole event in order, one line in memory at a time; resets and counts `damaged`."""
        self._appender.flush(sync=False)
        self.damaged = 0
        if not self.path.exists():
            return
        with open(self.path, "rb") as lines:
            for line in lines:
                event = parse(line)
                if event is not None:
                    yield event
                elif line.strip():
                    self.damaged += 1

    def drop_from(self, step: int) -> None:
        """For a resume at `step`: forget every event of this and later steps, any end, and every damaged line."""
        self._appender.close()
        if not self.path.exists():
            return
        with open(self.path, "rb") as lines, replacing(self.path, self.path.stat().st_size) as file:
            for line in lines:
                event = parse(line)
                if event is not None and not _is_undone(event, step):
                    file.write(line.rstrip() + b"\n")
        self._mended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def parse(line: bytes) -> dict[str, Any] | None:
    """The event in a line, or None for a line that is blank, cut off or not an event."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _is_undone(event: dict[str, Any], step: int) -> bool:
    at = event.get("step")
    return event.get("event") in ENDS or (isinstance(at, (int, float)) and at >= step)


def _is_torn(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


# The ends of a file of events: how a run began, how far it is and how it ended, without reading all of it.


WINDOW = 64 * 1024


def head(path: Path, window: int = WINDOW) -> list[dict[str, Any]]:
    """The whole events in the first `window` bytes; none if there is no file."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        return _events(file.read(window).splitlines())


def tail(path: Path, window: int = WINDOW) -> list[dict[str, Any]]:
    """The whole events in the last `window` bytes; none if there is no file."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        start = max(0, file.seek(0, 2) - window)
        file.seek(start)
        lines = file.read(window).splitlines()
    return _events(lines[1:] if start else lines)


def final_event(path: Path) -> str | None:
    """The event that ended the run of this file, if any; all of the file is read only if its last part has none."""
    end = last_end(tail(path))
    if end is None and path.is_file():
        words = [f'"{end}"'.encode() for end in ENDS]
        with open(path, "rb") as file:
            end = last_end(_events([line for line in file if any(word in line for word in words)]))
    return end


def last_end(events: list[dict[str, Any]]) -> str | None:
    """The last of `ENDS` among these events, if any."""
    return next((event["event"] for event in reversed(events) if event.get("event") in ENDS), None)


def _events(lines: list[bytes]) -> list[dict[str, Any]]:
    return [event for line in lines if (event := parse(line)) is not None]
