"""Devices with the jobs on them: where one more has room, when, and whether it is worth while."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

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
            self.jobs_on[index][run.job.id] = run
            self.used[index] += self.need(index, run.job)
            self._changed(index)

    def leave(self, run: PlacedJob) -> None:
        for index in run.places:
            del self.jobs_on[index][run.job.id]
            self.used[index] -= self.need(index, run.job)
            self._changed(index)

    def rates_on(self, index: int) -> list[JobRate] | None:
        """The rates of the jobs on a device; None unless each was measured since the last came or went."""
        runs = self.jobs_on[index].values()
        rates = [
            JobRate(run.job.kind, run.rate, float(run.job.memory or 0) * (run.job.seconds or 1.0))
            for run in runs
            if run.rate is not None
        ]
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


# How much work a device does when jobs share it, and whether one more is worth while.

RECENT = 8
TWICE = 2


@dataclass(frozen=True, slots=True)
class JobRate:
    """What one job did beside others: its rate, in a unit that is the same for all of its kind, such as steps/s."""

    kind: str
    rate: float
    size: float


class ThroughputModel:
    """Learns from measured rates how many jobs at once raise the throughput, and which kinds must run alone.

    The speed of a job is its rate divided by the best rate of its kind, so 1 is as alone. The throughput of a device is
    the sum of its jobs' speeds. One more job is worth while if it raised the sum by ``gain``; once it did, it stays
    allowed until it lowers the sum (so that noise does not flip it), and once it did not, it is tried again only
    after ``again`` further measurements.
    """

    def __init__(self, gain: float = 0.05, again: int = 32) -> None:
        self.gain, self.again = gain, again
        self._best: dict[str, float] = {}
        self._measured: dict[int, deque[tuple[JobRate, ...]]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._allowed = 1
        self._refused: dict[int, int] = {}
        self._slowed_others: dict[str, int] = defaultdict(int)
        self.count = 0

    def add(self, rates: Sequence[JobRate]) -> None:
        """The rates of all the jobs of one device, measured while these and no others ran on it."""
        for rate in rates:
            self._best[rate.kind] = max(self._best.get(rate.kind, 0.0), rate.rate)
        self.count += 1
        self._measured[len(rates)].append(tuple(rates))
        if len(rates) > 1 and self._total(rates) < 1.0 - self.gain:
            # Worse than one after another: the largest is what slows the others.
            self._slowed_others[max(rates, key=lambda rate: (rate.size, rate.kind)).kind] += 1
        self._update(len(rates))

    def speed(self, count: int) -> float | None:
        """The throughput of so many jobs, the mean of recent measurements; None: never measured."""
        seen = self._measured.get(count)
        return sum(map(self._total, seen)) / len(seen) if seen else None

    def allows_one_more(self, count: int) -> bool:
        """Whether a device that runs so many jobs should get one more."""
        # A count that added nothing is tried again after a while, and no larger one before it does add something.
        return count == 0 or not any(
            more <= count or (more == count + 1 and self.count - when < self.again)
            for more, when in self._refused.items()
        )

    def must_run_alone(self, kind: str) -> bool:
        """Whether a kind slowed the others below one after another, twice."""
        return self._slowed_others.get(kind, 0) >= TWICE

    def slowdown(self, count: int) -> float:
        """How many times as long a job should take among so many: 1 where nothing is known."""
        speed = self.speed(count)
        return max(count / speed, 1.0) if speed else 1.0

    def _update(self, count: int) -> None:
        here, fewer = self.speed(count), [n for n in self._measured if n < count]
        if here is None or not fewer:
            return
        before = self.speed(max(fewer)) or 0.0
        needed = before if count <= self._allowed else before * (1.0 + self.gain)
        if here < needed:
            self._refused[count] = self.count
            self._allowed = min(self._allowed, count - 1)
        else:
            self._refused.pop(count, None)
            self._allowed = max(self._allowed, count)

    def _total(self, rates: Sequence[JobRate]) -> float:
        return sum(rate.rate / self._best[rate.kind] if self._best[rate.kind] else 0.0 for rate in rates)
