"""What the stages of a run did, from the traces that they wrote or still write.

It reads what ``weft.pipeline.trace`` reads, line for line, but goes on where it stopped when a file has grown.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from weft.serve.events.grown import Grown
from weft.serve.memo import Memo
from weft.serve.pipeline.columns import Head, Numbers, Ops, Part, Stage, rows_of, simulated

KEPT = 4
"""Runs whose traces are kept in memory."""


@dataclass(frozen=True, eq=False)
class Traced:
    """The last start of a run; times are seconds of one clock, and ``begin`` is when the first stage began to work."""

    head: Head
    stages: tuple[Stage, ...]
    simulated: tuple[Stage, ...] = ()
    begin: float = field(init=False)
    end: float = field(init=False)

    def __post_init__(self) -> None:
        work = [part for stage in self.stages for part in (stage.ops, stage.updates) if len(_of(part, "start"))]
        begin = min((float(_of(part, "start").min()) for part in work), default=0.0)
        object.__setattr__(self, "begin", begin)
        object.__setattr__(self, "end", max((float(_of(part, "end").max()) for part in work), default=begin))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of every stage."""
        given = tuple(self.head.ranks)
        return given if len(given) == len(self.stages) else tuple(range(len(self.stages)))


def _of(part: Ops | dict[str, Numbers], name: str) -> Numbers:
    found: Numbers = part[name] if isinstance(part, dict) else getattr(part, name)
    return found


class _File:
    """One stage's file: the last starts in it."""

    def __init__(self, path: Path) -> None:
        self._lines = Grown(path)
        self.parts: OrderedDict[int, Part] = OrderedDict()

    def refresh(self) -> bool:
        """Read what was added; whether there was anything."""
        if not self._lines.changed():
            return False
        if self._lines.replaced():
            self.parts.clear()
        with suppress(OSError):
            for _, piece in self._lines.read():
                self._take(rows_of(piece))
        return True

    def _take(self, rows: list[Any]) -> None:
        begun = 0
        for place, row in enumerate(rows):
            if type(row) is dict:
                self._add(rows[begun:place])
                self._begin(row)
                begun = place + 1
        self._add(rows[begun:])

    def _add(self, rows: list[Any]) -> None:
        if self.parts and rows:
            next(reversed(self.parts.values())).add(rows)

    def _begin(self, row: dict[str, Any]) -> None:
        try:
            head = msgspec.convert(row, Head)
        except msgspec.ValidationError:
            return
        self.parts.pop(head.start, None)
        self.parts[head.start] = Part(head)
        while len(self.parts) > 2:  # the one before is what the others still tell of, until all have begun anew
            self.parts.popitem(last=False)


class _Folder:
    """The traces of a run, kept between two looks at them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self._files: dict[int, _File] = {}
        self._traced: Traced | None = None

    def load(self) -> Traced | None:
        with self.lock:
            there = {number: path for path in self.folder.glob("stage*.jsonl") if (number := _number(path)) is not None}
            changed = [self._files.pop(number) for number in list(self._files) if number not in there] != []
            for number, path in there.items():
                changed |= self._files.setdefault(number, _File(path)).refresh()
            if changed:
                self._traced = self._join()
            return self._traced

    def _join(self) -> Traced | None:
        # The first stage's file says which start is the last; where it is lost, the next one's does.
        said = [self._files[number] for number in sorted(self._files) if self._files[number].parts]
        if not said:
            return None
        head = next(reversed(said[0].parts.values())).head
        stages = [self._stage(number, head) for number in range(head.stages)]
        return Traced(head, tuple(stages), simulated(head) if head.simulated else ())

    def _stage(self, number: int, head: Head) -> Stage:
        part = self._files[number].parts.get(head.start) if number in self._files else None
        found = Part(head).stage() if part is None else part.stage()
        # Starts may be counted anew after a resume: what was over before this one began belongs to an older one.
        stale = number > 0 and len(found.ops) > 0 and found.ops.end[-1] < head.time
        return Part(head).stage() if stale else found


_folders: Memo[_Folder] = Memo(KEPT)


def load(run: Path) -> Traced | None:
    """The last start of a run, as far as it is written; None where nothing is. The same value as long as no file
    changed, and only what was added is read where one did."""
    folder = (run / "traces").absolute()
    return _folders.get(folder, "", lambda: _Folder(folder)).load()


def _number(path: Path) -> int | None:
    found = re.fullmatch(r"stage(\d{1,6})\.jsonl", path.name)
    return int(found[1]) if found else None
