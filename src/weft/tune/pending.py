"""A task: trials that train as one, from their proposal to their end; and the way in which a study runs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weft.tune.fit.fit import Requirements
from weft.tune.jobs import Job


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a study runs; none of it changes what comes out, but for ``memory`` and ``fuse``."""

    memory: int | None = None
    """Bytes: of a function's trial; of a recipe, the nominal memory of a device."""
    workers: int | None = None
    """The most jobs at once on a device."""
    fuse: int = 1
    retries: int = 3
    seconds: float | None = None


@dataclass(slots=True)
class PendingJob:
    """Trials that train as one, from their proposal to their end."""

    trials: dict[int, dict[str, Any]]
    """Those that have not ended, with their values."""
    need: Requirements
    job: Job | None = None
    attempts: int = 0
    lost: int = 0
    exceeded: int = 0
    alone: bool = False
    memory: int | None = None
    """Bytes to be admitted with; None: all of a device, or not counted."""
    floor: int = 0
    """Bytes that it is known to need more than."""
    pace: tuple[float, int] | None = None
    """When it last reported, and after which step."""
    id: str = field(default="")

    @property
    def whole(self) -> bool:
        """Whether it has its devices to itself, and may take all that was counted on."""
        return self.memory is None or self.need.devices > 1


def alike(task: PendingJob) -> dict[str, Any]:
    """By what its memory is corrected: what trials of its kind took, as many as train as one."""
    lanes = len(task.trials if task.job is None else task.job.trials)
    if not task.need.architecture_key:
        return {"shape": None, "family": None}
    family = "split" if task.need.devices > 1 else "alone" if lanes == 1 else "fused"
    return {"shape": f"{task.need.architecture_key} x{lanes}", "family": family}


def estimated(task: PendingJob) -> int | None:
    """Bytes of each device that the job should take, also of one that has its devices to itself."""
    if task.memory is not None or task.need.memory is None:
        return task.memory
    return task.need.memory_of(len(task.trials))


def job_of_task(task: PendingJob) -> Job:
    """The attempt that runs."""
    assert task.job is not None
    return task.job


def shown(task: PendingJob) -> str:
    """Its trials, for a person."""
    return ", ".join(map(str, sorted(task.trials)))
