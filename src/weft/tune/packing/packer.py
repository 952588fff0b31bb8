"""Which waiting loads start now, and on which devices: by memory, by what sharing costs, largest first with backfill.

    device 0  |######## first ########|                 The largest that waits does not fit yet: where it will
    device 1  |# small #|~ small ~|    |#### largest ##  is held from then on. Smaller ones start there
                                      ^ held at         if they end before, or fit beside it.

Where a trial is placed changes how long it takes, never what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from weft.tune.packing.pool import UNKNOWN, DeviceCapacity, DevicePool, JobSpec, Reservation, Running
from weft.tune.packing.throughput import ThroughputModel

__all__ = ["DeviceCapacity", "JobSpec", "Packer", "Placement"]

Placement = tuple[str, tuple[int, ...]]
PRESSING = 0.5
"""The part of the time that all devices still need at least, from which on a load is started before larger ones."""
MANY = 16
FAILED = 3  # of the last that found no place are remembered, so that others like them are not tried


class Packer:
    """Steps by events: ``admit`` when loads wait, ``ended`` when one is done, ``measured`` when its rate is known.

    Deterministic in its inputs; it reads no clock. Safety: the loads of a device, with a reserve each, never need more
    than its memory, and one that is ``alone``, or split, shares with none. Progress: a load that fits on empty devices
    starts in the end, since one that more than ``patience`` later ones overtook goes first and its place is held.
    """

    def __init__(
        self, devices: Sequence[DeviceCapacity], *, sharing: ThroughputModel | None = None, patience: int | None = None
    ) -> None:
        self.sharing = sharing or ThroughputModel()
        self.running: dict[str, Running] = {}
        self.held: Reservation | None = None
        self._waiting = JobQueue(max(16, len(devices)) if patience is None else patience)
        self._floor = DevicePool(devices, self.sharing)
        self._under_way = (0.0, 0.0)

    @property
    def devices(self) -> tuple[DeviceCapacity, ...]:
        return self._floor.devices

    def change(self, devices: Sequence[DeviceCapacity]) -> None:
        """Devices came or went; what runs keeps its places."""
        self._floor = DevicePool(devices, self.sharing, self.running.values())
        self.held = None

    def possible(self, load: JobSpec) -> bool:
        """Whether a load would fit on the devices if they were empty."""
        return self._floor.possible(load)

    def admit(self, waiting: Iterable[JobSpec], now: float = 0.0) -> list[Placement]:
        """Of all that wait, the loads that start now, in order, with their devices; they count as running from here on.

        One that fits nowhere is passed over. ``now`` is in the seconds of the loads, from any origin.
        """
        self._waiting.set(load for load in waiting if load.id not in self.running)
        self._waiting.round += 1
        started: list[Placement] = []
        blocked, (before, self.held) = False, (self.held, None)
        failed: list[JobSpec] = []
        due, free = self._waiting.due(), self._floor.most_free()
        promised = [before.load.id] if before is not None and before.load.id in self._waiting else []
        for load in self._waiting.order([*due, *promised, *self._pressing(now)]):
            if blocked and ((load.memory or 0) > free or self._hopeless(load, failed)):
                continue
            places = self._find(load, now)
            if places is not None:
                self.placed(load, places, now)
                started.append((load.id, places))
                free = self._floor.most_free()
            elif blocked:
                failed = [load, *failed[:FAILED]]
            elif self.possible(load):
                blocked, self.held = True, self._hold(load, before, now, load.id in due)
            if blocked and free < 0:
                break
        return started

    def placed(self, load: JobSpec, places: Sequence[int], now: float = 0.0) -> None:
        """A load runs there, whoever decided it; nothing changes for one that ``admit`` placed."""
        if load.id in self.running:
            return
        self._waiting.remove(load.id, started=True)
        count = max((len(self._floor.on[place]) for place in places), default=0) + 1
        ends = None if load.seconds is None else now + load.seconds * self.sharing.slowdown(count)
        run = self.running[load.id] = Running(load, tuple(places), ends)
        self._floor.enter(run)
        self._count(run, 1)

    def ended(self, id: str) -> None:
        """A load is gone: done, failed, stopped or lost. One that only waited waits no more."""
        self._waiting.remove(id)
        if (run := self.running.pop(id, None)) is not None:
            self._floor.leave(run)
            self._count(run, -1)

    def measured(self, id: str, rate: float) -> None:
        """What a load does now, in a unit that is the same for all of its kind, such as steps a second."""
        if (run := self.running.get(id)) is None:
            return
        run.rate = rate
        for place in run.places:
            if (company := self._floor.company(place)) is not None:
                self.sharing.observed(company)

    def _pressing(self, now: float) -> list[str]:
        """Those that would end after all the rest if they began later, by the work that is left for all devices."""
        pace, ends = self._under_way
        left = (self._waiting.work() + max(0.0, ends - pace * now)) / max(1, self._floor.present())
        return self._waiting.pressing(PRESSING * left, MANY) if left > 0 else []

    def _count(self, run: Running, sign: int) -> None:
        # What is left of a load is its pace x (its end - now): a sum of these needs no look at every one of them.
        if run.ends is not None:
            pace = float(sign * run.load.degree)
            self._under_way = (self._under_way[0] + pace, self._under_way[1] + pace * run.ends)

    def _find(self, load: JobSpec, now: float) -> tuple[int, ...] | None:
        """The least busy devices that have room, of those the tightest; for a split load, on the fullest node."""
        fit = self._floor.fit(load)
        if self.held is not None and any(place in self.held.places for place in fit):
            fit = [place for place in fit if self._lets(place, load, now)]
        if load.degree == 1:
            return (fit[0],) if fit else None
        nodes: dict[str, list[int]] = {}
        for place in fit:
            nodes.setdefault(self._floor.devices[place].node, []).append(place)
        enough = [places for places in nodes.values() if len(places) >= load.degree]
        return tuple(min(enough, key=len)[: load.degree]) if enough else None

    def _lets(self, place: int, load: JobSpec, now: float) -> bool:
        """Whether a load may start on a device without delaying the one that it is held for, if it is."""
        held = self.held
        if held is None or place not in held.places:
            return True
        if held.at is None:
            return False
        slowdown = self.sharing.slowdown(len(self._floor.on[place]) + 1)
        if load.seconds is not None and now + load.seconds * slowdown <= held.at:
            return True
        return self._floor.beside(place, load, held.load, held.at)

    def _hold(self, load: JobSpec, before: Reservation | None, now: float, due: bool) -> Reservation | None:
        """Where and when a load could start if nothing else did; the devices stay the same while it heads the queue.

        Where nobody knows when loads end, a place is held only for one that is due.
        """
        same = before.places if before is not None and before.load.id == load.id else None
        nodes: dict[str, list[tuple[float, int, int]]] = {}
        for opening in self._floor.openings(load, now, same):
            nodes.setdefault(self._floor.devices[opening[2]].node, []).append(opening)
        best: tuple[float, int, tuple[int, ...]] | None = None
        for openings in nodes.values():
            chosen = openings[: load.degree]
            if len(chosen) == load.degree and chosen[-1][0] < inf:
                at = (chosen[-1][0], sum(used for _, used, _ in chosen), tuple(place for *_, place in chosen))
                best = at if best is None else min(best, at)
        if best is None or (best[0] >= UNKNOWN and not due):
            return None
        return Reservation(load, best[2], best[0] if best[0] < UNKNOWN else None)

    def _hopeless(self, load: JobSpec, failed: Sequence[JobSpec]) -> bool:
        """Whether a load asks for no less than one that found no place; devices only fill while loads are admitted."""
        return any(
            load.degree >= other.degree
            and (load.memory is None or (other.memory is not None and load.memory >= other.memory))
            and (load.seconds is None or (other.seconds is not None and load.seconds >= other.seconds))
            and (self._floor.alone(load) or not self._floor.alone(other))
            for other in failed
        )


# What waits, in the order in which it should start: the largest first, and before it whoever waited too long.

SMALL = 0.2


class JobQueue:
    """Loads by size, as ``_size`` has it; those of one size in the order in which they came.

    A load is overtaken by every one that came later and started sooner; after more than ``patience`` of them it is due.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.round = 0
        self._loads: dict[str, JobSpec] = {}
        self._sorted: list[JobSpec] | None = None
        self._longest: list[JobSpec] | None = None
        self._work = 0.0
        self._came: dict[str, int] = {}
        self._starts: dict[int, int] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._loads

    def set(self, loads: Iterable[JobSpec]) -> None:
        """These wait, and no others; those that waited before keep their turn."""
        given = {load.id: load for load in loads}
        for id, load in list(self._loads.items()):
            if id not in given:
                self.remove(id)
            elif given[id] is not load and given[id] != load:
                self._work += given[id].work - load.work
                self._loads[id], self._sorted, self._longest = given[id], None, None
        for id, load in given.items():
            if id not in self._loads:
                self._loads[id], self._came[id] = load, self.round
                self._sorted = self._longest = None
                self._work += load.work

    def remove(self, id: str, started: bool = False) -> None:
        load = self._loads.pop(id, None)
        if load is not None:
            self._work -= load.work
            came = self._came.pop(id)
            if started:
                self._starts[came] = self._starts.get(came, 0) + 1

    def due(self) -> list[str]:
        """Those that too many later ones overtook, in the order in which they came."""
        oldest = min(self._came.values(), default=self.round)
        self._starts = {came: count for came, count in self._starts.items() if came > oldest}
        if sum(self._starts.values()) <= self.patience:
            return []
        return [id for id, came in self._came.items() if self._later(came) > self.patience]

    def work(self) -> float:
        """Seconds that all of them take on all their devices, as far as that can be said."""
        return self._work

    def pressing(self, seconds: float, most: int) -> list[str]:
        """Those that take no less than this, the longest first; so many at most."""
        if self._longest is None:
            known = (load for load in self._loads.values() if load.seconds is not None)
            self._longest = sorted(known, key=lambda load: (load.seconds or 0.0, load.memory or 0))
        while self._longest and self._longest[-1].id not in self._loads:
            self._longest.pop()  # it went since the list was sorted
        found: list[str] = []
        for load in reversed(self._longest):
            if (load.seconds or 0.0) < seconds or len(found) == most:
                break
            if load.id in self._loads:
                found.append(load.id)
        return found

    def order(self, due: Iterable[str]) -> Iterator[JobSpec]:
        """These first, then the largest."""
        if self._sorted is None:
            known = [load.seconds for load in self._loads.values() if load.seconds is not None]
            usual = sum(known) / len(known) if known else 1.0
            most = max((load.memory or 0 for load in self._loads.values()), default=0)
            self._sorted = sorted(self._loads.values(), key=lambda load: -_size(load, usual, most))
        if len(self._sorted) > 2 * len(self._loads):
            self._sorted = [load for load in self._sorted if load.id in self._loads]
        first = {id: self._loads[id] for id in due}
        yield from first.values()
        # Those that went since the list was sorted are passed over.
        yield from (load for load in self._sorted if load.id in self._loads and load.id not in first)

    def _later(self, came: int) -> int:
        return sum(count for other, count in self._starts.items() if other > came)


def _size(load: JobSpec, usual: float, most: int) -> float:
    """Seconds x devices x memory, and a fifth of the most memory that any asks for: what is small but long should not
    begin last. Of unknown length, as long as others; of unknown memory, as large as the largest."""
    memory = max(most, 1) if load.memory is None else load.memory
    return (memory + SMALL * max(most, 1)) * (usual if load.seconds is None else load.seconds) * load.degree
