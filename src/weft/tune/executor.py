"""Where jobs run: one small interface that local processes and Ray keep alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.tune.job import Device, Event, Job


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
