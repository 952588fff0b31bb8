"""How much work a device does when jobs rate it, and whether one more is worth while."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

RECENT = 8
TWICE = 2


@dataclass(frozen=True, slots=True)
class JobRate:
    """What one job did beside others: its rate, in a unit that is the same for all of its kind, such as steps/s."""

    kind: str
    rate: float
    size: float


class ThroughputModel:
    """Learns from measured rates how many jobs at once raise the throughput, and which kinds must run alone.

    The speed of a job is its rate divided by the best rate of its kind, so 1 is as alone. The throughput of a device is
    the sum of its jobs' speeds. One more job is worth while if it raised the sum by ``gain``; once it did, it stays
    allowed until it lowers the sum (so that noise does not flip it), and once it did not, it is tried again only
    after ``again`` further measurements.
    """

    def __init__(self, gain: float = 0.05, again: int = 32) -> None:
        self.gain, self.again = gain, again
        self._best: dict[str, float] = {}
        self._measured: dict[int, deque[tuple[JobRate, ...]]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._allowed = 1
        self._refused: dict[int, int] = {}
        self._slowed_others: dict[str, int] = defaultdict(int)
        self.count = 0

    def add(self, rates: Sequence[JobRate]) -> None:
        """The rates of all the jobs of one device, measured while these and no others ran on it."""
        for rate in rates:
            self._best[rate.kind] = max(self._best.get(rate.kind, 0.0), rate.rate)
        self.count += 1
        self._measured[len(rates)].append(tuple(rates))
        if len(rates) > 1 and self._total(rates) < 1.0 - self.gain:
            # Worse than one after another: the largest is what slows the others.
            self._slowed_others[max(rates, key=lambda rate: (rate.size, rate.kind)).kind] += 1
        self._update(len(rates))

    def speed(self, count: int) -> float | None:
        """The throughput of so many jobs, the mean of recent measurements; None: never measured."""
        seen = self._measured.get(count)
        return sum(map(self._total, seen)) / len(seen) if seen else None

    def allows_one_more(self, count: int) -> bool:
        """Whether a device that runs so many jobs should get one more."""
        # A count that added nothing is tried again after a while, and no larger one before it does add something.
        return count == 0 or not any(
            more <= count or (more == count + 1 and self.count - when < self.again)
            for more, when in self._refused.items()
        )

    def must_run_alone(self, kind: str) -> bool:
        """Whether a kind slowed the others below one after another, twice."""
        return self._slowed_others[kind] >= TWICE if kind in self._slowed_others else False

    def slowdown(self, count: int) -> float:
        """How many times as long a job should take among so many: 1 where nothing is known."""
        speed = self.speed(count)
        return max(count / speed, 1.0) if speed else 1.0

    def _update(self, count: int) -> None:
        here, fewer = self.speed(count), [n for n in self._measured if n < count]
        if here is None or not fewer:
            return
        before = self.speed(max(fewer)) or 0.0
        needed = before if count <= self._allowed else before * (1.0 + self.gain)
        if here < needed:
            self._refused[count] = self.count
            self._allowed = min(self._allowed, count - 1)
        else:
            self._refused.pop(count, None)
            self._allowed = max(self._allowed, count)

    def _total(self, rates: Sequence[JobRate]) -> float:
        return sum(rate.rate / self._best[rate.kind] if self._best[rate.kind] else 0.0 for rate in rates)
