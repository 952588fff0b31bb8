"""Progressive shrinking (Cai et al., 2020): first the largest subnet alone, then smaller options, one kind after the
other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.errors import SpaceError, StreamError
from weft.keys import generator
from weft.space.choice import Choice
from weft.space.expr import Value
from weft.space.space import Space
from weft.space.stream import Stream
from weft.space.subnet import Subnet

_TRIES = 100


class Shrinking(Stream):
    """The first ``alone`` of the steps trains the last option of every choice; then the options open from the last to
    the first, ``order`` by ``order``, each kind in as many equal parts as it takes.

    A kind is the beginning of the names of its choices, as in ``("kernel", "depth", "expand")``; choices of no kind are
    open from the start of the second part. Depth that opens so is warmed up from the deepest on. Once open, an option
    is as likely as the others.
    """

    name = "shrinking"

    def __init__(
        self, space: Space, steps: int, order: Sequence[str] | str = (), alone: float = 0.2, seed: int = 0
    ) -> None:
        super().__init__(space, seed)
        kinds = tuple(order.split(",")) if isinstance(order, str) else tuple(order)
        if steps < 1 or not 0 <= alone < 1:
            raise StreamError(f"shrinking needs steps >= 1 and 0 <= alone < 1, not {steps} and {alone}")
        for kind in kinds:
            if not any(name.startswith(kind) for name in space.choices):
                raise StreamError(f"no choice begins with '{kind}'; there are {', '.join(list(space.choices)[:8])}")
        self.steps, self.order, self.alone = steps, kinds, alone
        self._largest = space.last()
        self._kind = {name: next((k for k in kinds if name.startswith(k)), "") for name in space.choices}
        self._levels = [(kind, level) for kind in kinds for level in range(1, self._options(kind))]
        self.summary = f"the largest subnet for {alone:.0%} of {steps} steps, then ever more options"

    @property
    def bits(self) -> float:
        """At the end, when all is open."""
        free = [c for name, c in self._rules.choices.items() if name not in self._rules.conditions]
        return sum(math.inf if c.options is None else math.log2(len(c.options)) for c in free)

    def options(self) -> dict[str, object]:
        return {"steps": self.steps, "order": list(self.order), "alone": self.alone}

    def opened(self, index: int) -> dict[str, int]:
        """How many options of each kind are open in a step, from the last on; all of a kind that is not named."""
        begun = self.alone * self.steps
        if index < begun:
            return dict.fromkeys((*self.order, ""), 1)
        part = (self.steps - begun) / max(len(self._levels), 1)
        passed = min(int((index - begun) / part) + 1, len(self._levels)) if self._levels else 0
        found = dict.fromkeys(self.order, 1)
        for kind, level in self._levels[:passed]:
            found[kind] = level + 1
        return found

    def _options(self, kind: str) -> int:
        own = [self.space.choices[name] for name, k in self._kind.items() if k == kind]
        return max(len(choice.options) if choice.options is not None else 1 for choice in own)

    def _step(self, index: int) -> tuple[Subnet, ...]:
        opened = self.opened(index)
        if set(opened.values()) == {1} and index < self.alone * self.steps:
            return (self._largest,)
        rng = generator(self.seed, "shrinking", index)

        def pick(name: str, choice: Choice) -> Value:
            options = choice.options
            if options is None:
                return choice.sample(rng)
            few = options[-min(opened.get(self._kind[name], len(options)), len(options)) :]
            return few[int(rng.random() * len(few))]

        for _ in range(_TRIES):
            try:
                return (self.space.subnet(self._rules.settle(pick)),)
            except SpaceError:  # a constraint forbids it
                continue
        return (self._largest,)
