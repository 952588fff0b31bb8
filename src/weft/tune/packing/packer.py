"""Which waiting jobs start now, and on which devices: by memory and throughput, largest first, with backfill.

    device 0  |######## first ########|                 The largest job that waits does not fit yet: a device is
    device 1  |# small #|~ small ~|    |#### largest ##  reserved for it. Smaller ones start there if they end
                                      ^ reserved at     before it starts, or fit beside it.

Where a trial runs changes how long it takes, never its result.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from weft.tune.devices import processors, reserve
from weft.tune.jobs import Device, Executor, Job, PendingJob
from weft.tune.packing.pool import (
    UNKNOWN,
    DeviceCapacity,
    DevicePool,
    JobSpec,
    PlacedJob,
    Reservation,
    ThroughputModel,
)

Placement = tuple[str, tuple[int, ...]]
CRITICAL = 0.5
"""A job that takes at least this part of the time that all devices still need starts before larger ones."""
MAX_CRITICAL = 16
REMEMBERED = 3
"""Of the last jobs that found no device, so that others like them are not tried."""


class Packer:
    """Steps by events: ``admit`` when jobs wait, ``ended`` when one is done, ``measured`` when its rate is known.

    Deterministic in its inputs; it reads no clock. Safety: the jobs of a device, with a reserve each, never need more
    than its memory, and one that is ``exclusive``, or split, shares with none. Progress: a job that fits on empty
    devices starts in the end, since one that more than ``max_overtakes`` later ones overtook goes first and its devices
    are reserved.
    """

    def __init__(
        self,
        devices: Sequence[DeviceCapacity],
        *,
        throughput: ThroughputModel | None = None,
        max_overtakes: int | None = None,
    ) -> None:
        self.throughput = throughput or ThroughputModel()
        self.running: dict[str, PlacedJob] = {}
        self.reservation: Reservation | None = None
        self._waiting = JobQueue(max(16, len(devices)) if max_overtakes is None else max_overtakes)
        self._pool = DevicePool(devices, self.throughput)
        self._under_way = (0.0, 0.0)

    @property
    def devices(self) -> tuple[DeviceCapacity, ...]:
        return self._pool.devices

    def change(self, devices: Sequence[DeviceCapacity]) -> None:
        """Devices came or went; what runs keeps its devices."""
        self._pool = DevicePool(devices, self.throughput, self.running.values())
        self.reservation = None

    def possible(self, job: JobSpec) -> bool:
        """Whether a job would fit on the devices if they were empty."""
        return self._pool.possible(job)

    def admit(self, waiting: Iterable[JobSpec], now: float = 0.0) -> list[Placement]:
        """Of all that wait, the jobs that start now, in order, with their devices; they count as running from here on.

        One that fits nowhere is passed over. ``now`` is in the seconds of the jobs, from any origin.
        """
        self._waiting.set(job for job in waiting if job.id not in self.running)
        self._waiting.round += 1
        started: list[Placement] = []
        blocked, before, self.reservation = False, self.reservation, None
        failed: list[JobSpec] = []
        starved, free = self._waiting.starved(), self._pool.most_free()
        reserved = [before.job.id] if before is not None and before.job.id in self._waiting else []
        for job in self._waiting.order([*starved, *reserved, *self._critical(now)]):
            if blocked and ((job.memory or 0) > free or self._cannot_start(job, failed)):
                continue
            places = self._find(job, now)
            if places is not None:
                self.placed(job, places, now)
                started.append((job.id, places))
                free = self._pool.most_free()
            elif blocked:
                failed = [job, *failed[:REMEMBERED]]
            elif self.possible(job):
                blocked, self.reservation = True, self._reserve(job, before, now, job.id in starved)
            if blocked and free < 0:
                break
        return started

    def placed(self, job: JobSpec, places: Sequence[int], now: float = 0.0) -> None:
        """A job runs there, though ``admit`` did not place it."""
        if job.id in self.running:
            return
        self._waiting.remove(job.id, started=True)
        count = max((len(self._pool.jobs_on[place]) for place in places), default=0) + 1
        ends = None if job.seconds is None else now + job.seconds * self.throughput.slowdown(count)
        run = self.running[job.id] = PlacedJob(job, tuple(places), ends)
        self._pool.enter(run)
        self._count(run, 1)

    def ended(self, id: str) -> None:
        """A job is gone: done, failed, stopped or lost. One that only waited waits no more."""
        self._waiting.remove(id)
        if (run := self.running.pop(id, None)) is not None:
            self._pool.leave(run)
            self._count(run, -1)

    def measured(self, id: str, rate: float) -> None:
        """The rate of a job now, in a unit that is the same for all of its kind, such as steps a second."""
        if (run := self.running.get(id)) is None:
            return
        run.rate = rate
        for place in run.places:
            if (rates := self._pool.rates_on(place)) is not None:
                self.throughput.add(rates)

    def _critical(self, now: float) -> list[str]:
        """Those that would end after all the rest if they began later, by the work that is left for all devices."""
        pace, ends = self._under_way
        left = (self._waiting.work + max(0.0, ends - pace * now)) / max(1, self._pool.present())
        return self._waiting.critical(CRITICAL * left, MAX_CRITICAL) if left > 0 else []

    def _count(self, run: PlacedJob, sign: int) -> None:
        # What is left of a job is its pace x (its end - now): a sum of these needs no look at every one of them.
        if run.ends is not None:
            pace = float(sign * run.job.degree)
            self._under_way = (self._under_way[0] + pace, self._under_way[1] + pace * run.ends)

    def _find(self, job: JobSpec, now: float) -> tuple[int, ...] | None:
        """The least busy devices that have room, of those the tightest; for a split job, on the fullest node."""
        fit = self._pool.fit(job)
        if self.reservation is not None and any(place in self.reservation.places for place in fit):
            fit = [place for place in fit if self._may_backfill(place, job, now)]
        if job.degree == 1:
            return (fit[0],) if fit else None
        nodes: dict[str, list[int]] = {}
        for place in fit:
            nodes.setdefault(self._pool.devices[place].node, []).append(place)
        enough = [places for places in nodes.values() if len(places) >= job.degree]
        return tuple(min(enough, key=len)[: job.degree]) if enough else None

    def _may_backfill(self, place: int, job: JobSpec, now: float) -> bool:
        """Whether a job may start on a device without delaying the one that it is reserved for, if it is."""
        reserved = self.reservation
        if reserved is None or place not in reserved.places:
            return True
        if reserved.at is None:
            return False
        slowdown = self.throughput.slowdown(len(self._pool.jobs_on[place]) + 1)
        if job.seconds is not None and now + job.seconds * slowdown <= reserved.at:
            return True
        return self._pool.fits_with(place, job, reserved.job, reserved.at)

    def _reserve(self, job: JobSpec, before: Reservation | None, now: float, starved: bool) -> Reservation | None:
        """Where and when a job could start if nothing else did; the devices stay the same while it heads the queue.

        Where no ends are known, devices are reserved only for one that is starved.
        """
        same = before.places if before is not None and before.job.id == job.id else None
        nodes: dict[str, list[tuple[float, int, int]]] = {}
        for free_time in self._pool.free_times(job, now, same):
            nodes.setdefault(self._pool.devices[free_time[2]].node, []).append(free_time)
        best: tuple[float, int, tuple[int, ...]] | None = None
        for free_times in nodes.values():
            chosen = free_times[: job.degree]
            if len(chosen) == job.degree and chosen[-1][0] < inf:
                at = (chosen[-1][0], sum(used for _, used, _ in chosen), tuple(place for *_, place in chosen))
                best = at if best is None else min(best, at)
        if best is None or (best[0] >= UNKNOWN and not starved):
            return None
        return Reservation(job, best[2], best[0] if best[0] < UNKNOWN else None)

    def _cannot_start(self, job: JobSpec, failed: Sequence[JobSpec]) -> bool:
        """Whether a job asks for no less than one that found no device; devices only fill while jobs are admitted."""
        return any(
            job.degree >= other.degree
            and (job.memory is None or (other.memory is not None and job.memory >= other.memory))
            and (job.seconds is None or (other.seconds is not None and job.seconds >= other.seconds))
            and (self._pool.runs_alone(job) or not self._pool.runs_alone(other))
            for other in failed
        )


MEMORY_FLOOR = 0.2


class JobQueue:
    """Waiting jobs by size, as ``_size`` has it; those of one size in the order in which they came.

    A job is overtaken by every one that came later and started sooner; after more than ``max_overtakes`` it is starved.
    """

    def __init__(self, max_overtakes: int) -> None:
        self.max_overtakes = max_overtakes
        self.round = 0
        self._jobs: dict[str, JobSpec] = {}
        self._sorted: list[JobSpec] | None = None
        self._longest: list[JobSpec] | None = None
        self.work = 0.0
        """Seconds that all of them take on all their devices, as far as that can be said."""
        self._came: dict[str, int] = {}
        self._starts: dict[int, int] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._jobs

    def set(self, jobs: Iterable[JobSpec]) -> None:
        """These wait, and no others; those that waited before keep their turn."""
        given = {job.id: job for job in jobs}
        for id, job in list(self._jobs.items()):
            if id not in given:
                self.remove(id)
            elif given[id] is not job and given[id] != job:
                self.work += given[id].work - job.work
                self._jobs[id], self._sorted, self._longest = given[id], None, None
        for id, job in given.items():
            if id not in self._jobs:
                self._jobs[id], self._came[id] = job, self.round
                self._sorted = self._longest = None
                self.work += job.work

    def remove(self, id: str, started: bool = False) -> None:
        job = self._jobs.pop(id, None)
        if job is not None:
            self.work -= job.work
            came = self._came.pop(id)
            if started:
                self._starts[came] = self._starts.get(came, 0) + 1

    def starved(self) -> list[str]:
        """Those that too many later ones overtook, in the order in which they came."""
        oldest = min(self._came.values(), default=self.round)
        self._starts = {came: count for came, count in self._starts.items() if came > oldest}
        if sum(self._starts.values()) <= self.max_overtakes:
            return []
        return [id for id, came in self._came.items() if self._later(came) > self.max_overtakes]

    def critical(self, seconds: float, most: int) -> list[str]:
        """Those that take no less than this, the longest first; so many at most."""
        if self._longest is None:
            known = (job for job in self._jobs.values() if job.seconds is not None)
            self._longest = sorted(known, key=lambda job: (job.seconds or 0.0, job.memory or 0))
        while self._longest and self._longest[-1].id not in self._jobs:
            self._longest.pop()  # it went since the list was sorted
        found: list[str] = []
        for job in reversed(self._longest):
            if (job.seconds or 0.0) < seconds or len(found) == most:
                break
            if job.id in self._jobs:
                found.append(job.id)
        return found

    def order(self, first: Iterable[str]) -> Iterator[JobSpec]:
        """These first, then the largest."""
        if self._sorted is None:
            known = [job.seconds for job in self._jobs.values() if job.seconds is not None]
            usual = sum(known) / len(known) if known else 1.0
            most = max((job.memory or 0 for job in self._jobs.values()), default=0)
            self._sorted = sorted(self._jobs.values(), key=lambda job: -_size(job, usual, most))
        if len(self._sorted) > 2 * len(self._jobs):
            self._sorted = [job for job in self._sorted if job.id in self._jobs]
        ahead = {id: self._jobs[id] for id in first}
        yield from ahead.values()
        # Those that went since the list was sorted are passed over.
        yield from (job for job in self._sorted if job.id in self._jobs and job.id not in ahead)

    def _later(self, came: int) -> int:
        return sum(count for other, count in self._starts.items() if other > came)


def _size(job: JobSpec, usual: float, most: int) -> float:
    """Seconds x devices x memory, and a fifth of the most memory that any asks for: what is small but long should not
    begin last. Of unknown length, as long as others; of unknown memory, as large as the largest."""
    memory = max(most, 1) if job.memory is None else job.memory
    return (memory + MEMORY_FLOOR * max(most, 1)) * (usual if job.seconds is None else job.seconds) * job.degree


# The devices of an executor, as a packer sees them.


class Dispatcher:
    """Keeps a packer up to date: devices that come and go, jobs that start and end, and how fast they are.

    ``jobs_per_device`` is the most jobs at once on a device; without it there is one a core of the host, which has to
    launch their kernels (two threads of one core launch no more than one), and one in all on a GPU if the memory of
    trials is not known (not ``counted``).
    """

    def __init__(self, executor: Executor, jobs_per_device: int | None, counted: bool) -> None:
        self._executor, self._jobs_per_device, self._counted = executor, jobs_per_device, counted
        self.devices = tuple(executor.devices)
        self._packer = Packer([self._capacity(device) for device in self.devices])
        self._changed_at = [0.0] * len(self.devices)

    def slots(self) -> int:
        """How many jobs run at once at most."""
        return sum(device.max_jobs or 0 for device in self._packer.devices)

    def update_devices(self) -> bool:
        """Whether devices came or went since the last look; the packer knows them from here on."""
        now = tuple(self._executor.devices)
        if now == self.devices:
            return False
        self._changed_at += [0.0] * (len(now) - len(self.devices))
        self.devices = now
        self._packer.change([self._capacity(device) for device in now])
        return True

    def has_room_for(self, memory: int) -> bool:
        """Whether some device has room for a job of so many bytes beside what its process takes."""
        return any(one.memory is None or memory + one.reserve <= one.memory for one in self._packer.devices)

    def impossible(self, jobs: Mapping[str, PendingJob]) -> list[str]:
        """Those that no device could ever run; none while some are away, since they may come back."""
        if any(device.gone for device in self.devices):
            return []
        return [id for id, job in jobs.items() if not self._packer.possible(job_spec(job))]

    def admit(self, jobs: Mapping[str, PendingJob]) -> Iterable[Placement]:
        """The jobs that start now and where; first those that lost their process."""
        again = [job_spec(job) for job in jobs.values() if job.crashes]
        found = self._packer.admit(again, time.monotonic()) if again else []
        placed = {id for id, _ in found}
        found += self._packer.admit([job_spec(job) for id, job in jobs.items() if id not in placed], time.monotonic())
        for _, places in found:
            self._jobs_changed(places)
        return found

    def released(self, job: Job) -> None:
        self._packer.ended(job.id)
        self._jobs_changed(job.devices)

    def measured(self, job: Job, steps: int, since: float, now: float) -> None:
        """A job did so many steps; it counts if nothing started or ended beside it meanwhile."""
        if since >= max(self._changed_at[place] for place in job.devices):
            self._packer.measured(job.id, steps / max(now - since, 1e-9))

    def _capacity(self, device: Device) -> DeviceCapacity:
        most = 0 if device.gone else self._jobs_per_device
        if most is None:
            threads, cores = processors()
            if device.name == "cpu":
                most = threads
            else:
                beside = sum(other.node == device.node for other in self._executor.devices)
                most = max(1, cores // beside) if self._counted else 1
        return DeviceCapacity(device.memory if self._counted else None, device.node, reserve(device), most)

    def _jobs_changed(self, places: Iterable[int]) -> None:
        for place in places:
            self._changed_at[place] = time.monotonic()


def job_spec(pending: PendingJob) -> JobSpec:
    """What a job asks of its devices."""
    needs = pending.needs
    return JobSpec(
        pending.id, pending.memory, needs.devices, needs.seconds, pending.exclusive, kind=needs.architecture_key
    )
