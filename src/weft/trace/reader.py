"""The rows of a stage's trace as columns of numbers: a million operations are a few dozen megabytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

Numbers = NDArray[Any]
Kind = Literal["F", "B", "W", "E"]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Small = Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)]
Time = Annotated[float, Meta(ge=0, le=1e12)]
State = Literal["arriving", "resident", "leaving"]

STATES: tuple[State, ...] = ("arriving", "resident", "leaving")


class Head(Struct, frozen=True):
    """The line with which a start of the run begins."""

    start: Small
    stages: Annotated[int, Meta(ge=1, le=4096)]
    cut: list[Small]
    microbatches: Annotated[int, Meta(ge=1, le=2**31)] = 1
    ranks: list[Count] = []
    simulated: list[tuple[Count, Kind, Count, Time, Time]] | None = None
    time: float = 0.0


class _Op(Struct, array_like=True, tag="op", forbid_unknown_fields=True):
    kind: Kind
    microbatch: Count
    start: Time
    end: Time
    in_flight: Small
    forward: Small = -1
    backward: Small = -1


class _Received(Struct, array_like=True, tag="received", forbid_unknown_fields=True):
    kind: Kind
    microbatch: Count
    time: Time


class _Sent(Struct, array_like=True, tag="sent"):
    kind: Kind


class _Update(Struct, array_like=True, tag="update", forbid_unknown_fields=True):
    layers: Small
    version: Small
    start: Time
    end: Time


class _Memory(Struct, array_like=True, tag="memory", forbid_unknown_fields=True):
    layer: str
    state: State
    time: Time
    resident: Count
    arriving: Count
    leaving: Count
    pinned: Count


_Row = _Op | _Received | _Sent | _Update | _Memory | dict[str, Any]
_decoder = msgspec.json.Decoder(_Row)


@dataclass(frozen=True, slots=True)
class Ops:
    """Operations in order of time; ``kind`` is ``ord`` of its letter, and a version that is not told is -1."""

    kind: Numbers
    microbatch: Numbers
    start: Numbers
    end: Numbers
    in_flight: Numbers
    forward: Numbers
    backward: Numbers

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage did, by columns: operations, updates, inputs that arrived, and layers that came and went."""

    ops: Ops
    updates: dict[str, Numbers]
    received: dict[str, Numbers]
    memory: dict[str, Numbers]
    layers: tuple[str, ...] = ()
    """Names of the layers, by their numbers in ``memory``."""


_COLUMNS: dict[type[Struct], dict[str, str]] = {
    _Op: {"kind": "B", "microbatch": "q", "start": "d", "end": "d", "in_flight": "i", "forward": "i", "backward": "i"},
    _Received: {"kind": "B", "microbatch": "q", "time": "d"},
    _Update: {"version": "i", "start": "d", "end": "d"},
    _Memory: {
        "layer": "i",
        "state": "B",
        "time": "d",
        **dict.fromkeys(("resident", "arriving", "leaving", "pinned"), "q"),
    },
}


class Part:
    """The rows of one start of one stage, as they come."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._columns = {kind: {name: array(code) for name, code in own.items()} for kind, own in _COLUMNS.items()}
        self._layers: dict[str, int] = {}
        self._made: Stage | None = None

    def add(self, rows: Iterable[Any]) -> None:
        by_type: dict[type[Struct], list[Any]] = {_Sent: [], **{kind: [] for kind in _COLUMNS}}
        for row in rows:
            by_type[type(row)].append(row)
        for kind, columns in self._columns.items():
            for name, column in columns.items():
                column.extend(self._numbers(name, [getattr(row, name) for row in by_type[kind]]))
        self._made = None

    def stage(self) -> Stage:
        if self._made is None:
            made = {
                kind: {name: np.array(column) for name, column in own.items()} for kind, own in self._columns.items()
            }
            ops = _ordered(made[_Op], ("end", "start"))
            for part in (ops, made[_Update]):  # a clock that was set back would give a negative time
                part["end"] = np.maximum(part["end"], part["start"])
            updates, memory = _ordered(made[_Update], ("start",)), _ordered(made[_Memory], ("time",))
            self._made = Stage(Ops(**ops), updates, made[_Received], memory, tuple(self._layers))
        return self._made

    def _numbers(self, name: str, values: list[Any]) -> Iterable[Any]:
        if name == "kind":
            return map(ord, values)
        if name == "state":
            return map(STATES.index, values)
        if name == "layer":
            return [self._layers.setdefault(value, len(self._layers)) for value in values]
        return values


def _ordered(columns: dict[str, Numbers], by: Sequence[str]) -> dict[str, Numbers]:
    order = np.lexsort([columns[name] for name in by])
    return {name: column[order] for name, column in columns.items()}


def rows_of(piece: bytes) -> list[Any]:
    """The rows of whole lines; what is damaged or unknown is skipped."""
    try:
        return _decoder.decode_lines(piece)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    found = []
    for line in piece.splitlines():
        try:
            found.append(_decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return found


def simulated(head: Head) -> tuple[Stage, ...]:
    parts = [Part(head) for _ in range(head.stages)]
    rows: list[list[_Op]] = [[] for _ in parts]
    for stage, kind, microbatch, start, end in head.simulated or ():
        if stage < len(rows):
            rows[stage].append(_Op(kind, microbatch, start, end, 0))
    for part, own in zip(parts, rows, strict=True):
        part.add(own)
    return tuple(part.stage() for part in parts)
