"""The board: how a study stands now, trial by trial and device by device, for whoever watches it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.tune.job import Device

OPEN = ("waiting", "starting", "running")


@dataclass(slots=True)
class Row:
    """One trial. Seconds are those since the driver started, or took it up again."""

    number: int
    params: Mapping[str, Any]
    state: str = "waiting"
    device: str = ""
    places: tuple[int, ...] = ()
    memory: int | None = None
    """Bytes that it was estimated, and admitted, with."""
    peak: int | None = None
    """Bytes that it really took."""
    step: int | None = None
    values: tuple[float, ...] | None = None
    attempts: int = 0
    why: str = ""
    proposed: float = field(default_factory=time.monotonic)
    started: float = 0.0
    waited: float = 0.0
    starting: float = 0.0
    ran: float = 0.0


@dataclass(slots=True)
class Board:
    """Written by the driver alone."""

    name: str
    trials: int
    objectives: tuple[str, ...]
    directions: tuple[str, ...]
    devices: Sequence[Device] = ()
    rows: dict[int, Row] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def count(self, *states: str) -> int:
        return sum(row.state in states for row in self.rows.values())

    def best(self) -> Row | None:
        """The complete trial with the best value of the first objective."""
        done = [row for row in self.rows.values() if row.state == "complete" and row.values]
        sign = -1.0 if self.directions[0] == "maximize" else 1.0
        return min(done, key=lambda row: (sign * (row.values or (0.0,))[0], row.number), default=None)

    def used(self, place: int) -> tuple[int, int]:
        """The trials on a device, and the bytes that they were admitted with."""
        here = [row for row in self.rows.values() if row.state in OPEN[1:] and place in row.places]
        return len(here), sum(row.memory or 0 for row in here)

    def time(self) -> dict[str, float]:
        """Where the time of all trials went, in seconds."""
        rows = self.rows.values()
        return {
            "running": sum(row.ran for row in rows),
            "waiting": sum(row.waited for row in rows),
            "starting": sum(row.starting for row in rows),
        }
