"""Jobs: what an executor is asked to run and what it reports, as values with a JSON form; its interface; and what is
known of each trial while its study runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from weft.tune.fit.estimator import Requirements

FitStrategy = Literal["whole", "accumulate", "recompute", "split", "offload"]


@dataclass(frozen=True, slots=True)
class Fit:
    """How one candidate trains on devices of a nominal memory; a function of both, and of nothing else."""

    strategy: FitStrategy
    micro_batch: int
    microbatches: int
    """Micro-batches of a step: the effective batch is that of the trial."""
    devices: int
    """Devices that train it together."""
    memory: int
    """Bytes that it takes of each device at its peak, as the allocator reserves them."""
    seconds: float | None
    """Estimated seconds of a step, where there is a cost model for the device."""
    explanation: str
    """Why this strategy and no earlier one, with the figures."""
    plan: dict[str, Any] | None = None
    """The plan of a split candidate, as ``Plan.to_json`` writes it."""


After = tuple[FitStrategy, int]
"""The strategy and the devices of a fit that a trial went beyond."""


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt at one trial, or at several that are fused into one training."""

    id: str
    """Names the attempt: unlike the trials, it is never used again."""
    trials: tuple[int, ...]
    params: tuple[dict[str, Any], ...]
    """Of each trial, in the same order."""
    fit: Fit | None
    """Of all its trials; None for an objective that is a function."""
    devices: tuple[int, ...]
    """Indices of the executor's devices: several for a split candidate."""
    memory: int | None
    """Bytes that it may take of each device; None: all of it."""
    directory: str
    """The study's; a trial's own is ``trials/NUMBER`` within."""
    timeout: float | None = None
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device that runs trials. ``memory`` is nominal: what it has, never what happens to be free."""

    name: str
    """As torch names it: ``cpu`` or ``cuda:0``."""
    memory: int | None
    node: str = "local"
    gone: bool = False
    """Whether its machine is away; it keeps its index."""


@dataclass(frozen=True, slots=True)
class Reported:
    """A trial's values after so many steps; the executor owes it an answer: ``answer(job, trial, prune)``."""

    job: str
    trial: int
    step: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """A trial's end. A job ends when all its trials have."""

    job: str
    trial: int
    state: Literal["complete", "pruned", "failed", "out-of-memory", "timeout"]
    values: tuple[float, ...] | None = None
    error: str | None = None
    """The traceback of a failure."""
    peak: int | None = None
    """Bytes of its device that were reserved at its peak."""
    seconds: float | None = None
    """That it ran, without the start of its process."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A job whose process or machine is gone; its unfinished trials continue elsewhere from their checkpoints."""

    job: str
    reason: str


Event = Reported | Ended | Lost


class Executor(Protocol):
    """Starts jobs and reports what they do; it decides nothing. No method raises because of what a job does."""

    @property
    def devices(self) -> Sequence[Device]:
        """A machine that goes or comes changes them, never the index of one that stays."""

    def start(self, job: Job) -> None:
        """Begin a job on its devices and return at once."""

    def answer(self, job: str, trial: int, prune: bool) -> None:
        """Let a trial that reported continue or end; unknown jobs are ignored."""

    def stop(self, job: str) -> None:
        """End a job and all its processes; its events from then on are dropped."""

    def poll(self, timeout: float) -> list[Event]:
        """What happened, oldest first; waits at most so many seconds if nothing has."""

    def close(self) -> None:
        """End every job and every process that the executor started."""


@dataclass(slots=True)
class PendingJob:
    """Trials that train as one, from their proposal to their end, over all attempts."""

    trials: dict[int, dict[str, Any]]
    """Those that have not ended, with their values."""
    needs: Requirements
    id: str = ""
    job: Job | None = None
    """The attempt that runs."""
    attempts: int = 0
    crashes: int = 0
    oom_count: int = 0
    exclusive: bool = False
    """Whether it has its devices to itself since it ran out of memory beside others."""
    memory: int | None = None
    """Bytes of each device that are reserved for it; None: all of it, or not counted."""
    min_memory: int = 0
    """Bytes that it is known to need more than."""
    last_report: tuple[float, int] | None = None
    """When it last reported, and after which step."""

    @property
    def takes_whole_device(self) -> bool:
        """Whether it may take all the memory that was counted on."""
        return self.memory is None or self.needs.devices > 1

    @property
    def fused(self) -> int:
        """How many trials train as one."""
        return len(self.trials if self.job is None else self.job.trials)

    @property
    def running(self) -> Job:
        assert self.job is not None
        return self.job

    def likeness(self) -> tuple[str, str]:
        """The shape and the family by which estimates are corrected: by trials of its architecture, as many as train
        as one, and by those that train as it does."""
        family = "split" if self.needs.devices > 1 else "alone" if self.fused == 1 else "fused"
        return f"{self.needs.architecture_key} x{self.fused}", family

    def estimate(self) -> int | None:
        """Bytes of each device that it should take, also where it has its devices to itself."""
        if self.memory is not None or self.needs.memory is None:
            return self.memory
        return self.needs.memory_of(len(self.trials))

    def __str__(self) -> str:
        return ", ".join(map(str, sorted(self.trials)))


# The progress itself, trial by trial and device by device.

OPEN = ("waiting", "starting", "running")


@dataclass(slots=True)
class TrialProgress:
    """One trial. Times are in seconds of this run of the study."""

    number: int
    params: Mapping[str, Any]
    state: str = "waiting"
    device: str = ""
    places: tuple[int, ...] = ()
    """Indices of its devices."""
    memory: int | None = None
    """Bytes that were estimated, and reserved for it."""
    peak: int | None = None
    """Bytes that it took at its peak."""
    step: int | None = None
    values: tuple[float, ...] | None = None
    attempts: int = 0
    reason: str = ""
    """The last line of its error."""
    proposed: float = field(default_factory=time.monotonic)
    started: float = 0.0
    waited: float = 0.0
    starting: float = 0.0
    ran: float = 0.0

    def add_time(self, seconds: float | None) -> None:
        """Add the time of an attempt that is over; None: how long it ran is not known."""
        taken = time.monotonic() - self.started
        self.ran += taken if seconds is None else min(seconds, taken)
        self.starting += 0.0 if seconds is None else max(0.0, taken - seconds)


@dataclass(slots=True)
class StudyProgress:
    """Written by the runner alone."""

    name: str
    total: int
    """Number of trials."""
    objectives: tuple[str, ...]
    directions: tuple[str, ...]
    devices: Sequence[Device] = ()
    trials: dict[int, TrialProgress] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def count(self, *states: str) -> int:
        return sum(row.state in states for row in self.trials.values())

    def best(self) -> TrialProgress | None:
        """The complete trial with the best value of the first objective."""
        done = [row for row in self.trials.values() if row.state == "complete" and row.values]
        sign = -1.0 if self.directions[0] == "maximize" else 1.0
        return min(done, key=lambda row: (sign * (row.values or (0.0,))[0], row.number), default=None)

    def used(self, index: int) -> tuple[int, int]:
        """The trials on a device, and the bytes that are reserved for them."""
        here = [row for row in self.trials.values() if row.state in OPEN[1:] and index in row.places]
        return len(here), sum(row.memory or 0 for row in here)

    def time_breakdown(self) -> dict[str, float]:
        """Where the time of all trials went, in seconds."""
        rows = self.trials.values()
        return {
            "running": sum(row.ran for row in rows),
            "waiting": sum(row.waited for row in rows),
            "starting": sum(row.starting for row in rows),
        }


# The JSON form of jobs and events, in which processes send them.

_EVENTS: dict[str, type[Event]] = {kind.__name__.lower(): kind for kind in (Reported, Ended, Lost)}


def job_from_json(message: dict[str, Any]) -> Job:
    return msgspec.convert(message, Job)


def event_to_json(event: Event) -> dict[str, Any]:
    """The event with its kind; numbers that JSON lacks are written as Python's ``json`` does, and read back so.

    >>> event_from_json(event_to_json(Lost("3.0", "killed")))
    Lost(job='3.0', reason='killed')
    """
    return {"kind": type(event).__name__.lower(), **asdict(event)}


def event_from_json(message: dict[str, Any]) -> Event:
    fields = dict(message)
    return msgspec.convert(fields, _EVENTS[fields.pop("kind")])
