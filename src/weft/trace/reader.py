"""The trace of a run: all operations, messages and updates of its stages, as columns of numbers.

A million operations are a few dozen megabytes. A file may be given piece by piece, while the run still writes it.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from weft.errors import RunError

Numbers = NDArray[Any]
Kind = Literal["F", "B"]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Small = Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)]
Time = Annotated[float, Meta(ge=0, le=1e12)]
State = Literal["arriving", "resident", "leaving"]

STATES: tuple[State, ...] = ("arriving", "resident", "leaving")

PIECE = 1 << 20
"""Bytes of a file that are parsed at once."""


class TraceHeader(Struct, frozen=True):
    """The line with which a start of the run begins."""

    start: Small
    stages: Annotated[int, Meta(ge=1, le=4096)]
    cut: list[Small]
    microbatches: Annotated[int, Meta(ge=1, le=2**31)] = 1
    """Micro-batches of a step."""
    simulated: list[tuple[Count, str, Count, Time, Time]] | None = None
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


class _Sent(Struct, array_like=True, tag="sent", forbid_unknown_fields=True):
    kind: Kind
    microbatch: Count
    time: Time
    bytes: Count


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

_ROWS: tuple[type[Struct], ...] = (_Op, _Received, _Sent, _Update, _Memory)
_CODES = {
    **dict.fromkeys(("kind", "state"), "B"),
    **dict.fromkeys(("in_flight", "forward", "backward", "layers", "version", "layer"), "i"),
    **dict.fromkeys(("microbatch", "bytes", "resident", "arriving", "leaving", "pinned"), "q"),
    **dict.fromkeys(("start", "end", "time"), "d"),
}
"""How ``array`` holds the fields of rows."""


@dataclass(frozen=True, slots=True)
class Ops:
    """Operations in order of time. ``kind`` is ``ord`` of its letter.

    ``in_flight`` counts the micro-batches in flight while the operation ran. ``forward`` is the version of the weights
    that its forward sees, ``backward`` that of a backward itself, of the layer where these are farthest apart; -1 where
    none was written.
    """

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
class StageTrace:
    """One stage, by columns. Updates are in order of time, and ``version`` counts those of the stage; ``received`` and
    ``sent`` are messages, named by the operation of this stage that takes or makes them; ``memory`` has the changes of
    offloaded layers, with the bytes of all layers on the device from then on."""

    ops: Ops
    updates: dict[str, Numbers]
    received: dict[str, Numbers]
    sent: dict[str, Numbers]
    memory: dict[str, Numbers]
    layers: tuple[str, ...] = ()
    """Names of the layers, by their numbers in ``memory``."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The last start of a run; times are seconds of one clock, and ``begin`` is when the first stage began to work."""

    head: TraceHeader
    stages: tuple[StageTrace, ...]
    simulated: tuple[StageTrace, ...] = ()
    """What the simulator expected of the first steps after this start, from time 0 on; its micro-batches have the
    numbers of the real ones, though a file counts them from 0."""
    begin: float = field(init=False)
    end: float = field(init=False)

    def __post_init__(self) -> None:
        parts = [(stage.ops.start, stage.ops.end) for stage in self.stages]
        parts += [(stage.updates["start"], stage.updates["end"]) for stage in self.stages]
        begin = min((float(start.min()) for start, _ in parts if len(start)), default=0.0)
        object.__setattr__(self, "begin", begin)
        object.__setattr__(self, "end", max((float(end.max()) for _, end in parts if len(end)), default=begin))


def read_traces(run_path: Path | str) -> Trace:
    """The last start of a run, without lines that are torn.

    RunError where there is no trace, or no operation in it.
    """
    files = {}
    for number, path in trace_files(Path(run_path) / "traces").items():
        files[number] = StageFile()
        with open(path, "rb") as lines:
            while piece := lines.readlines(PIECE):
                files[number].add(b"".join(piece))
    found = join_files(files)
    if found is None:
        raise RunError(
            f"run '{run_path}' has no traces: start it with --execution.trace=true, or weft.train(..., trace=True)"
        )
    if not any(len(stage.ops) for stage in found.stages):
        raise RunError(f"the traces of run '{run_path}' hold no operation yet: wait until its first steps are done")
    return found


def trace_files(folder: Path) -> dict[int, Path]:
    """The files in a folder of traces, by the numbers of their stages."""
    found = ((re.fullmatch(r"stage(\d{1,6})\.jsonl", path.name), path) for path in sorted(folder.glob("stage*.jsonl")))
    return {int(match[1]): path for match, path in found if match}


class StageFile:
    """The file of one stage, as far as it was read: its last two starts.

    The one before the last is needed until all stages have started again.
    """

    def __init__(self) -> None:
        self.starts: OrderedDict[int, _Start] = OrderedDict()

    def add(self, piece: bytes) -> None:
        """Take in whole lines; damaged and unknown ones are skipped."""
        rows = parse_rows(piece)
        begun = 0
        for place, row in enumerate(rows):
            if type(row) is dict:
                self._fill(rows[begun:place])
                self._begin(row)
                begun = place + 1
        self._fill(rows[begun:])

    def _fill(self, rows: list[Any]) -> None:
        if self.starts and rows:
            next(reversed(self.starts.values())).add(rows)

    def _begin(self, row: dict[str, Any]) -> None:
        try:
            head = msgspec.convert(row, TraceHeader)
        except msgspec.ValidationError:
            return
        self.starts.pop(head.start, None)
        self.starts[head.start] = _Start(head)
        while len(self.starts) > 2:
            self.starts.popitem(last=False)


def join_files(files: Mapping[int, StageFile]) -> Trace | None:
    """The last start in the files of a run; None where there is none.

    The file of the first stage says which start is the last; where it is lost, that of the next stage.
    """
    heads = [next(reversed(files[number].starts.values())).head for number in sorted(files) if files[number].starts]
    if not heads:
        return None
    stages = [_stage_of(number, heads[0], files) for number in range(heads[0].stages)]
    first = min((int(stage.ops.microbatch.min()) for stage in stages if len(stage.ops)), default=0)
    return Trace(heads[0], tuple(stages), _simulated(heads[0], first))


def parse_rows(piece: bytes) -> list[Any]:
    """The rows of whole lines, without damaged and unknown ones."""
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


class _Start:
    """The rows of one start of one stage, as they come."""

    def __init__(self, head: TraceHeader) -> None:
        self.head = head
        self._columns = {row: {name: array(_CODES[name]) for name in row.__struct_fields__} for row in _ROWS}
        self._layers: dict[str, int] = {}
        self._made: StageTrace | None = None

    def add(self, rows: Iterable[Any]) -> None:
        by_type: dict[type[Struct], list[Any]] = {kind: [] for kind in _ROWS}
        for row in rows:
            by_type[type(row)].append(row)
        for kind, columns in self._columns.items():
            for name, column in columns.items():
                column.extend(self._numbers(name, [getattr(row, name) for row in by_type[kind]]))
        self._made = None

    def stage(self) -> StageTrace:
        if self._made is None:
            made = {kind: {name: np.array(part) for name, part in own.items()} for kind, own in self._columns.items()}
            ops = _ordered(made[_Op], ("end", "start"))
            for part in (ops, made[_Update]):  # a clock that was set back would give a negative time
                part["end"] = np.maximum(part["end"], part["start"])
            updates, memory = _ordered(made[_Update], ("start",)), _ordered(made[_Memory], ("time",))
            messages = made[_Received], made[_Sent]
            self._made = StageTrace(Ops(**ops), updates, *messages, memory, tuple(self._layers))
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


def _stage_of(number: int, head: TraceHeader, files: Mapping[int, StageFile]) -> StageTrace:
    start = files[number].starts.get(head.start) if number in files else None
    nothing = _Start(head).stage()
    found = nothing if start is None else start.stage()
    # Starts may be counted anew after a resume: what was over before this one began belongs to an older one.
    is_older = number > 0 and len(found.ops) > 0 and found.ops.end[-1] < head.time
    return nothing if is_older else found


def _simulated(head: TraceHeader, first: int) -> tuple[StageTrace, ...]:
    if not head.simulated:
        return ()
    shift = first - min(microbatch for _, _, microbatch, _, _ in head.simulated)
    starts = [_Start(head) for _ in range(head.stages)]
    rows: list[list[_Op]] = [[] for _ in starts]
    for stage, kind, microbatch, start, end in head.simulated:
        if stage < len(rows) and kind in ("F", "B"):
            rows[stage].append(_Op(kind, microbatch + shift, start, end, 0))  # type: ignore[arg-type]
    for made, own in zip(starts, rows, strict=True):
        made.add(own)
    return tuple(made.stage() for made in starts)
