"""What trials need, found in processes of their own, so that devices never wait for an estimate."""

from __future__ import annotations

import logging
import socket
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weft.errors import TuneError, WeftError
from weft.space import Value
from weft.tune.attempt import Terms
from weft.tune.devices import processors
from weft.tune.job import After
from weft.tune.needs import Need, kind_of, need
from weft.tune.process import started
from weft.tune.recipe import Recipe
from weft.tune.wire import Line
from weft.tune.worker import packed, unpacked

log = logging.getLogger("weft.tune")

Params = Mapping[str, Value]

UNDER_WAY = 4
"""Questions that a process has at once, so that it need not wait for the next."""
MOST = 8
"""Processes that estimate: devices wait for them when a study begins, and later they have little to do."""


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
    after: dict[int, After] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)

    def ask(self, number: int, params: Params, kind: str, after: After | None) -> None:
        self.asked[number], self.kinds[number] = dict(params), kind
        if after is not None:
            self.after[number] = after
        self.send()

    def send(self) -> None:
        """The next that were asked, no more than both ends of the line can hold: else each may wait for the other.
        First those like one that was answered, which take no time."""
        rest = [number for number in self.asked if number not in self.sent]
        rest.sort(key=lambda number: self.kinds[number] not in self.answered)
        for number in rest[: UNDER_WAY - len(self.sent)]:
            self.sent.add(number)
            with suppress(OSError):  # that it is gone is seen when it is heard
                params, after = dict(self.asked[number]), self.after.get(number)
                self.line.send({"number": number, "params": params, "after": after})

    def heard(self, number: int) -> bool:
        """Whether an answer is to one of its questions."""
        self.sent.discard(number)
        if self.asked.pop(number, None) is None:
            return False
        self.after.pop(number, None)
        self.answered.add(self.kinds.pop(number))
        return True

    def work(self) -> int:
        """How many traces it has to make."""
        return len(set(self.kinds.values()) - self.answered)


class Foresight:
    """Answers come in any order. Where nothing has to be estimated they are there at once, without a process."""

    def __init__(self, terms: Terms, place: Place, processes: int | None = None) -> None:
        self._terms, self._place = terms, place
        most = max(1, min(MOST, processors()[1] // 2)) if processes is None else processes
        self._most = most if isinstance(terms.objective, Recipe) and place.memory is not None else 0
        self._seers: list[_Seer] = []
        self._by_kind: dict[str, _Seer] = {}
        self._known: list[tuple[int, Need | Refused]] = []
        self._untold: dict[int, Params] = {}

    @property
    def open(self) -> dict[int, Params]:
        """Those whose need is not known yet."""
        return {n: params for seer in self._seers for n, params in seer.asked.items()} | self._untold

    def ask(self, number: int, params: Params, after: After | None = None) -> None:
        """``after``: how it was fitted when it took more than a device has, and is to be fitted otherwise."""
        seer = self._seer(kind := kind_of(params))
        if seer is None:
            self._see(number, params, after)
            return
        seer.ask(number, params, kind, after)

    def told(self) -> list[tuple[int, Need | Refused]]:
        """All that is known by now and was not told before."""
        for seer in list(self._seers):
            messages, alive = seer.line.arrived()
            for message in messages:
                if seer.heard(message["number"]):
                    self._known.append((message["number"], _read(message)))
            if alive:
                seer.send()
            else:
                self._lose(seer)
        answers, self._known = self._known, []
        self._untold.clear()
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
                self._by_kind[kind] = min(self._seers, key=_Seer.work)
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
            self._see(number, params, seer.after.get(number))

    def _see(self, number: int, params: Params, after: After | None) -> None:
        """Here, by the driver itself."""
        self._known.append((number, found(self._terms, params, self._place, after)))
        self._untold[number] = params


def found(terms: Terms, params: Params, place: Place, after: After | None = None) -> Need | Refused:
    """What a trial needs; a model that cannot be made is its trial's failure, and no other's."""
    try:
        return need(terms, params, place.memory, place.devices, place.kind, place.fuse, after)
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
            after = msgspec.convert(message.get("after"), After | None)
            answer = found(terms, message["params"], place, after)
            line.send({"number": message["number"], type(answer).__name__: msgspec.to_builtins(answer)})


def _read(message: Mapping[str, Any]) -> Need | Refused:
    if "Refused" in message:
        return msgspec.convert(message["Refused"], Refused)
    return msgspec.convert(message["Need"], Need)
