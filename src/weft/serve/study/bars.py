"""Bars: when which job of a study lay on which device, packed into lanes so that no two of a lane overlap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Bar:
    """A job on its devices."""

    job: str
    trials: list[int]
    devices: list[str]
    start: float
    end: float | None = None
    estimated: int | None = None
    measured: int | None = None
    state: str = "running"
    left: set[int] = field(default_factory=set)
    """Trials that have not ended."""


def pack(spans: Sequence[tuple[float, float | None]]) -> list[int]:
    """A lane for each span of time, by start the first that is free; one without an end keeps its lane for good.

    >>> pack([(0, 4), (1, 2), (2, None), (5, 6)])
    [0, 1, 1, 0]
    """
    lanes, free = [0] * len(spans), list[float]()
    for at in sorted(range(len(spans)), key=lambda index: spans[index][0]):
        start, end = spans[at]
        lane = next((lane for lane, until in enumerate(free) if until <= start), len(free))
        free[lane : lane + 1] = [math.inf if end is None else max(start, end)]
        lanes[at] = lane
    return lanes


def packed(bars: Sequence[Bar], devices: Mapping[str, int | None], began: float) -> list[dict[str, Any]]:
    """Every device with its memory and its bars, in seconds since the study began; a job on several is on each."""
    found = []
    for name in dict.fromkeys([*devices, *(device for bar in bars for device in bar.devices)]):
        own = sorted((bar for bar in bars if name in bar.devices), key=lambda bar: bar.start)
        rows = []
        for bar, lane in zip(own, pack([(bar.start, bar.end) for bar in own]), strict=True):
            end = None if bar.end is None else round(bar.end - began, 3)
            times = {"start": round(bar.start - began, 3), "end": end, "lane": lane}
            memory = {"estimated": bar.estimated, "measured": bar.measured}
            rows.append({"job": bar.job, "trials": bar.trials, **times, **memory, "state": bar.state})
        found.append({"name": name, "memory": devices.get(name), "bars": rows})
    return found


def distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number where one comes again.

    >>> distinct(["local/cpu", "local/cpu"])
    ['local/cpu', 'local/cpu (2)']
    """
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found
