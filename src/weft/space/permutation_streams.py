"""Spaced permutations: rounds over C options in which any `spacing` consecutive steps are distinct."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from weft.errors import StreamError
from weft.space.choice import Choice
from weft.space.expression import Value
from weft.space.space import Space
from weft.space.streams import Stream
from weft.space.subnet import Subnet
from weft.utils.rng import generator

# With slack f = C - spacing, steps stay distinct exactly if no option comes earlier by more than f from one round to
# the next. A free round scans the previous order through a pool of f + 1 and emits a random one of the pool: every
# valid round is equally likely. So that any step can be reached without replaying all before it, rounds form eras:
#
#   era 0: A0 -> free ... free -> bridge ... bridge = A1      Each anchor A is an independent uniform permutation; a
#   era 1: A1 -> free ... free -> bridge ... bridge = A2      bridge emits from the pool what comes first in the next A.
#
# A bridge is f passes of bubble sort towards the next anchor, so ceil((C - 1) / f) bridges arrive, and the k-th is one
# pass with a pool of k * f + 1. All that depends on labels is uniform, hence so is the option at any one step.
FREE_EMISSIONS = 1024  # what a jump into an era replays at most, and so the price of random access
FREE_ROUNDS = 8
ROUNDS_KEPT = 16


class Permutation(ABC):
    """The endless sequence of one choice with `count` options: a pure function of seed, name and step."""

    kind: str

    def __init__(self, seed: int, name: str, count: int) -> None:
        self.count = count
        self._key = (seed, self.kind, name)
        self._rounds: dict[int, list[int]] = {}

    def at(self, step: int) -> int:
        """The index of the option at this step."""
        number, place = divmod(step, self.count)
        order = self._rounds.get(number)
        if order is None:  # rounds are pure, so that two threads may draw the same one
            order = self.round(number)
            # The rounds before stay, since steps in flight look back a little.
            kept = {known: old for known, old in self._rounds.items() if abs(known - number) < ROUNDS_KEPT}
            self._rounds = {**kept, number: order}
        return order[place]

    @abstractmethod
    def round(self, number: int) -> list[int]:
        """The order of the options in this round."""

    def _shuffled(self, rng: np.random.Generator) -> list[int]:
        order: list[int] = rng.random(self.count).argsort(kind="stable").tolist()
        return order


class FairPermutation(Permutation):
    """Rounds that are independent permutations, each keyed by its number."""

    kind = "fair"

    def round(self, number: int) -> list[int]:
        return self._shuffled(generator(*self._key, number))


class SpacedPermutation(Permutation):
    """Rounds in which any `spacing` consecutive steps are distinct, across the ends of rounds too."""

    kind = "spaced"

    def __init__(self, seed: int, name: str, count: int, spacing: int) -> None:
        super().__init__(seed, name, count)
        self.slack = count - spacing
        self.free, self.bridges = eras(count, spacing)
        # The pool holds slack + 1 options until the previous order runs out, then one less at every step.
        self._pools = np.minimum(np.arange(count, 0, -1), self.slack + 1).astype(np.float64)
        self._now: tuple[int, list[list[int]], list[int]] = (-1, [], [])

    def round(self, number: int) -> list[int]:
        if not self.slack:
            return self._anchor(0)[0]
        number, place = divmod(number, self.free + self.bridges)
        now = self._now
        if now[0] != number:
            order, rng = self._anchor(number)
            draws = (rng.random((self.free, self.count)) * self._pools).astype(np.int64).tolist()
            orders = [order := free_round(order, self.slack, row) for row in draws]
            self._now = now = (number, orders, self._anchor(number + 1)[0])
        _, orders, target = now
        if place < self.free:
            return orders[place]
        return bridge_round(orders[-1], target, self.slack * (place - self.free + 1))

    def _anchor(self, era: int) -> tuple[list[int], np.random.Generator]:
        """The era's first order, and the generator of its draws from the pool."""
        rng = generator(*self._key, era)
        return self._shuffled(rng), rng


def eras(count: int, spacing: int) -> tuple[int, int]:
    """How many free rounds and how many bridging rounds an era has."""
    if count == spacing:
        return 1, 0
    return max(FREE_ROUNDS, FREE_EMISSIONS // count), -(-(count - 1) // (count - spacing))


def free_round(order: list[int], slack: int, draws: list[int]) -> list[int]:
    """The round after `order` in which the t-th emission takes place draws[t] of the pool."""
    pool = order[: slack + 1]
    rest = order[slack + 1 :]
    emitted = []
    for draw, new in zip(draws, rest, strict=False):
        emitted.append(pool[draw])
        pool[draw] = new
    for draw in draws[len(rest) :]:
        emitted.append(pool[draw])
        pool[draw] = pool[-1]
        pool.pop()
    return emitted


def bridge_round(order: list[int], target: list[int], slack: int) -> list[int]:
    """The round after `order` that emits of a pool of slack + 1 what stands first in the target."""
    rank = [0] * len(target)
    for place, option in enumerate(target):
        rank[option] = place
    ranks = [rank[option] for option in order]
    pool = sorted(ranks[: slack + 1])
    emitted = [heapq.heapreplace(pool, new) for new in ranks[slack + 1 :]]
    return [target[place] for place in emitted + sorted(pool)]


def bits_per_step(count: int, spacing: int) -> float:
    """The entropy of the sequence, per step: each free round is uniform over the valid ones, each anchor over all."""
    slack = count - spacing
    if not slack:
        return 0.0
    free, bridges = eras(count, spacing)
    per_round = (count - slack) * math.log2(slack + 1) + log2_factorial(slack)
    return (free * per_round + log2_factorial(count)) / ((free + bridges) * count)


def log2_factorial(count: int) -> float:
    return math.lgamma(count + 1) / math.log(2)


# Streams of permutations: each choice goes through all its options, round after round, so that none is neglected.


class PermutationStream(Stream):
    """A stream that draws every choice by an order of its own, and drops what turns out inactive."""

    def __init__(self, space: Space, seed: int = 0) -> None:
        super().__init__(space, seed)
        real = [name for name, choice in space.choices.items() if choice.options is None]
        if real:
            raise StreamError(f"the {self.name} stream needs finite choices, and '{real[0]}' is real; use 'iid'")
        if space.constraints:
            raise StreamError(
                f"the {self.name} stream draws each choice by itself, so it cannot keep the constraint "
                f"{space.constraints[0]}; use 'iid', or turn the constraint into conditions"
            )
        if not space.choices:
            raise StreamError(f"the {self.name} stream needs at least one choice; use a fixed stream")
        self._counts = {name: len(choice.options or ()) for name, choice in space.choices.items()}
        self._orders: Mapping[str, Permutation] = {}

    def _step(self, index: int) -> tuple[Subnet, ...]:
        orders = self._orders

        def pick(name: str, choice: Choice) -> Value:
            options = choice.options
            assert options is not None
            return options[orders[name].at(index)] if len(options) > 1 else options[0]

        return (self._rules.subnet(self._rules.settle(pick)),)


class Fair(PermutationStream):
    """Strict fairness: the rounds of each choice are independent permutations of its options."""

    name = "fair"
    summary = "each choice uses every option once a round"

    def __init__(self, space: Space, seed: int = 0) -> None:
        super().__init__(space, seed)
        self._orders = {name: FairPermutation(seed, name, count) for name, count in self._counts.items()}

    def _bits_of(self, count: int) -> float:
        return log2_factorial(count) / count


class Spaced(PermutationStream):
    """Fair, and any `spacing` consecutive steps use different options of every choice (those with one option apart).

    By default three quarters of the smallest choice; less than 1 bit of freedom a step over all choices is refused.
    """

    name = "spaced"

    def __init__(self, space: Space, spacing: int | None = None, seed: int = 0) -> None:
        super().__init__(space, seed)
        counts = [count for count in self._counts.values() if count > 1]
        self.spacing = _check_spacing(counts, spacing)
        self.summary = f"any {self.spacing} consecutive steps use different options of every choice"
        self._orders = {
            name: SpacedPermutation(seed, name, count, min(self.spacing, count)) for name, count in self._counts.items()
        }

    def _bits_of(self, count: int) -> float:
        return bits_per_step(count, min(self.spacing, count))

    def options(self) -> dict[str, object]:
        return {"spacing": self.spacing}


def _check_spacing(counts: list[int], spacing: int | None) -> int:
    if not counts:
        raise StreamError("a spaced stream needs a choice with two options or more; use a fixed stream")
    smallest = min(counts)

    def freedom(spacing: int) -> float:
        return sum(bits_per_step(count, spacing) for count in counts)

    allowed = [candidate for candidate in range(1, smallest + 1) if freedom(candidate) >= 1]
    if not allowed:
        raise StreamError(
            f"a spaced stream needs 1 bit of freedom a step, and this space has {freedom(1):.2f} at spacing 1; "
            "use 'fair' or 'iid'"
        )
    if spacing is None:
        return max(candidate for candidate in allowed if candidate <= max(3 * smallest // 4, min(allowed)))
    if isinstance(spacing, bool) or not isinstance(spacing, int) or spacing < 1:
        raise StreamError(f"a spacing is an integer from 1 to {max(allowed)}, got {spacing!r}")
    if spacing > smallest:
        raise StreamError(
            f"spacing {spacing} is impossible: the smallest choice has {smallest} options; at most {max(allowed)} here"
        )
    if spacing not in allowed:
        raise StreamError(
            f"spacing {spacing} leaves {freedom(spacing):.2f} bits of freedom a step over all choices, less than 1; "
            f"at most {max(allowed)} here"
        )
    return spacing
