"""Devices with the jobs on them: where one more has room, and when."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from weft.errors import TuneError
from weft.tune.packing.throughput import JobRate, ThroughputModel

UNKNOWN = 1e300
"""Stands for a time that is not known, later than every one that is."""
NEAR = 16
"""Devices that are looked at to find the one that is free first, where there are many."""


class DevicePool:
    """Devices by index, with the jobs on them. It decides nothing.

    What is asked of all devices at once is kept in arrays: there may be a thousand.
    """

    def __init__(
        self, devices: Sequence[DeviceCapacity], throughput: ThroughputModel, running: Collection[PlacedJob] = ()
    ) -> None:
        self.devices, self.throughput = tuple(devices), throughput
        self.jobs_on: list[dict[str, PlacedJob]] = [{} for _ in self.devices]
        self.used = [0] * len(self.devices)
        self.nodes: dict[str, list[int]] = {}
        for index, device in enumerate(self.devices):
            self.nodes.setdefault(device.node, []).append(index)
        count = len(self.devices)
        self._counts, self._left = np.zeros(count, dtype=np.int64), np.zeros(count)
        self._open, self._clear = np.zeros(count, dtype=bool), np.zeros(count)
        self._there = np.array([device.max_jobs != 0 for device in self.devices], dtype=bool)
        self._whole = np.array([inf if d.memory is None else d.memory - d.reserve for d in self.devices], dtype=float)
        self._node = np.array([list(self.nodes).index(device.node) for device in self.devices], dtype=np.int64)
        self._seen = -1
        for index in range(count):
            self._changed(index)
        for run in running:
            self.enter(run)

    def present(self) -> int:
        """How many devices there are."""
        return int(self._there.sum())

    def enter(self, run: PlacedJob) -> None:
        for index in run.places:
            if index < len(self.devices):
                self.jobs_on[index][run.job.id] = run
                self.used[index] += self.need(index, run.job)
                self._changed(index)

    def leave(self, run: PlacedJob) -> None:
        for index in run.places:
            if index < len(self.devices) and self.jobs_on[index].pop(run.job.id, None) is not None:
                self.used[index] -= self.need(index, run.job)
                self._changed(index)

    def rates_on(self, index: int) -> list[JobRate] | None:
        """The rates of the jobs on a device; None unless each was measured since the last came or went."""
        runs = self.jobs_on[index].values()
        rates = [_rate(run.job, run.rate) for run in runs if run.rate is not None]
        return rates if len(rates) == len(runs) else None

    def need(self, index: int, job: JobSpec) -> int:
        device = self.devices[index]
        return (device.memory or 0) if job.memory is None else job.memory + device.reserve

    def most_free(self) -> float:
        """The most bytes that a job may ask for and start now, as far as memory goes; below 0 if none may start."""
        if self._seen != self.throughput.count:  # measurements may have changed any
            self._seen = self.throughput.count
            for index in range(len(self.devices)):
                self._open[index] = self._takes(index)
        return float(self._left[self._open].max(initial=-1.0))

    def fit(self, job: JobSpec) -> list[int]:
        """The devices on which a job may start now: the fewest jobs first, then the least memory."""
        fits = self._open & (self._left >= (0 if job.memory is None else job.memory))
        if self.runs_alone(job) or job.memory is None:
            fits &= (self._counts == 0) | ((job.memory is None) & (self._left == inf) & (not self.runs_alone(job)))
        places = np.flatnonzero(fits)
        ranked = np.lexsort((places, self._left[places], self._counts[places]))
        return [int(index) for index in places[ranked]]

    def room(self, index: int, job: JobSpec, used: int, others: Collection[PlacedJob]) -> bool:
        """Whether a device on which these jobs use so many bytes has room for one more."""
        device = self.devices[index]
        if device.memory is not None and used + self.need(index, job) > device.memory:
            return False
        if device.max_jobs is not None and len(others) >= device.max_jobs:
            return False
        return not others or not (self.runs_alone(job) or any(self.runs_alone(run.job) for run in others))

    def free_at(self, index: int, job: JobSpec, now: float) -> float:
        """When a device will have room for a job if nothing else starts; UNKNOWN if no end is known, inf if never."""
        left = sorted(self.jobs_on[index].values(), key=_end)
        used, when = self.used[index], now
        while not (self.room(index, job, used, left) and self.throughput.allows_one_more(len(left))):
            if not left:
                return inf
            gone = left.pop(0)
            used -= self.need(index, gone.job)
            when = max(when, _end(gone))
        return when

    def fits_with(self, index: int, job: JobSpec, reserved: JobSpec, at: float) -> bool:
        """Whether a job may still run on a device when, at that time, the one that it is reserved for starts."""
        later = [run for run in self.jobs_on[index].values() if _end(run) > at]
        used = sum(self.need(index, run.job) for run in later) + self.need(index, job)
        with_it = [*later, PlacedJob(job, (index,), None)]
        return self.room(index, reserved, used, with_it) and self.throughput.allows_one_more(len(with_it))

    def possible(self, job: JobSpec) -> bool:
        """Whether a job would fit if all devices were empty."""
        counts = np.bincount(self._node[self._suits(job)], minlength=1)
        return bool(counts.max() >= job.degree)

    def free_times(self, job: JobSpec, now: float, among: Sequence[int] | None = None) -> list[tuple[float, int, int]]:
        """When each device will have room for a job, with the bytes used there and its index, soonest first.

        Of many devices only the likeliest are looked at: those that are empty soonest, or have most memory left.
        """
        suited = self._suits(job)
        places = np.flatnonzero(suited) if among is None else np.array([p for p in among if suited[p]], dtype=np.int64)
        if self.runs_alone(job):
            times = np.maximum(now, self._clear[places])
            return sorted((float(t), self.used[p], int(p)) for t, p in zip(times, places, strict=True))
        if len(places) > NEAR:
            soon = places[np.argsort(self._clear[places], kind="stable")[:NEAR]]
            roomy = places[np.argsort(-self._left[places], kind="stable")[:NEAR]]
            places = np.union1d(soon, roomy)
        return sorted((self.free_at(int(index), job, now), self.used[index], int(index)) for index in places)

    def _suits(self, job: JobSpec) -> NDArray[np.bool_]:
        """Devices on which a job fits when they are empty."""
        return self._there if job.memory is None else self._there & (self._whole >= job.memory)

    def runs_alone(self, job: JobSpec) -> bool:
        """A split job shares with none: it goes at the pace of its slowest device, and the others would wait."""
        return job.exclusive or job.degree > 1 or self.throughput.must_run_alone(job.kind)

    def _takes(self, index: int) -> bool:
        others, most = self.jobs_on[index], self.devices[index].max_jobs
        if most is not None and len(others) >= most:
            return False
        return self.throughput.allows_one_more(len(others)) and not any(
            self.runs_alone(run.job) for run in others.values()
        )

    def _changed(self, index: int) -> None:
        others, device = self.jobs_on[index].values(), self.devices[index]
        for run in others:
            run.rate = None
        self._counts[index] = len(others)
        self._left[index] = inf if device.memory is None else device.memory - device.reserve - self.used[index]
        self._clear[index] = max(map(_end, others), default=-inf)
        self._open[index] = self._takes(index)


def _end(run: PlacedJob) -> float:
    return UNKNOWN if run.ends is None else run.ends


def _rate(job: JobSpec, rate: float) -> JobRate:
    return JobRate(job.kind, rate, float(job.memory or 0) * (job.seconds or 1.0))


@dataclass(frozen=True, slots=True)
class DeviceCapacity:
    """How much one device can take at once. A device that is away has ``max_jobs=0``."""

    memory: int | None
    """Bytes; None: not counted."""
    node: str = "local"
    reserve: int = 0
    """Bytes that every process takes beside its job: on a GPU, the context."""
    max_jobs: int | None = None
    """How many jobs may run at once; None: as many as memory and their rates allow."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job that waits: what it takes of each of its devices, and for how long."""

    id: str
    memory: int | None
    """Bytes of each device; None: all of it."""
    degree: int = 1
    """Devices, all of one node."""
    seconds: float | None = None
    """That it takes by itself, where that can be said."""
    exclusive: bool = False
    """Whether it shares a device with no other."""
    kind: str = ""
    """Jobs of one architecture, whose rates can be compared."""

    @property
    def work(self) -> float:
        """Seconds that it takes, on all its devices together; 0 where that cannot be said."""
        return (self.seconds or 0.0) * self.degree

    def __post_init__(self) -> None:
        if self.degree < 1 or (self.memory is not None and self.memory < 0):
            raise TuneError(
                f"job '{self.id}' needs a degree of at least 1 and no fewer than 0 bytes; "
                f"it has {self.degree} and {self.memory}"
            )
        if self.seconds is not None and not self.seconds >= 0:
            raise TuneError(f"job '{self.id}' takes at least 0 s, not {self.seconds}")


@dataclass(slots=True)
class PlacedJob:
    """A job on its devices. ``ends`` is when it should, if known; ``rate`` its speed beside the present others."""

    job: JobSpec
    places: tuple[int, ...]
    ends: float | None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices reserved for the largest job that cannot start yet, and when it should; ``at`` None: not known."""

    job: JobSpec
    places: tuple[int, ...]
    at: float | None
