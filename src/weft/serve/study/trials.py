"""Trials of a study as the page shows them, however many there are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.serve.events.thin import number, rounded, whole

SHOWN = 1000
"""The most trials that are shown: those that run, the best, and others from the first to the last."""

BEST = 250
REPORTS = 64
"""The most reports that are kept of one trial."""

ALL_REPORTS = 6000
"""The most that are shown of all together."""


@dataclass(slots=True)
class Trial:
    """A trial as its events tell of it. Memory is in bytes of a device, that of all trials of a fused job together."""

    number: int
    params: Mapping[str, Any] = field(default_factory=dict)
    state: str = "waiting"
    values: list[float | None] | None = None
    seconds: float | None = None
    devices: list[str] = field(default_factory=list)
    estimated: int | None = None
    measured: int | None = None
    fused: int = 1
    attempts: int = 0
    reports: dict[int, list[float | None]] = field(default_factory=dict)
    """By step, one value an objective."""
    fit: str | None = None
    why: str | None = None

    def report(self, at: int, values: list[float | None]) -> None:
        self.reports[at] = values
        if len(self.reports) > REPORTS:
            steps = sorted(self.reports)
            self.reports = {step: self.reports[step] for step in (*steps[:-1:2], steps[-1])}

    def note(self, notes: Mapping[str, Any]) -> None:
        """What a driver says of the trial at its end."""
        devices, fit, error = notes.get("devices"), notes.get("fit"), notes.get("error")
        self.seconds = finite(notes.get("seconds"))
        if isinstance(devices, list) and not self.devices:
            self.devices = [str(one) for one in devices]
        self.estimated = first_whole(notes.get("memory"), self.estimated)
        self.measured = whole(notes.get("peak"))
        self.attempts = whole(notes.get("attempts")) or self.attempts
        self.fused = whole(notes.get("fused")) or self.fused
        self.fit = str(fit.get("way")) if isinstance(fit, Mapping) else None
        self.why = error.strip().splitlines()[-1][:300] if isinstance(error, str) and error.strip() else None

    def to_json(self, reports: int) -> dict[str, Any]:
        """With at most about so many reports, the last among them."""
        steps = sorted(self.reports)
        kept = [*steps[: -1 : max(1, math.ceil(len(steps) / reports))], *steps[-1:]]
        return {
            "number": self.number,
            "state": self.state,
            "params": {str(name): rounded(v) if isinstance(v, float) else v for name, v in self.params.items()},
            "values": None if self.values is None else [rounded(value) for value in self.values],
            "seconds": rounded(self.seconds),
            "devices": self.devices,
            "estimated": self.estimated,
            "measured": self.measured,
            "fused": self.fused,
            "attempts": self.attempts,
            "reports": [[step, rounded(self.reports[step][0])] for step in kept if self.reports[step]],
            "fit": self.fit,
            "why": self.why,
        }


def listed(trials: Sequence[Trial], maximize: bool) -> list[dict[str, Any]]:
    """By number; of more than are shown, those that run, the best by the first objective, and others evenly."""
    trials = sorted(trials, key=lambda trial: trial.number)
    if len(trials) > SHOWN:
        values = {t.number: t.values[0] for t in trials if t.state == "complete" and t.values}
        judged = sorted((-value if maximize else value, at) for at, value in values.items() if value is not None)
        kept = {at for _, at in judged[:BEST]}
        kept |= set([trial.number for trial in trials if trial.state in ("waiting", "running")][:BEST])
        others = [trial.number for trial in trials if trial.number not in kept]
        left = min(SHOWN - len(kept), len(others))
        kept |= {others[at * len(others) // left] for at in range(left)}
        trials = [trial for trial in trials if trial.number in kept]
    most = max(2, ALL_REPORTS // max(len(trials), 1))
    return [trial.to_json(most) for trial in trials]


def values_of(told: object) -> list[float | None] | None:
    """The values of a trial, those that are no numbers left empty; None where there are none."""
    return [finite(one) for one in told[:16]] if isinstance(told, list) and told else None


def finite(value: object) -> float | None:
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def first_whole(*values: object) -> int | None:
    """The first that is a count."""
    return next((found for value in values if (found := whole(value)) is not None), None)
