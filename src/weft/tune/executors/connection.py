"""The line between a driver and its workers: one JSON value a line, in which jobs and events travel as plain values."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from typing import Any

import msgspec

from weft.errors import TuneError
from weft.tune.jobs import Ended, Event, Job, Lost, Reported

Message = dict[str, Any]
_EVENTS: dict[str, type[Event]] = {kind.__name__.lower(): kind for kind in (Reported, Ended, Lost)}


class JsonConnection:
    """One end of a pair of sockets; nothing that comes over it is ever unpickled or evaluated."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._rest = b""

    def fileno(self) -> int:
        return self.end.fileno()

    def send(self, message: Message) -> None:
        """Raises OSError where the other end is gone."""
        self.end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message | None:
        """The next message, waited for; None once the other end is gone."""
        while b"\n" not in self._rest:
            if not (data := self._take()):
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def arrived(self) -> tuple[list[Message], bool]:
        """All whole messages that are here, without waiting; and whether the other end is still there."""
        alive = True
        self.end.setblocking(False)
        try:
            while data := self._take():
                self._rest += data
            alive = False
        except BlockingIOError:
            pass
        finally:
            self.end.setblocking(True)
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines], alive

    def close(self) -> None:
        self.end.close()

    def _take(self) -> bytes:
        try:
            return self.end.recv(1 << 16)
        except (ConnectionError, InterruptedError):
            return b""


def pair() -> tuple[JsonConnection, socket.socket]:
    """A line and the bare other end of it, which a new process can be given."""
    mine, other = socket.socketpair()
    return JsonConnection(mine), other


def job_message(job: Job) -> Message:
    return asdict(job)


def job_of(message: Message) -> Job:
    job: Job = _read(message, Job)
    return job


def event_message(event: Event) -> Message:
    """The event with its kind; numbers that JSON lacks are written as Python's ``json`` does, and read back so.

    >>> event_of(event_message(Lost("3.0", "killed")))
    Lost(job='3.0', why='killed')
    """
    return {"kind": type(event).__name__.lower(), **asdict(event)}


def event_of(message: Message) -> Event:
    fields = dict(message)
    kind = _EVENTS.get(str(fields.pop("kind", None)))
    if kind is None:
        raise TuneError(f"a worker said something that is no event: {str(message)[:200]}")
    event: Event = _read(fields, kind)
    return event


def _read(message: Message, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(message, kind, strict=True)
    except msgspec.ValidationError as problem:
        raise TuneError(f"a message between driver and worker is malformed: {problem}") from None
