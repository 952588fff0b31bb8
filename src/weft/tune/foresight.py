"""What trials need, found in processes of their own, so that devices never wait for an estimate."""

from __future__ import annotations

import logging
import socket
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weft.errors import TuneError, WeftError
from weft.space import Value
from weft.tune.attempt import Terms
from weft.tune.devices import processors
from weft.tune.needs import Need, kind_of, need
from weft.tune.process import started
from weft.tune.recipe import Recipe
from weft.tune.wire import Line
from weft.tune.worker import packed, unpacked

log = logging.getLogger("weft.tune")

Params = Mapping[str, Value]

UNDER_WAY = 4
"""Questions that a process has at once, so that it need not wait for the next."""


@dataclass(frozen=True, slots=True)
class Place:
    """What trials are fitted to; with a trial's values, this is all that its need depends on."""

    memory: int | None
    devices: int
    kind: str
    fuse: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A trial that cannot be run, and why."""

    why: str


@dataclass(eq=False, slots=True)
class _Seer:
    process: Any
    line: Line
    asked: dict[int, Params] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)

    def send(self) -> None:
        """The next that were asked, no more than both ends of the line can hold: else each may wait for the other."""
        for number in [n for n in self.asked if n not in self.sent][: UNDER_WAY - len(self.sent)]:
            self.sent.add(number)
            with suppress(OSError):  # that it is gone is seen when it is heard
                self.line.send({"number": number, "params": dict(self.asked[number])})


class Foresight:
    """Answers come in any order. Where nothing has to be estimated they are there at once, without a process."""

    def __init__(self, terms: Terms, place: Place, processes: int | None = None) -> None:
        self._terms, self._place = terms, place
        most = max(1, min(4, processors()[1] // 4)) if processes is None else processes
        self._most = most if isinstance(terms.objective, Recipe) and place.memory is not None else 0
        self._seers: list[_Seer] = []
        self._by_kind: dict[str, _Seer] = {}
        self._known: deque[tuple[int, Need | Refused]] = deque()

    @property
    def open(self) -> set[int]:
        """Those whose need is not known yet."""
        return {number for seer in self._seers for number in seer.asked} | {number for number, _ in self._known}

    def ask(self, number: int, params: Params) -> None:
        seer = self._seer(kind_of(params))
        if seer is None:
            self._known.append((number, found(self._terms, params, self._place)))
            return
        seer.asked[number] = dict(params)
        seer.send()

    def told(self) -> list[tuple[int, Need | Refused]]:
        """All that is known by now and was not told before."""
        for seer in list(self._seers):
            messages, alive = seer.line.arrived()
            for message in messages:
                seer.sent.discard(message["number"])
                if seer.asked.pop(message["number"], None) is not None:
                    self._known.append((message["number"], _read(message)))
            if alive:
                seer.send()
            else:
                self._lose(seer)
        answers = list(self._known)
        self._known.clear()
        return answers

    def close(self) -> None:
        for seer in self._seers:
            seer.line.close()
            seer.process.kill()
            seer.process.join()
        self._seers.clear()
        self._by_kind.clear()
        self._most = 0

    def _seer(self, kind: str) -> _Seer | None:
        """Who has seen a candidate that computes alike, else whoever has least to do."""
        if kind not in self._by_kind and self._most:
            if len(self._seers) < self._most and all(seer.asked for seer in self._seers):
                self._start()
            if self._seers:
                self._by_kind[kind] = min(self._seers, key=lambda seer: len(seer.asked))
        return self._by_kind.get(kind)

    def _start(self) -> None:
        try:
            payload = packed(self._terms)
        except TuneError:  # what another process cannot import is estimated here
            self._most = 0
            return
        process, line = started("weft-foresight", 1, serve, payload, msgspec.to_builtins(self._place))
        self._seers.append(_Seer(process, line))

    def _lose(self, seer: _Seer) -> None:
        log.warning("a process that estimates memory is gone; what it was asked is estimated by the driver")
        seer.line.close()
        seer.process.join()
        self._seers.remove(seer)
        self._by_kind = {kind: other for kind, other in self._by_kind.items() if other is not seer}
        self._most = len(self._seers)
        for number, params in seer.asked.items():
            self._known.append((number, found(self._terms, params, self._place)))


def found(terms: Terms, params: Params, place: Place) -> Need | Refused:
    """What a trial needs; a model that cannot be made is its trial's failure, and no other's."""
    try:
        return need(terms, params, place.memory, place.devices, place.kind, place.fuse)
    except Exception as problem:
        mine = isinstance(problem, WeftError)
        return Refused(str(problem) if mine else "".join(traceback.format_exception(problem)).strip())


def serve(end: socket.socket, payload: bytes, told: Mapping[str, Any]) -> None:
    """What such a process does, until the other end of its line is gone."""
    import torch

    torch.set_num_threads(1)
    line, place = Line(end), msgspec.convert(told, Place)
    terms = unpacked(payload)
    with suppress(OSError):
        while (message := line.receive()) is not None:
            answer = found(terms, message["params"], place)
            line.send({"number": message["number"], type(answer).__name__: msgspec.to_builtins(answer)})


def _read(message: Mapping[str, Any]) -> Need | Refused:
    if "Refused" in message:
        return msgspec.convert(message["Refused"], Refused)
    return msgspec.convert(message["Need"], Need)
