"""The floor: what runs on which device, and where one more has room."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from weft.errors import TuneError
from weft.tune.packing.throughput import JobRate, ThroughputModel

UNKNOWN = 1e300
"""A time that nobody can tell, later than every one that somebody can."""
NEAR = 16
"""Devices that are looked at to find the one that opens first, where there are many."""


class DevicePool:
    """Devices by place, with the loads on them. It decides nothing.

    What is asked of all devices at once is kept in arrays: there may be a thousand.
    """

    def __init__(
        self, devices: Sequence[DeviceCapacity], sharing: ThroughputModel, running: Collection[Running] = ()
    ) -> None:
        self.devices, self.sharing = tuple(devices), sharing
        self.on: list[dict[str, Running]] = [{} for _ in self.devices]
        self.used = [0] * len(self.devices)
        self.nodes: dict[str, list[int]] = {}
        for place, device in enumerate(self.devices):
            self.nodes.setdefault(device.node, []).append(place)
        count = len(self.devices)
        self._counts, self._left = np.zeros(count, dtype=np.int64), np.zeros(count)
        self._open, self._clear = np.zeros(count, dtype=bool), np.zeros(count)
        self._there = np.array([device.most != 0 for device in self.devices], dtype=bool)
        self._whole = np.array([inf if d.memory is None else d.memory - d.reserve for d in self.devices], dtype=float)
        self._node = np.array([list(self.nodes).index(device.node) for device in self.devices], dtype=np.int64)
        self._seen = -1
        for place in range(count):
            self._changed(place)
        for run in running:
            self.enter(run)

    def present(self) -> int:
        """How many devices there are."""
        return int(self._there.sum())

    def enter(self, run: Running) -> None:
        for place in run.places:
            if place < len(self.devices):
                self.on[place][run.load.id] = run
                self.used[place] += self.need(place, run.load)
                self._changed(place)

    def leave(self, run: Running) -> None:
        for place in run.places:
            if place < len(self.devices) and self.on[place].pop(run.load.id, None) is not None:
                self.used[place] -= self.need(place, run.load)
                self._changed(place)

    def company(self, place: int) -> list[JobRate] | None:
        """What the loads of a device do together; None unless each was measured since the last came or went."""
        runs = self.on[place].values()
        shares = [_share(run.load, run.rate) for run in runs if run.rate is not None]
        return shares if len(shares) == len(runs) else None

    def need(self, place: int, load: JobSpec) -> int:
        device = self.devices[place]
        return (device.memory or 0) if load.memory is None else load.memory + device.reserve

    def most_free(self) -> float:
        """The most bytes that a load may ask for and start now, as far as memory goes; below 0 if none may start."""
        if self._seen != self.sharing.count:  # what was measured may have opened or closed any
            self._seen = self.sharing.count
            for place in range(len(self.devices)):
                self._open[place] = self._takes(place)
        return float(self._left[self._open].max(initial=-1.0))

    def fit(self, load: JobSpec) -> list[int]:
        """The devices on which a load may start now: the fewest loads first, then the least memory."""
        fits = self._open & (self._left >= (0 if load.memory is None else load.memory))
        if self.alone(load) or load.memory is None:
            fits &= (self._counts == 0) | ((load.memory is None) & (self._left == inf) & (not self.alone(load)))
        places = np.flatnonzero(fits)
        ranked = np.lexsort((places, self._left[places], self._counts[places]))
        return [int(place) for place in places[ranked]]

    def room(self, place: int, load: JobSpec, used: int, company: Collection[Running]) -> bool:
        """Whether a device on which this company uses so many bytes has room for one more."""
        device = self.devices[place]
        if device.memory is not None and used + self.need(place, load) > device.memory:
            return False
        if device.most is not None and len(company) >= device.most:
            return False
        return not company or not (self.alone(load) or any(self.alone(run.load) for run in company))

    def opens(self, place: int, load: JobSpec, now: float) -> float:
        """When a device will have room for a load if nothing else starts; UNKNOWN if none can say, inf if never."""
        left = sorted(self.on[place].values(), key=_end)
        used, when = self.used[place], now
        while not (self.room(place, load, used, left) and self.sharing.worth(len(left))):
            if not left:
                return inf
            gone = left.pop(0)
            used -= self.need(place, gone.load)
            when = max(when, _end(gone))
        return when

    def beside(self, place: int, load: JobSpec, kept: JobSpec, at: float) -> bool:
        """Whether a load may still run on a device when, at that time, the one that it is kept for starts."""
        later = [run for run in self.on[place].values() if _end(run) > at]
        used = sum(self.need(place, run.load) for run in later) + self.need(place, load)
        with_it = [*later, Running(load, (place,), None)]
        return self.room(place, kept, used, with_it) and self.sharing.worth(len(with_it))

    def possible(self, load: JobSpec) -> bool:
        """Whether a load would fit if all were empty."""
        counts = np.bincount(self._node[self._suits(load)], minlength=1)
        return bool(counts.max() >= load.degree)

    def openings(self, load: JobSpec, now: float, among: Sequence[int] | None = None) -> list[tuple[float, int, int]]:
        """When each device will have room for a load, with the bytes used there and its place, soonest first.

        Of many devices only the likeliest are looked at: those that are empty soonest, or have most memory left.
        """
        suited = self._suits(load)
        places = np.flatnonzero(suited) if among is None else np.array([p for p in among if suited[p]], dtype=np.int64)
        if self.alone(load):
            times = np.maximum(now, self._clear[places])
            return sorted((float(t), self.used[p], int(p)) for t, p in zip(times, places, strict=True))
        if len(places) > NEAR:
            soon = places[np.argsort(self._clear[places], kind="stable")[:NEAR]]
            roomy = places[np.argsort(-self._left[places], kind="stable")[:NEAR]]
            places = np.union1d(soon, roomy)
        return sorted((self.opens(int(place), load, now), self.used[place], int(place)) for place in places)

    def _suits(self, load: JobSpec) -> NDArray[np.bool_]:
        """Devices on which a load fits when they are empty."""
        return self._there if load.memory is None else self._there & (self._whole >= load.memory)

    def alone(self, load: JobSpec) -> bool:
        """A split load shares with none: it goes at the pace of its slowest device, and the others would wait."""
        return load.alone or load.degree > 1 or self.sharing.alone(load.kind)

    def _takes(self, place: int) -> bool:
        company, most = self.on[place], self.devices[place].most
        if most is not None and len(company) >= most:
            return False
        return self.sharing.worth(len(company)) and not any(self.alone(run.load) for run in company.values())

    def _changed(self, place: int) -> None:
        company, device = self.on[place].values(), self.devices[place]
        for run in company:
            run.rate = None
        self._counts[place] = len(company)
        self._left[place] = inf if device.memory is None else device.memory - device.reserve - self.used[place]
        self._clear[place] = max(map(_end, company), default=-inf)
        self._open[place] = self._takes(place)


def _end(run: Running) -> float:
    return UNKNOWN if run.ends is None else run.ends


def _share(load: JobSpec, rate: float) -> JobRate:
    return JobRate(load.kind, rate, float(load.memory or 0) * (load.seconds or 1.0))


# What is packed: loads that wait for devices, and how much a device can take.


@dataclass(frozen=True, slots=True)
class DeviceCapacity:
    """How much one device can take at once. A device that is gone has ``most=0``."""

    memory: int | None
    """Bytes; None: not counted."""
    node: str = "local"
    reserve: int = 0
    """Bytes that every process takes beside its load: on a GPU, the context."""
    most: int | None = None
    """How many loads may run at once; None: as many as memory and their rates allow."""


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
    alone: bool = False
    """Whether it shares a device with no other."""
    kind: str = ""
    """Loads of one kind compute alike: their rates compare. A shape key does."""

    @property
    def work(self) -> float:
        """Seconds that it takes, on all its devices together; 0 where that cannot be said."""
        return (self.seconds or 0.0) * self.degree

    def __post_init__(self) -> None:
        if self.degree < 1 or (self.memory is not None and self.memory < 0):
            raise TuneError(
                f"load '{self.id}' needs a degree of at least 1 and no fewer than 0 bytes; "
                f"it has {self.degree} and {self.memory}"
            )
        if self.seconds is not None and not self.seconds >= 0:
            raise TuneError(f"load '{self.id}' takes at least 0 s, not {self.seconds}")


@dataclass(slots=True)
class Running:
    """A load on its devices. ``ends`` is when it should, if known; ``rate`` what it does in its present company."""

    load: JobSpec
    places: tuple[int, ...]
    ends: float | None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices kept for the largest load that cannot start yet, and when it should; ``at`` None: not known."""

    load: JobSpec
    places: tuple[int, ...]
    at: float | None
