"""The files of events: followed as they grow, and summed up in bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from weft.runs.events import ENDS, parse
from weft.serve.downsample import Curve
from weft.serve.fields import number, whole_number

LONGEST_LINE, PIECE = 64 << 20, 1 << 20
"""The most bytes of a line, which in a trace may hold a simulation, and the bytes that are read at once."""

LONGEST_EVENT, EVENTS = 1 << 20, 1 << 16
"""The same for events, which are short."""

KEPT = 64
"""The most files whose summaries are kept in memory."""

_END = 64
"""The bytes before the offset by which a file is recognized."""


class LogTail:
    """Follows one file. ``offset`` is where the next line begins; a torn last line is read once it is complete.

    Lines of more than ``longest`` bytes are damage: they are skipped, piece by piece, and counted in ``skipped``.
    """

    def __init__(self, path: Path, longest: int = LONGEST_LINE, chunk: int = PIECE) -> None:
        self.path = path
        self._longest, self._chunk = longest, chunk
        self._begin()

    def _begin(self) -> None:
        self.offset = self.skipped = 0
        self._seen: tuple[int, int, int] | None = None
        self._before = b""
        self._skipping = False

    def changed(self) -> bool:
        """Whether the file has changed since it was last read."""
        return self._stat() != self._seen

    def replaced(self) -> bool:
        """Whether the file is gone, shorter, or another one than was read; then reading begins anew."""
        now = self._stat()
        if self._seen is None or now == self._seen:
            return False
        # Appending makes a file longer: one of the same length and another time was written anew.
        gone = now is None or now[0] != self._seen[0] or now[1] <= self._seen[1] or not self._goes_on()
        if gone:
            self._begin()
        return gone

    def read(self) -> Iterator[tuple[int, bytes]]:
        """The new lines in pieces of about a chunk, each with its offset; OSError where the file vanishes meanwhile."""
        now = self._stat()
        if now is None:
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            while self.offset < now[1]:  # what is added meanwhile is read the next time
                data = file.read(self._chunk)
                data += b"" if data.endswith(b"\n") else file.readline(self._longest)
                end = data.rfind(b"\n") + 1
                at, piece, rest = self.offset, data[:end], data[end:]
                self._move(piece)
                if piece and self._skipping:
                    self._skipping = False
                    self.skipped += 1
                    piece = piece[piece.find(b"\n") + 1 :]
                    at = self.offset - len(piece)
                if piece:
                    yield at, piece
                if len(rest) > self._longest or (rest and self._skipping):
                    self._move(rest)
                    self._skipping = True
                elif rest:
                    break
        self._seen = now

    def _goes_on(self) -> bool:
        """Whether the last bytes that were read are still in their place."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset - len(self._before))
                return file.read(len(self._before)) == self._before
        except OSError:
            return False

    def _move(self, piece: bytes) -> None:
        self.offset += len(piece)
        self._before = (self._before + piece[-_END:])[-_END:]

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


T = TypeVar("T")


class Lru(Generic[T]):
    """At most `cap` values by key; the least recently used go first. Threads may share it."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._kept: OrderedDict[Hashable, tuple[str, T]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, signature: str, make: Callable[[], T]) -> T:
        """The value of a key, made again where the signature has changed."""
        with self._lock:
            before = self._kept.pop(key, None)
            if before is not None and before[0] == signature:
                self._kept[key] = before
                return before[1]
        made = make()  # without the lock, so that a slow one delays no other
        with self._lock:
            self._kept[key] = (signature, made)
            while len(self._kept) > self.cap:
                self._kept.popitem(last=False)
        return made


class LineSummary:
    """The summary of the lines of a file; its size must not depend on how many there are."""

    def __init__(self) -> None:
        self.damaged = 0
        """Lines that cannot be read."""

    def add_piece(self, offset: int, piece: bytes) -> None:
        """Take in several lines, which begin at an offset of the file."""
        for line in piece.split(b"\n")[:-1]:
            if len(line) <= LONGEST_EVENT:
                self.add_line(line)
            else:
                self.damaged += 1

    def add_line(self, line: bytes) -> None:
        """Take in one line; a damaged one changes nothing else."""
        try:
            event = msgspec.json.decode(line)  # three times faster than the parser of events
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            event = parse(line)  # Python's parser also takes NaN
        if isinstance(event, dict):
            self.add_event(event)
        elif line.strip():
            self.damaged += 1

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Take in one event; fields that are not as weft writes them are ignored."""
        raise NotImplementedError


S = TypeVar("S", bound=LineSummary)


class SummaryCache(Generic[S]):
    """The summaries of files, which are read on from where they were; threads may share it."""

    def __init__(self, begin: Callable[[], S]) -> None:
        self._begin = begin
        self._kept: Lru[FollowedFile[S]] = Lru(KEPT)

    def query(self, path: Path, question: Callable[[S], T]) -> T:
        """The answer to a question about the summary of a file as it is now; a missing file has no lines."""
        return self._kept.get(path, "", lambda: FollowedFile(path, self._begin)).query(question)


class FollowedFile(Generic[S]):
    """One file with its summary."""

    def __init__(self, path: Path, begin: Callable[[], S]) -> None:
        self._file, self._begin, self._sum = LogTail(path, LONGEST_EVENT, EVENTS), begin, begin()
        self._lock = threading.Lock()

    def query(self, question: Callable[[S], T]) -> T:
        """The answer to a question about the summary up to now."""
        with self._lock:
            if self._file.changed():
                if self._file.replaced():
                    self._sum = self._begin()
                before = self._file.skipped
                with suppress(OSError):
                    for offset, piece in self._file.read():
                        self._sum.add_piece(offset, piece)
                self._sum.damaged += self._file.skipped - before
            return question(self._sum)


SERIES = 32
"""The most curves that are kept of a run."""

LONGEST_NAME = 200
"""The most characters in the name of a curve."""

NEWEST = 20
"""The newest steps over which a loss is averaged."""

RATED = 100
"""The newest steps from whose pace the time left is estimated."""

OTHERS = frozenset({"event", "time", "step"})


def query_run(run: Path, question: Callable[[RunProgress], T]) -> T:
    """The answer to a question about the events of a run up to now."""
    return _events.query(run / "events.jsonl", question)


class RunProgress(LineSummary):
    """Curves and figures from the events of one run; its size does not depend on theirs."""

    def __init__(self) -> None:
        self.curves: dict[tuple[str, str], Curve] = {}
        """By kind (train, validation, progress) and name."""
        super().__init__()
        self.points = self.done = 0
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

    def add_event(self, event: Mapping[str, Any]) -> None:
        kind, time = event.get("event"), number(event.get("time"))
        if kind == "started":
            self._start(event, time)
        elif kind == "step":
            self._step(event, time)
        elif kind == "validation":
            self._validation(event)
        elif kind == "ended":
            self._trial(event, time)
        elif kind == "pipeline" and isinstance(shares := event.get("busy", event.get("utilisation")), list):
            self.stages = len(shares)
        elif kind in ENDS:
            self._end(event, str(kind), time)

    def smooth(self, name: str) -> float | None:
        """The mean of a training metric over the newest steps."""
        newest = self.newest.get(name)
        return sum(newest) / len(newest) if newest else None

    def seconds_left(self) -> float | None:
        """The seconds that the rest would take at the pace of the newest steps."""
        if self.steps is None or len(self.times) < 2:
            return None
        (first, began), (last, now) = self.times[0], self.times[-1]
        return max(0, self.steps - self.done) * (now - began) / (last - first) if last > first and now > began else None

    def _start(self, event: Mapping[str, Any], time: float | None) -> None:
        self.steps = whole_number(event.get("steps"))
        self.done = max(self.done, whole_number(event.get("at")) or 0)
        self.ended = self.reason = self.fingerprint = None
        self._before, self._began = self.seconds or 0.0, time
        self.times.clear()

    def _step(self, event: Mapping[str, Any], time: float | None) -> None:
        step = whole_number(event.get("step"))
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
        step, scores = whole_number(event.get("step")), event.get("scores")
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
            if len(self.curves) >= SERIES or len(name) > LONGEST_NAME:
                return False
            curve = self.curves[of, name] = Curve()
        curve.add(x, y)
        return True


_events = SummaryCache(RunProgress)
