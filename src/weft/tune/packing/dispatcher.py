"""The devices of an executor, and which waiting jobs start on them now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from weft.tune.devices import processors, reserve
from weft.tune.jobs import Device, Executor, Job, PendingJob
from weft.tune.packing.packer import Packer, Placement
from weft.tune.packing.pool import DeviceCapacity, JobSpec


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
