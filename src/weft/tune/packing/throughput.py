"""How much a device gets done when loads share it: memory that is full is not work that is done."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

RECENT = 8
TWICE = 2


@dataclass(frozen=True, slots=True)
class JobRate:
    """What one load did in some company: its rate, in a unit that is the same for all of its kind, such as steps/s."""

    kind: str
    rate: float
    size: float


class ThroughputModel:
    """Learns, from measured rates, how many loads at once are worth while, and which kinds must be alone.

    The speed of a load is its rate by the best rate that its kind was ever seen at, so 1 is as alone. A device
    does the sum of its loads' speeds. One more is worth while if that raised the sum by ``gain``; once it did, it stays
    allowed until it lowers the sum (so that noise does not flip it), and once it did not, it is tried again only
    after ``again`` further measurements.
    """

    def __init__(self, gain: float = 0.05, again: int = 32) -> None:
        self.gain, self.again = gain, again
        self._best: dict[str, float] = {}
        self._seen: dict[int, deque[tuple[JobRate, ...]]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._top = 1
        self._refused: dict[int, int] = {}
        self._blamed: dict[str, int] = defaultdict(int)
        self.count = 0

    def observed(self, company: Sequence[JobRate]) -> None:
        """All the loads of one device, measured while they, and no others, ran on it."""
        for share in company:
            self._best[share.kind] = max(self._best.get(share.kind, 0.0), share.rate)
        self.count += 1
        self._seen[len(company)].append(tuple(company))
        if len(company) > 1 and self._total(company) < 1.0 - self.gain:
            # Worse than one after another: the largest is the one that the others cannot be beside.
            self._blamed[max(company, key=lambda share: (share.size, share.kind)).kind] += 1
        self._judge(len(company))

    def speed(self, count: int) -> float | None:
        """The sum of the speeds of so many loads, the mean of what was seen of late; None: never seen."""
        seen = self._seen.get(count)
        return sum(map(self._total, seen)) / len(seen) if seen else None

    def worth(self, count: int) -> bool:
        """Whether a device that runs so many should get one more."""
        # What added nothing is tried again after a while, and nothing beyond it before it did add something.
        return count == 0 or not any(
            more <= count or (more == count + 1 and self.count - when < self.again)
            for more, when in self._refused.items()
        )

    def alone(self, kind: str) -> bool:
        """Whether a kind was found to be better off by itself, twice."""
        return self._blamed[kind] >= TWICE if kind in self._blamed else False

    def slowdown(self, count: int) -> float:
        """How many times as long a load should take among so many: 1 where nothing is known."""
        speed = self.speed(count)
        return max(count / speed, 1.0) if speed else 1.0

    def _judge(self, count: int) -> None:
        here, fewer = self.speed(count), [n for n in self._seen if n < count]
        if here is None or not fewer:
            return
        before = self.speed(max(fewer)) or 0.0
        needed = before if count <= self._top else before * (1.0 + self.gain)
        if here < needed:
            self._refused[count] = self.count
            self._top = min(self._top, count - 1)
        else:
            self._refused.pop(count, None)
            self._top = max(self._top, count)

    def _total(self, company: Sequence[JobRate]) -> float:
        return sum(share.rate / self._best[share.kind] if self._best[share.kind] else 0.0 for share in company)
