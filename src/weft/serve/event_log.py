"""What the events of a run say: thinned curves and a few numbers, however many events there are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from weft.runs.events import ENDS, parse
from weft.serve.events.fold import Fold
from weft.serve.events.thin import Curve, number, whole

SERIES = 32
"""The most curves that are kept of a run; an event file with more names than that is no chart."""

LONGEST = 200
"""The most characters in the name of a curve."""

NEWEST = 20
"""Over how many of the newest steps a loss is smoothed."""

RATED = 100
"""From how many of the newest steps the time left is worked out."""

T = TypeVar("T")
OTHERS = frozenset({"event", "time", "step"})


def ask(run: Path, question: Callable[[Said], T]) -> T:
    """The answer to a question about all that a run's events have said up to now."""
    return _events.ask(run / "events.jsonl", question)


class Said:
    """What the events of one run have said; its size does not depend on theirs."""

    def __init__(self) -> None:
        self.curves: dict[tuple[str, str], Curve] = {}
        """By what they are of (train, validation, progress) and their name."""
        self.points = self.damaged = self.done = 0
        self.steps: int | None = None
        self.stages: int | None = None
        self.seconds: float | None = None
        self.ended: str | None = None
        self.reason: str | None = None
        self.fingerprint: str | None = None
        self.values: dict[int, tuple[float, float]] = {}
        """Of a study: the least and the greatest value of each objective."""
        self.times: deque[tuple[int, float]] = deque(maxlen=RATED)
        self.newest: dict[str, deque[float]] = {}
        self._before = 0.0  # seconds of earlier sessions
        self._began: float | None = None

    def see(self, line: bytes) -> None:
        """Take in one line of events."""
        event = _parse(line)
        if event is not None:
            self.take(event)
        elif line.strip():
            self.damaged += 1

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in one event; one that is not as weft writes it changes as little as it can."""
        kind, time = event.get("event"), number(event.get("time"))
        if kind == "started":
            self._start(event, time)
        elif kind == "step":
            self._step(event, time)
        elif kind == "validation":
            self._validation(event)
        elif kind == "ended":
            self._trial(event, time)
        elif kind == "pipeline" and isinstance(event.get("utilisation"), list):
            self.stages = len(event["utilisation"])
        elif kind in ENDS:
            self._end(event, str(kind), time)

    def smooth(self, name: str) -> float | None:
        """The mean of a training metric over the newest steps."""
        newest = self.newest.get(name)
        return sum(newest) / len(newest) if newest else None

    def left(self) -> float | None:
        """The seconds that the rest would take at the pace of the newest steps; for a run that runs."""
        if self.steps is None or len(self.times) < 2:
            return None
        (first, began), (last, now) = self.times[0], self.times[-1]
        return max(0, self.steps - self.done) * (now - began) / (last - first) if last > first and now > began else None

    def _start(self, event: Mapping[str, Any], time: float | None) -> None:
        self.steps = whole(event.get("steps"))
        self.done = max(self.done, whole(event.get("at")) or 0)
        self.ended = self.reason = self.fingerprint = None
        self._before, self._began = self.seconds or 0.0, time
        self.times.clear()

    def _step(self, event: Mapping[str, Any], time: float | None) -> None:
        step = whole(event.get("step"))
        if step is None:
            return
        self.points += 1
        self.done = max(self.done, step + 1)
        self._clock(self.done, time)
        if self.seconds is not None:
            self._add("progress", "seconds", step, self.seconds)
        for name, value in event.items():
            y = value if type(value) is float else number(value)  # almost all are, and there are many
            if y is not None and name not in OTHERS and self._add("train", name, step, y):
                newest = self.newest.get(name)
                if newest is None:
                    newest = self.newest[name] = deque(maxlen=NEWEST)
                newest.append(y)

    def _validation(self, event: Mapping[str, Any]) -> None:
        step, scores = whole(event.get("step")), event.get("scores")
        if step is not None and isinstance(scores, Mapping):
            for name, value in scores.items():
                if (y := number(value)) is not None:
                    self._add("validation", f"{name} ({event.get('pick')})" if event.get("pick") else name, step, y)

    def _trial(self, event: Mapping[str, Any], time: float | None) -> None:
        trials, values = event.get("trials"), event.get("values")
        self.done += len(trials) if isinstance(trials, list) else 1
        self._clock(self.done, time)
        for place, value in enumerate(values[:8] if isinstance(values, list) else ()):
            if (y := number(value)) is not None:
                low, high = self.values.get(place, (y, y))
                self.values[place] = (min(low, y), max(high, y))

    def _end(self, event: Mapping[str, Any], kind: str, time: float | None) -> None:
        reason, fingerprint = event.get("reason"), event.get("fingerprint")
        self.ended = kind
        self.reason = reason[:2000] if isinstance(reason, str) else None
        self.fingerprint = fingerprint[:128] if isinstance(fingerprint, str) else None
        self._clock(None, time)
        self._began = None

    def _clock(self, done: int | None, time: float | None) -> None:
        if time is not None and self._began is not None:
            self.seconds = max(self.seconds or 0.0, self._before + time - self._began)
            if done is not None:
                self.times.append((done, time))

    def _add(self, of: str, name: str, x: int, y: float) -> bool:
        curve = self.curves.get((of, name))
        if curve is None:
            if len(self.curves) >= SERIES or len(name) > LONGEST:
                return False
            curve = self.curves[of, name] = Curve()
        curve.add(x, y)
        return True


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = msgspec.json.decode(line)  # in a third of the time
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return parse(line)  # the judge of what is an event
    return event if isinstance(event, dict) else None


_events = Fold(Said)
