"""A simulator of packing: trials with recorded needs and durations, on any number of devices, in no time.

The packer that it steps is the one that the driver steps; only the devices are simulated.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.errors import TuneError
from weft.tune.packing.packer import Placement
from weft.tune.packing.pool import DeviceCapacity, JobSpec


class Packs(Protocol):
    """What the simulator steps: a `Packer`, or a rival of it."""

    @property
    def devices(self) -> tuple[DeviceCapacity, ...]: ...
    def admit(self, waiting: Iterable[JobSpec], now: float = 0.0) -> list[Placement]: ...
    def ended(self, id: str) -> None: ...
    def measured(self, id: str, rate: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trial as it ran by itself; its load says what was known beforehand."""

    load: JobSpec
    seconds: float
    demand: float = 1.0
    """The share of each of its devices' time that it used. Together they cannot use more than all of it."""


@dataclass(frozen=True, slots=True)
class Packed:
    """What came of it. Starts and ends are by the id of the load, in seconds from the first start."""

    makespan: float
    starts: dict[str, float]
    ends: dict[str, float]
    places: dict[str, tuple[int, ...]]
    mean_memory: float
    """Of all the memory of all devices, over the makespan."""
    most: int
    """Loads that ran on one device at once, where there were most."""


@dataclass(slots=True)
class _Run:
    trial: Recorded
    places: tuple[int, ...]
    left: float
    speed: float
    since: float
    version: int = 0


def simulate(
    trials: Sequence[Recorded],
    packer: Packs,
    *,
    window: int | None = None,
    loss: float = 0.0,
    measure: bool = False,
) -> Packed:
    """Trials in order, of which i may wait once all before ``i - window`` have ended; None: all wait from the start.

    A device gives its loads what they demand, or, where that is more than it has, each as much less; and every load
    beyond the first takes ``loss`` of the speed of all. A split trial goes at the pace of its slowest device. With
    ``measure``, the packer is told every rate after every change.
    """
    return _Simulation(trials, packer, window, loss, measure).run()


def lower_bound(trials: Sequence[Recorded], devices: Sequence[DeviceCapacity]) -> float:
    """Seconds that no packing can beat: all work by all devices, all bytes x seconds by all memory, the longest."""
    work = sum(t.seconds * t.demand * t.load.degree for t in trials) / len(devices)
    longest = max((t.seconds for t in trials), default=0.0)
    memory = [device.memory for device in devices]
    reserve = min(device.reserve for device in devices)
    area = 0.0
    if all(m is not None for m in memory):
        taken = sum(t.seconds * ((t.load.memory or 0) + reserve) * t.load.degree for t in trials)
        area = taken / sum(m for m in memory if m is not None)
    return max(work, area, longest)


class _Simulation:
    def __init__(
        self, trials: Sequence[Recorded], packer: Packs, window: int | None, loss: float, measure: bool
    ) -> None:
        self.trials, self.packer, self.loss, self.measure = trials, packer, loss, measure
        self.window = len(trials) if window is None else window
        self.by_id = {trial.load.id: (number, trial) for number, trial in enumerate(trials)}
        self.now, self.area, self.most = 0.0, 0.0, 0
        self.runs: dict[str, _Run] = {}
        self.on: list[dict[str, _Run]] = [{} for _ in packer.devices]
        self.events: list[tuple[float, int, str, int]] = []
        self.starts: dict[str, float] = {}
        self.ends: dict[str, float] = {}
        self.places: dict[str, tuple[int, ...]] = {}
        self.done = [False] * len(trials)
        self.first = self.asked = 0
        self.waiting: dict[str, JobSpec] = {}

    def run(self) -> Packed:
        self._ask()
        self._admit()
        while self.runs:
            self._advance()
            self._ask()
            self._admit()
        if len(self.ends) < len(self.trials):
            raise TuneError(f"{len(self.trials) - len(self.ends)} trials never started: they fit on no device")
        memory = sum(device.memory or 0 for device in self.packer.devices)
        mean = self.area / (memory * self.now) if memory and self.now else 0.0
        return Packed(self.now, self.starts, self.ends, self.places, mean, self.most)

    def _ask(self) -> None:
        while self.first < len(self.done) and self.done[self.first]:
            self.first += 1
        while self.asked < len(self.trials) and self.asked <= self.first + self.window:
            load = self.trials[self.asked].load
            self.waiting[load.id] = load
            self.asked += 1

    def _admit(self) -> None:
        changed: dict[int, None] = {}
        for id, places in self.packer.admit(self.waiting.values(), self.now):
            del self.waiting[id]
            trial = self.by_id[id][1]
            run = self.runs[id] = _Run(trial, places, trial.seconds, 0.0, self.now)
            self.starts[id], self.places[id] = self.now, places
            for place in places:
                self.on[place][id] = run
                self.most = max(self.most, len(self.on[place]))
            changed.update(dict.fromkeys(places))
        self._pace(changed)

    def _advance(self) -> None:
        changed: dict[int, None] = {}
        ended = False
        while self.events and (not ended or self.events[0][0] <= self.now):
            when, _, id, version = heapq.heappop(self.events)
            run = self.runs.get(id)
            if run is None or run.version != version:
                continue
            ended, self.now = True, when
            del self.runs[id]
            number, trial = self.by_id[id]
            self.done[number], self.ends[id] = True, when
            self.area += (trial.load.memory or 0) * len(run.places) * (when - self.starts[id])
            for place in run.places:
                del self.on[place][id]
            changed.update(dict.fromkeys(run.places))
            self.packer.ended(id)
        self._pace(changed)

    def _pace(self, changed: dict[int, None]) -> None:
        """New speeds for all that run on devices whose company changed."""
        touched = {id: run for place in changed for id, run in self.on[place].items()}
        for id, run in touched.items():
            run.left -= run.speed * (self.now - run.since)
            run.since, run.version = self.now, run.version + 1
            run.speed = min(self._speed(place) for place in run.places)
            heapq.heappush(self.events, (self.now + max(run.left, 0.0) / run.speed, self.by_id[id][0], id, run.version))
        if self.measure:
            for id, run in touched.items():
                self.packer.measured(id, run.speed)

    def _speed(self, place: int) -> float:
        company = self.on[place].values()
        demand = sum(run.trial.demand for run in company)
        return float((1.0 - self.loss) ** (len(company) - 1)) / max(demand, 1.0)
