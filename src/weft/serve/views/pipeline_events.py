"""What a run's events say of its pipeline: which subnets a step trained, how busy ranks were, what residency moved."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.runs.events import parse
from weft.serve.event_log import LogTail, Lru

POINTS = 400
"""The most points of utilisation that are kept: where there are more, each two become one."""

KEPT = 16
# A step as runs write it, which need not be parsed to know its number.
_STEP = re.compile(rb'\{"event": "step",.*?"step": (\d{1,15})[,}]')
_MOVED = ("uses", "misses", "brought", "sent")


class PipelineEvents:
    """The events of one run, read as they come: of steps only where in the file they are is kept."""

    def __init__(self, path: Path) -> None:
        self._file = LogTail(path)
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._pieces: list[tuple[int, int, int, int]] = []  # offset, length, first and last step
        self.began: float | None = None
        self.utilisation: list[tuple[float, list[float]]] = []
        self.residency: list[dict[str, Any]] = []
        self._every, self._waiting = 1, [0.0, 0]
        self._sums: list[float] = []

    def refresh(self) -> None:
        """Read what was added."""
        with self._lock:
            if not self._file.changed():
                return
            if self._file.replaced():
                self._clear()
            with suppress(OSError):
                for offset, piece in self._file.read():
                    self._take(offset, piece)

    def subnets(self, steps: Iterable[int]) -> dict[int, list[str]]:
        """The subnets of these steps, by their ids, where the events tell them."""
        wanted = set(steps)
        if not wanted:
            return {}
        low, high = min(wanted), max(wanted)
        found: dict[int, list[str]] = {}
        with self._lock:
            near = [piece for piece in self._pieces if piece[2] <= high and piece[3] >= low]
        try:
            with open(self._file.path, "rb") as file:
                for offset, length, _, _ in near:
                    file.seek(offset)
                    for line in file.read(length).splitlines():
                        quick = _STEP.match(line)
                        if quick and int(quick[1]) not in wanted:
                            continue
                        event = parse(line) or {}
                        step, ids = _step(event), event.get("subnets")
                        if step in wanted and isinstance(ids, list):
                            found[step] = [str(name)[:64] for name in ids[:1024]]
        except OSError:
            return found
        return found

    def _take(self, offset: int, piece: bytes) -> None:
        first, last = 2**60, -1
        for line in piece.splitlines():
            quick = _STEP.match(line)
            if quick and self.began is not None:
                step: int | None = int(quick[1])
            else:
                event = parse(line) or {}
                step = _step(event)
                self._see(event)
            if step is not None:
                first, last = min(first, step), max(last, step)
        if last >= 0:
            self._pieces.append((offset, len(piece), first, last))

    def _see(self, event: dict[str, Any]) -> None:
        time = event.get("time")
        if not isinstance(time, int | float) or isinstance(time, bool):
            return
        if self.began is None:
            self.began = float(time)
        if event.get("event") == "pipeline":
            self._busy(float(time), event.get("utilisation"))
        if event.get("event") == "residency":
            self._moved(event.get("stages"))
        elif event.get("event") == "finished":
            self._moved(event.get("residency"))

    def _busy(self, time: float, values: object) -> None:
        if not isinstance(values, list) or not 0 < len(values) <= 4096:
            return
        if not all(value is None or _is_number(value) for value in values):
            return
        values = [math.nan if value is None else value for value in values]  # a rank that has not told yet
        if len(values) != len(self._sums):  # a run that was resumed on other stages begins anew
            self._sums, self._waiting = [0.0] * len(values), [0.0, 0]
            if self.utilisation and len(self.utilisation[-1][1]) != len(values):
                self.utilisation, self._every = [], 1
        self._sums = [a + min(max(float(b), 0.0), 1.0) for a, b in zip(self._sums, values, strict=True)]
        self._waiting = [self._waiting[0] + time, self._waiting[1] + 1]
        count = int(self._waiting[1])
        if count < self._every:
            return
        self.utilisation.append((self._waiting[0] / count, [total / count for total in self._sums]))
        self._sums, self._waiting = [0.0] * len(values), [0.0, 0]
        if len(self.utilisation) >= 2 * POINTS:
            self._every *= 2
            self.utilisation = thinned(self.utilisation, POINTS)

    def _moved(self, stages: object) -> None:
        rows = [row for row in stages if isinstance(row, dict)] if isinstance(stages, list) else []
        # At first not every rank has written a row.
        if rows and len(rows) >= len(self.residency):
            self.residency = rows

    def residency_totals(self) -> dict[str, int] | None:
        """What residency did on all ranks together, up to now."""
        if not self.residency:
            return None
        uses, misses, brought, sent = (
            sum(int(row[name]) for row in self.residency if _is_number(row.get(name))) for name in _MOVED
        )
        return {"hits": uses - misses, "misses": misses, "brought": brought, "sent": sent}


def thinned(points: list[tuple[float, list[float]]], most: int) -> list[tuple[float, list[float]]]:
    """No more points than that: means of as many neighbours as it takes."""
    each = -(-len(points) // most)
    if each <= 1:
        return points
    found = []
    for place in range(0, len(points), each):
        part = points[place : place + each]
        values = [sum(column) / len(part) for column in zip(*(values for _, values in part), strict=True)]
        found.append((sum(time for time, _ in part) / len(part), values))
    return found


def _step(event: dict[str, Any]) -> int | None:
    number = event.get("step") if event.get("event") == "step" else None
    return number if isinstance(number, int) and 0 <= number < 2**53 else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


_known: Lru[PipelineEvents] = Lru(KEPT)


def pipeline_events(run: Path) -> PipelineEvents:
    """What a run's events say up to now; only what was added is read."""
    path = (run / "events.jsonl").absolute()
    found = _known.get(path, "", lambda: PipelineEvents(path))
    found.refresh()
    return found
