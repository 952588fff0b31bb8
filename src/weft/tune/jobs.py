"""A job: what an executor is asked to run, and what it tells of it, as plain values that travel as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

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
    """Places of the executor's devices: several for a split candidate."""
    memory: int | None
    """Bytes that it may take of each device; None: all of it."""
    directory: str
    """The study's; a trial's own is ``trials/NUMBER`` within."""
    seconds: float | None = None
    """The time limit."""


@dataclass(frozen=True, slots=True)
class Device:
    """A place where trials run. ``memory`` is nominal: what it has, never what happens to be free."""

    name: str
    """As torch names it: ``cpu`` or ``cuda:0``."""
    memory: int | None
    node: str = "local"
    gone: bool = False
    """Whether its machine is away; it keeps its place."""


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
    """Bytes that it really took of its device at its peak, reserved."""
    seconds: float | None = None
    """That it ran, without the start of its process."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A job whose process or machine is gone; its unfinished trials go on elsewhere from their checkpoints."""

    job: str
    why: str


Event = Reported | Ended | Lost


# Where jobs run: one small interface that local processes and Ray keep alike.


class Executor(Protocol):
    """Starts jobs and tells of them; it decides nothing. No method raises because of what a job does."""

    @property
    def devices(self) -> Sequence[Device]:
        """By place; a machine that goes or comes changes them, never the place of one that stays."""

    def start(self, job: Job) -> None:
        """Begin a job on its devices and return at once."""

    def answer(self, job: str, trial: int, prune: bool) -> None:
        """Let a trial that reported go on or end; unknown jobs are passed over."""

    def stop(self, job: str) -> None:
        """End a job and all its processes; what it still tells is dropped."""

    def poll(self, timeout: float) -> list[Event]:
        """What happened, oldest first; waits at most so many seconds if nothing has."""

    def close(self) -> None:
        """End every job and what the executor started."""
