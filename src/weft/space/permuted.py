"""Streams of permutations: each choice goes through all its options, round after round, so that none is neglected."""

from __future__ import annotations

from weft.errors import StreamError
from weft.keys import generator
from weft.space.choice import Choice
from weft.space.expr import Value
from weft.space.space import Space
from weft.space.spaced import SpacedOrder, bits_per_step, log2_factorial
from weft.space.stream import Stream, always_active_bits
from weft.space.subnet import Subnet


class Permuted(Stream):
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
        self._orders: dict[str, FairOrder | SpacedOrder] = {}

    def _step(self, index: int) -> tuple[Subnet, ...]:
        orders = self._orders

        def pick(name: str, choice: Choice) -> Value:
            options = choice.options
            assert options is not None
            return options[orders[name].at(index)] if len(options) > 1 else options[0]

        return (self._rules.subnet(self._rules.settle(pick)),)


class Fair(Permuted):
    """Strict fairness: the rounds of each choice are independent permutations of its options."""

    name = "fair"
    summary = "each choice uses every option once a round"

    def __init__(self, space: Space, seed: int = 0) -> None:
        super().__init__(space, seed)
        self._orders = {name: FairOrder(seed, name, count) for name, count in self._counts.items()}

    @property
    def bits(self) -> float:
        return always_active_bits(self._rules, lambda count: log2_factorial(count) / count)


class Spaced(Permuted):
    """Fair, and any `spacing` consecutive steps use different options of every choice (those with one option apart).

    By default three quarters of the smallest choice; less than 1 bit of freedom a step over all choices is refused.
    """

    name = "spaced"

    def __init__(self, space: Space, spacing: int | None = None, seed: int = 0) -> None:
        super().__init__(space, seed)
        counts = [count for count in self._counts.values() if count > 1]
        self.spacing = _checked_spacing(counts, spacing)
        self.summary = f"any {self.spacing} consecutive steps use different options of every choice"
        self._orders = {
            name: SpacedOrder(seed, name, count, min(self.spacing, count)) for name, count in self._counts.items()
        }

    @property
    def bits(self) -> float:
        return always_active_bits(self._rules, lambda count: bits_per_step(count, min(self.spacing, count)))

    def options(self) -> dict[str, object]:
        return {"spacing": self.spacing}


class FairOrder:
    """The rounds of one choice: independent permutations, each keyed by its number."""

    def __init__(self, seed: int, name: str, count: int) -> None:
        self.count = count
        self._key = (seed, "fair", name)
        self._rounds: dict[int, list[int]] = {}

    def at(self, step: int) -> int:
        """The index of the option at this step."""
        number, place = divmod(step, self.count)
        order = self._rounds.get(number)
        if order is None:
            drawn: list[int] = generator(*self._key, number).random(self.count).argsort(kind="stable").tolist()
            kept = {known: order for known, order in self._rounds.items() if abs(known - number) < 16}
            self._rounds = {**kept, number: drawn}
            order = drawn
        return order[place]


def _checked_spacing(counts: list[int], spacing: int | None) -> int:
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
