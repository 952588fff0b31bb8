"""A ledger: what the events of a study come to, trial by trial and job by job, whatever their number."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from weft.runs.events import ENDS, parse
from weft.serve.events.thin import whole
from weft.serve.study.bars import Bar, distinct
from weft.serve.study.trials import Trial, finite, first_whole, values_of

TRIALS = 5000
"""The most trials that are kept; of more, the newest."""

BARS = 1000
LONGEST = 1 << 15
"""Bytes of the line that proposes a trial; parameters that take more are damage."""


class Ledger:
    """What the lines of a study's events come to."""

    def __init__(self) -> None:
        self.trials: dict[int, Trial] = {}
        self.count = self.damaged = 0
        self.devices: dict[str, int | None] = {}
        """The memory of each, by name."""
        self.running: dict[str, Bar] = {}
        self.done: deque[Bar] = deque(maxlen=BARS)
        self.began: float | None = None
        self.now = 0.0
        """When the last thing happened."""
        self.space: object = None
        """As the study told of it when it was started."""
        self._places: list[str] = []

    def see(self, line: bytes) -> None:
        event = parse(line)
        if event is None:
            self.damaged += bool(line.strip())
            return
        kind, time = event.get("event"), finite(event.get("time"))
        if kind == "started":
            self.space = event.get("space", self.space)
            self._interrupt("interrupted")  # nothing tells when a driver was killed: when it last said something
        if time is not None:
            self.began = time if self.began is None else self.began
            self.now = max(self.now, time)
        numbers = event.get("trials")
        trials = [
            self._trial(at) for one in (numbers if isinstance(numbers, list) else []) if (at := whole(one)) is not None
        ]
        if kind == "devices":
            self._know(event)
        elif kind in ENDS:
            self._interrupt(str(kind))
        elif kind in ("lost", "exceeded"):
            self._leave(event, str(kind))
        elif kind == "placed":
            self._place(event, trials)
        elif kind != "proposed" or len(line) <= LONGEST:
            for trial in trials:
                self._tell(trial, event, str(kind))

    def _trial(self, at: int) -> Trial:
        if at not in self.trials:
            self.count += 1
            self.trials[at] = Trial(at)
            if len(self.trials) > TRIALS:
                del self.trials[next(iter(self.trials))]
        return self.trials.get(at) or Trial(at)

    def _tell(self, trial: Trial, event: Mapping[str, Any], kind: str) -> None:
        if kind == "proposed" and isinstance(event.get("params"), Mapping):
            trial.params, trial.state = event["params"], "waiting"
        elif kind == "reported":
            at = whole(event.get("at"))
            if at is not None:
                trial.report(at, values_of(event.get("values")) or [])
        elif kind == "ended":
            self._end(trial, event)

    def _place(self, event: Mapping[str, Any], trials: Sequence[Trial]) -> None:
        node, names, places = event.get("node"), str(event.get("devices") or "").split(), event.get("places")
        devices = [f"{node}/{name}" if isinstance(node, str) else name for name in names]
        if isinstance(places, list) and all(isinstance(at, int) and 0 <= at < len(self._places) for at in places):
            devices = [self._places[at] for at in places]
        job, estimated = str(event.get("job")), first_whole(event.get("estimated"), event.get("memory"))
        self._close(job, "lost", self.now)
        bar = Bar(job, [one.number for one in trials], devices, self.now, estimated=estimated)
        bar.left = set(bar.trials)
        self.running[job] = bar
        for name in devices:
            self.devices.setdefault(name, None)
        for trial in trials:
            trial.state, trial.devices, trial.fused = "running", devices, len(trials)
            trial.attempts += 1
            trial.estimated = estimated if estimated is not None else trial.estimated

    def _end(self, trial: Trial, event: Mapping[str, Any]) -> None:
        state = event.get("state")
        trial.state = state if state in ("complete", "pruned", "failed") else "failed"
        last = trial.reports[max(trial.reports)] if trial.reports else None
        trial.values = values_of(event.get("values")) or (last if state == "pruned" else None)
        trial.note(event)
        for bar in [one for one in self.running.values() if trial.number in one.left]:
            bar.left.discard(trial.number)
            bar.measured = max((one for one in (bar.measured, trial.measured) if one is not None), default=None)
            if not bar.left:
                states = {self.trials[at].state for at in bar.trials if at in self.trials}
                self._close(bar.job, next(iter(states)) if len(states) == 1 else "complete", self.now)

    def _leave(self, event: Mapping[str, Any], state: str) -> None:
        bar = self.running.get(str(event.get("job")))
        if bar is not None:
            bar.measured = first_whole(event.get("needed"), bar.measured)
            self._close(bar.job, state, self.now)

    def _interrupt(self, state: str) -> None:
        for job in list(self.running):
            self._close(job, state, self.now)

    def _close(self, job: str, state: str, at: float) -> None:
        bar = self.running.pop(job, None)
        if bar is None:
            return
        bar.end, bar.state = max(at, bar.start), state
        for one in bar.left & self.trials.keys():
            self.trials[one].state = "waiting"
        self.done.append(bar)

    def _know(self, event: Mapping[str, Any]) -> None:
        names, memory = event.get("now"), event.get("memory")
        if isinstance(names, list):
            self._places = distinct([str(name) for name in names])
            sizes = memory if isinstance(memory, list) and len(memory) == len(names) else [None] * len(names)
            self.devices |= {name: whole(size) for name, size in zip(self._places, sizes, strict=True)}
