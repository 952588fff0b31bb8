"""Streams: the subnets of every step, as a pure function of the seed and the step."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from weft.errors import StreamError
from weft.keys import generator
from weft.space import moves
from weft.space.rules import Rules
from weft.space.space import Space
from weft.space.subnet import Subnet


class Stream(ABC):
    """`stream[i]` holds the subnets of step i, one for each micro-batch, or a single one for all of them.

    The space is taken as it is when the stream is made. `length` is None for a stream without end.
    """

    name: str
    summary: str  # what a step is, in a few words
    microbatches: int | None = None  # None: any number
    length: int | None = None

    def __init__(self, space: Space, seed: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise StreamError(f"a seed is an integer, not {seed!r}")
        self.space = space
        self.seed = seed
        self._rules = space.rules

    @property
    def space_id(self) -> str:
        """The id that the space had when the stream was made."""
        return self._rules.layout.space_id

    @property
    @abstractmethod
    def bits(self) -> float:
        """The freedom of a step, in bits."""

    @abstractmethod
    def _step(self, index: int) -> tuple[Subnet, ...]: ...

    def options(self) -> dict[str, object]:
        """What else it takes to make this stream again, as JSON."""
        return {}

    def describe(self) -> str:
        """One line for a person."""
        return f"{self.name}: {self.summary}; {self.bits:.1f} bits a step"

    def to_json(self) -> dict[str, object]:
        """What `make_stream` takes to make this stream again."""
        return {"stream": self.name, "space": self.space_id, "seed": self.seed, **self.options()}

    def __getitem__(self, index: int) -> tuple[Subnet, ...]:
        try:
            step = operator.index(index)
        except TypeError:
            raise StreamError(f"a step is an integer, not {index!r}") from None
        if step < 0 or isinstance(index, bool):
            raise StreamError(f"a step is an integer from 0 on, not {index!r}")
        if self.length is not None and step >= self.length:
            raise StreamError(f"step {step} is beyond the end of the {self.name} stream, which has {self.length} steps")
        return self._step(step)

    def __iter__(self) -> Iterator[tuple[Subnet, ...]]:
        step = 0
        while self.length is None or step < self.length:
            yield self[step]
            step += 1

    def __repr__(self) -> str:
        return f"Stream({self.describe()})"


class Iid(Stream):
    """Every step draws every choice anew, uniformly."""

    name = "iid"
    summary = "every step draws every choice anew"

    @property
    def bits(self) -> float:
        """Summed over the choices that are always active: exact where all are and nothing constrains them."""
        return always_active_bits(self._rules, math.log2)

    def _step(self, index: int) -> tuple[Subnet, ...]:
        return (moves.sample(self._rules, generator(self.seed, "iid", index)),)


class Fixed(Stream):
    """Every step uses the same subnet."""

    name = "fixed"
    summary = "every step uses the same subnet"
    bits = 0.0

    def __init__(self, space: Space, subnet: Subnet, seed: int = 0) -> None:
        super().__init__(space, seed)
        space.check(subnet)
        self._step_subnets = (subnet,)

    def options(self) -> dict[str, object]:
        return {"subnet": self._step_subnets[0].to_json()}

    def _step(self, index: int) -> tuple[Subnet, ...]:
        return self._step_subnets


class Sandwich(Stream):
    """A step of r + 2 micro-batches: the largest subnet, the smallest, and r random ones.

    Largest and smallest are the last and first option of every choice unless given.
    """

    name = "sandwich"

    def __init__(
        self, space: Space, r: int = 2, seed: int = 0, largest: Subnet | None = None, smallest: Subnet | None = None
    ) -> None:
        super().__init__(space, seed)
        if isinstance(r, bool) or not isinstance(r, int) or r < 0:
            raise StreamError(f"a sandwich has r >= 0 random subnets, got {r!r}")
        self.r = r
        self.largest = space.last() if largest is None else largest
        self.smallest = space.first() if smallest is None else smallest
        space.check(self.largest)
        space.check(self.smallest)
        self.microbatches = 2 + r
        self.summary = f"every step uses the largest subnet, the smallest and {r} random ones"

    @property
    def bits(self) -> float:
        return self.r * always_active_bits(self._rules, math.log2) if self.r else 0.0

    def options(self) -> dict[str, object]:
        return {"r": self.r, "largest": self.largest.to_json(), "smallest": self.smallest.to_json()}

    def _step(self, index: int) -> tuple[Subnet, ...]:
        rngs = (generator(self.seed, "sandwich", index, part) for part in range(self.r))
        return (self.largest, self.smallest, *(moves.sample(self._rules, rng) for rng in rngs))


def always_active_bits(rules: Rules, bits: Callable[[int], float]) -> float:
    """The sum of bits(number of options) over the choices without a condition; infinite with a real one."""
    chosen = [choice for name, choice in rules.choices.items() if name not in rules.conditions]
    return sum((math.inf if choice.options is None else bits(len(choice.options)) for choice in chosen), 0.0)
