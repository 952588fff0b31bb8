"""The devices of an executor, and which waiting tasks start on them now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from weft.tune.devices import processors, reserve
from weft.tune.jobs import Device, Executor, Job
from weft.tune.packing.packer import Packer, Placement
from weft.tune.packing.pool import DeviceCapacity, JobSpec
from weft.tune.pending import PendingJob


class Dispatcher:
    """Keeps a packer up to date: with devices that come and go, with what starts, ends, and how fast it is.

    ``workers`` is the most jobs at once on a device; without it there is one a core of the host, which has to feed
    them (two threads of one core launch no more than one), and one in all on a GPU if trials do not say what they take
    (not ``counted``).
    """

    def __init__(self, executor: Executor, workers: int | None, counted: bool) -> None:
        self._executor, self._workers, self._counted = executor, workers, counted
        self.devices = tuple(executor.devices)
        self._packer = Packer([self._capacity(device) for device in self.devices])
        self._moved = [0.0] * len(self.devices)

    def seats(self) -> int:
        """How many jobs run at once at most."""
        return sum(device.most or 0 for device in self.capacities)

    @property
    def capacities(self) -> tuple[DeviceCapacity, ...]:
        """How much each device takes at once."""
        return self._packer.devices

    def changed(self) -> bool:
        """Whether devices came or went since the last look; the packer knows them from here on."""
        now = tuple(self._executor.devices)
        if now == self.devices:
            return False
        self._moved += [0.0] * (len(now) - len(self.devices))
        self.devices = now
        self._packer.change([self._capacity(device) for device in now])
        return True

    def shares(self, memory: int) -> bool:
        """Whether some device has room for a job of so many bytes beside what its process takes."""
        return any(device.memory is None or memory + reserve(device) <= device.memory for device in self.devices)

    def impossible(self, tasks: Mapping[str, PendingJob]) -> list[str]:
        """Those that no device could ever run; none while some are away, since they may come back."""
        if any(device.gone for device in self.devices):
            return []
        return [id for id, task in tasks.items() if not self._packer.possible(load_of(task))]

    def admit(self, tasks: Mapping[str, PendingJob]) -> Iterable[Placement]:
        """The tasks that start now and where; first those that lost their process, which were promised to go on."""
        again = [load_of(task) for task in tasks.values() if task.lost]
        found = self._packer.admit(again, time.monotonic()) if again else []
        placed = {id for id, _ in found}
        found += self._packer.admit([load_of(task) for id, task in tasks.items() if id not in placed], time.monotonic())
        for _, places in found:
            self._company(places)
        return found

    def left(self, job: Job) -> None:
        self._packer.ended(job.id)
        self._company(job.devices)

    def measured(self, job: Job, steps: int, since: float, now: float) -> None:
        """A job did so many steps; it counts if nothing started or ended beside it meanwhile."""
        if since >= max(self._moved[place] for place in job.devices):
            self._packer.measured(job.id, steps / max(now - since, 1e-9))

    def _capacity(self, device: Device) -> DeviceCapacity:
        most = 0 if device.gone else self._workers
        if most is None:
            threads, cores = processors()
            if device.name == "cpu":
                most = threads
            else:
                beside = sum(other.node == device.node for other in self._executor.devices)
                most = max(1, cores // beside) if self._counted else 1
        return DeviceCapacity(device.memory if self._counted else None, device.node, reserve(device), most)

    def _company(self, places: Iterable[int]) -> None:
        for place in places:
            self._moved[place] = time.monotonic()


def load_of(task: PendingJob) -> JobSpec:
    need = task.need
    return JobSpec(task.id, task.memory, need.devices, need.seconds, task.alone, kind=need.architecture_key)
