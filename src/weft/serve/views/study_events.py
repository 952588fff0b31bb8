"""The trials of a study, and its jobs on devices over time, from its events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.runs.events import ENDS
from weft.serve.event_log import LineSummary
from weft.serve.fields import as_list, finite, rounded, whole_number

SHOWN = 1000
"""The most trials that are shown: those that run, the best, and others at even distances."""

BEST = 250
REPORTS = 64
"""The most reports that are kept of one trial."""

ALL_REPORTS = 6000
"""The most reports that are shown, over all trials."""


@dataclass(slots=True)
class TrialState:
    """A trial as its events have it. Memory is in bytes of a device; that of a fused job is of all its trials."""

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
    error: str | None = None

    def report(self, at: int, values: list[float | None]) -> None:
        self.reports[at] = values
        if len(self.reports) > REPORTS:
            steps = sorted(self.reports)
            self.reports = {step: self.reports[step] for step in (*steps[:-1:2], steps[-1])}

    def add_notes(self, notes: Mapping[str, Any]) -> None:
        """Take in what the driver wrote of the trial at its end."""
        fit, error = notes.get("fit"), notes.get("error")
        self.seconds = finite(notes.get("seconds"))
        self.estimated = first_whole(notes.get("memory"), self.estimated)
        self.measured = whole_number(notes.get("peak"))
        self.fit = str(fit.get("strategy", fit.get("way"))) if isinstance(fit, Mapping) else None
        self.error = error.strip().splitlines()[-1][:300] if isinstance(error, str) and error.strip() else None

    def to_json(self, reports: int) -> dict[str, Any]:
        """The row of the page, with at most about so many reports, the last among them."""
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
            "error": self.error,
        }


def trial_rows(trials: Sequence[TrialState], maximize: bool) -> list[dict[str, Any]]:
    """Rows by number; of too many, those that run, the best by the first objective, and others at even distances."""
    trials = sorted(trials, key=lambda trial: trial.number)
    if len(trials) > SHOWN:
        values = {t.number: t.values[0] for t in trials if t.state == "complete" and t.values}
        best = sorted((-value if maximize else value, at) for at, value in values.items() if value is not None)
        kept = {at for _, at in best[:BEST]}
        kept |= set([trial.number for trial in trials if trial.state in ("waiting", "running")][:BEST])
        others = [trial.number for trial in trials if trial.number not in kept]
        left = min(SHOWN - len(kept), len(others))
        kept |= {others[at * len(others) // left] for at in range(left)}
        trials = [trial for trial in trials if trial.number in kept]
    most = max(2, ALL_REPORTS // max(len(trials), 1))
    return [trial.to_json(most) for trial in trials]


def values_of(value: object) -> list[float | None] | None:
    """The values of a trial, with None for those that are no numbers; None where there are none."""
    return [finite(one) for one in value[:16]] if isinstance(value, list) and value else None


def first_whole(*values: object) -> int | None:
    """The first value that is a whole number."""
    return next((found for value in values if (found := whole_number(value)) is not None), None)


@dataclass(slots=True)
class JobBar:
    """A job on its devices."""

    job: str
    trials: list[int]
    devices: list[str]
    start: float
    end: float | None = None
    estimated: int | None = None
    measured: int | None = None
    state: str = "running"
    left: set[int] = field(default_factory=set)
    """Trials that have not ended."""


def assign_lanes(spans: Sequence[tuple[float, float | None]]) -> list[int]:
    """A lane for each span of time: by start, the first lane that is free. A span without an end keeps its lane.

    >>> assign_lanes([(0, 4), (1, 2), (2, None), (5, 6)])
    [0, 1, 1, 0]
    """
    lanes, free = [0] * len(spans), list[float]()
    for at in sorted(range(len(spans)), key=lambda index: spans[index][0]):
        start, end = spans[at]
        lane = next((lane for lane, until in enumerate(free) if until <= start), len(free))
        free[lane : lane + 1] = [math.inf if end is None else max(start, end)]
        lanes[at] = lane
    return lanes


def device_bars(bars: Sequence[JobBar], devices: Mapping[str, int | None], began: float) -> list[dict[str, Any]]:
    """Every device with its memory and its bars, in seconds since the study began; a job on several devices is a bar
    on each."""
    found = []
    for name, memory in devices.items():
        own = sorted((bar for bar in bars if name in bar.devices), key=lambda bar: bar.start)
        rows = []
        for bar, lane in zip(own, assign_lanes([(bar.start, bar.end) for bar in own]), strict=True):
            end = None if bar.end is None else round(bar.end - began, 3)
            times = {"start": round(bar.start - began, 3), "end": end, "lane": lane}
            bytes_of = {"estimated": bar.estimated, "measured": bar.measured}
            rows.append({"job": bar.job, "trials": bar.trials, **times, **bytes_of, "state": bar.state})
        found.append({"name": name, "memory": memory, "bars": rows})
    return found


TRIALS = 5000
"""The most trials that are kept; of more, the newest."""

BARS = 1000


class StudyEvents(LineSummary):
    """The events of a study, line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.trials: dict[int, TrialState] = {}
        self.count = 0
        self.devices: dict[str, int | None] = {}
        """The memory of each, by name."""
        self.running: dict[str, JobBar] = {}
        self.done: deque[JobBar] = deque(maxlen=BARS)
        self.began: float | None = None
        self.now = 0.0
        """The time of the last event."""
        self.space: object = None
        """As JSON, from the study's start."""
        self._places: list[str] = []

    def add_event(self, event: Mapping[str, Any]) -> None:
        kind, time = event.get("event"), finite(event.get("time"))
        if kind == "started":
            self.space = event.get("space", self.space)
            self._interrupt("interrupted")  # a driver that was killed wrote no end: jobs end at its last event
        if time is not None:
            self.began = time if self.began is None else self.began
            self.now = max(self.now, time)
        numbers = map(whole_number, as_list(event.get("trials")))
        trials = [self._trial(at) for at in numbers if at is not None]
        if kind == "devices":
            self._set_devices(event)
        elif kind in ENDS:
            self._interrupt(str(kind))
        elif kind in ("lost", "exceeded") and str(event.get("job")) in self.running:
            bar = self.running[str(event.get("job"))]
            bar.measured = first_whole(event.get("needed"), bar.measured)
            self._close(bar.job, str(kind))
        elif kind == "placed":
            self._place(event, trials)
        else:
            for trial in trials:
                self._update(trial, event, str(kind))

    def _trial(self, at: int) -> TrialState:
        if at not in self.trials:
            self.count += 1
            self.trials[at] = TrialState(at)
            if len(self.trials) > TRIALS:
                del self.trials[next(iter(self.trials))]
        return self.trials.get(at) or TrialState(at)

    def _update(self, trial: TrialState, event: Mapping[str, Any], kind: str) -> None:
        if kind == "proposed" and isinstance(event.get("params"), Mapping):
            trial.params, trial.state = event["params"], "waiting"
        elif kind == "reported":
            at = whole_number(event.get("at"))
            if at is not None:
                trial.report(at, values_of(event.get("values")) or [])
        elif kind == "ended":
            self._end(trial, event)

    def _place(self, event: Mapping[str, Any], trials: Sequence[TrialState]) -> None:
        places = [at for at in map(whole_number, as_list(event.get("places"))) if at is not None]
        devices = [self._places[at] for at in places if at < len(self._places)]
        job, estimated = str(event.get("job")), first_whole(event.get("estimated"), event.get("memory"))
        self._close(job, "lost")
        bar = JobBar(job, [one.number for one in trials], devices, self.now, estimated=estimated)
        bar.left = set(bar.trials)
        self.running[job] = bar
        for trial in trials:
            trial.state, trial.devices, trial.fused = "running", devices, len(trials)
            trial.attempts += 1
            trial.estimated = estimated if estimated is not None else trial.estimated

    def _end(self, trial: TrialState, event: Mapping[str, Any]) -> None:
        state = event.get("state")
        trial.state = state if state in ("complete", "pruned", "failed") else "failed"
        last = trial.reports[max(trial.reports)] if trial.reports else None
        trial.values = values_of(event.get("values")) or (last if state == "pruned" else None)
        trial.add_notes(event)
        for bar in [one for one in self.running.values() if trial.number in one.left]:
            bar.left.discard(trial.number)
            bar.measured = max((one for one in (bar.measured, trial.measured) if one is not None), default=None)
            if not bar.left:
                states = {self.trials[at].state for at in bar.trials if at in self.trials}
                self._close(bar.job, next(iter(states)) if len(states) == 1 else "complete")

    def _interrupt(self, state: str) -> None:
        for job in list(self.running):
            self._close(job, state)

    def _close(self, job: str, state: str) -> None:
        bar = self.running.pop(job, None)
        if bar is None:
            return
        bar.end, bar.state = self.now, state
        for one in bar.left & self.trials.keys():
            self.trials[one].state = "waiting"
        self.done.append(bar)

    def _set_devices(self, event: Mapping[str, Any]) -> None:
        names, memory = event.get("now"), event.get("memory")
        if isinstance(names, list):
            words = [str(name) for name in names[:1024]]
            counts = [words[: at + 1].count(word) for at, word in enumerate(words)]
            self._places = [word if n == 1 else f"{word} ({n})" for word, n in zip(words, counts, strict=True)]
            sizes = memory if isinstance(memory, list) and len(memory) == len(names) else [None] * len(names)
            self.devices |= {name: whole_number(size) for name, size in zip(self._places, sizes, strict=False)}
