"""What a run's events say, read from both ends of the file alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.runs.events import ENDS, parse

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


def ended(path: Path) -> str | None:
    """How the run of this file ended, if it did; the whole file is read only if its last part does not say."""
    said = ending(tail(path))
    if said is None and path.is_file():
        words = [f'"{end}"'.encode() for end in ENDS]
        with open(path, "rb") as file:
            said = ending(_events([line for line in file if any(word in line for word in words)]))
    return said


def ending(events: list[dict[str, Any]]) -> str | None:
    """The last of `ENDS` among these events, if any."""
    return next((event["event"] for event in reversed(events) if event.get("event") in ENDS), None)


def _events(lines: list[bytes]) -> list[dict[str, Any]]:
    return [event for line in lines if (event := parse(line)) is not None]
