"""Which version of a layer's weights the forward and the backward of a micro-batch read.

Micro-batches are counted over the run: n = step * m + j. Each belongs to one *slot*, the set of micro-batches whose
gradients make one update, and the version ``v`` of a layer is its weights after the updates of all slots below v:

    exact                slot = step             forward and backward of step i read version i
    delayed(D)           slot = step             ... read version max(i - D, 0)
    lagged(K)            slot = step // K = w    ... read version max(w - 1, 0)
    bounded(K, depth)    slot = n // K           forward reads floor(max(n + 1 - L, 0) / K), backward floor(n / K)
    stashed(K, depth)    slot = n // K           both read floor(max(n + 1 - L, 0) / K)

with L = depth - v for a layer in virtual stage v = floor(block * depth / blocks).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import ClassVar

from weft.errors import ConsistencyError, nearest


class _Written:
    """Prints as it is written in a configuration: ``exact``, ``lagged(4)``."""

    __slots__ = ()
    name: ClassVar[str]
    least: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            if getattr(self, entry.name) < self.least:
                raise ConsistencyError(f"{self}: {entry.name} is a whole number, {self.least} or more")

    def __str__(self) -> str:
        numbers = ", ".join(str(getattr(self, entry.name)) for entry in fields(self))  # type: ignore[arg-type]
        return f"{self.name}({numbers})" if numbers else self.name


@dataclass(frozen=True, slots=True)
class Exact(_Written):
    """A step reads the updates of every earlier step that uses the layer."""

    name: ClassVar[str] = "exact"


@dataclass(frozen=True, slots=True)
class Delayed(_Written):
    """Step i reads the updates of exactly the steps j < i - steps; one update a step."""

    steps: int
    name: ClassVar[str] = "delayed"
    least: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class Lagged(_Written):
    """Windows of ``steps`` steps; window w reads the updates of windows 0..w-2; one update a window."""

    steps: int
    name: ClassVar[str] = "lagged"


@dataclass(frozen=True, slots=True)
class VirtualPipeline(_Written):
    """The consistencies of a virtual pipeline of ``depth`` stages, with an update every ``every`` micro-batches."""

    every: int
    depth: int


@dataclass(frozen=True, slots=True)
class Bounded(VirtualPipeline):
    """PACI: the backward computes with the activations of its forward and the newest weights, which are at most
    ceil((L - 1) / K) updates newer. One copy of the weights is enough where the pipeline has ``depth`` stages."""

    name: ClassVar[str] = "bounded"


@dataclass(frozen=True, slots=True)
class Stashed(VirtualPipeline):
    """PipeDream: as ``bounded``, but the backward reads the version of its forward, which is kept until then."""

    name: ClassVar[str] = "stashed"


Consistency = Exact | Delayed | Lagged | Bounded | Stashed

_KINDS: dict[str, Callable[..., Consistency]] = {kind.name: kind for kind in (Exact, Delayed, Lagged, Bounded, Stashed)}


def parse_consistency(text: str) -> Consistency:
    """The consistency that a text such as ``lagged(4)`` names.

    >>> parse_consistency("bounded(8, 4)")
    Bounded(every=8, depth=4)
    """
    match = re.fullmatch(r"\s*([A-Za-z]+)\s*(?:\(\s*([\d\s,]*)\s*\))?\s*", text)
    if match is None or match[1] not in _KINDS:
        word = match[1] if match else text
        raise ConsistencyError(f"unknown consistency '{text}'{nearest(word, _KINDS)}")
    kind = _KINDS[match[1]]
    wanted = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    numbers = [int(number) for number in re.findall(r"\d+", match[2] or "")]
    if len(numbers) != len(wanted):
        form = f"{match[1]}({', '.join(wanted)})" if wanted else match[1]
        raise ConsistencyError(f"'{text}' has {len(numbers)} numbers; write it as {form}")
    return kind(*numbers)


@dataclass(frozen=True, slots=True)
class VersionSchedule:
    """The formulas of one layer in one run: ``m`` micro-batches a step, ``total`` of them in all."""

    consistency: Consistency
    m: int
    total: int
    window: int = 1
    """L of a virtual pipeline: how many micro-batches the layer's virtual stage holds."""

    def slot(self, n: int) -> int:
        """The update that micro-batch n contributes to."""
        return n // self.microbatches_per_update

    def forward_reads(self, n: int) -> int:
        """The version that the forward of micro-batch n reads."""
        match self.consistency:
            case Delayed(steps):
                return max(self.slot(n) - steps, 0)
            case Lagged():
                return max(self.slot(n) - 1, 0)
            case VirtualPipeline(every, _):
                return max(n + 1 - self.window, 0) // every
            case _:
                return self.slot(n)

    def backward_reads(self, n: int) -> int:
        """The version that the backward of micro-batch n reads."""
        return self.slot(n) if self.backward_reads_newest else self.forward_reads(n)

    @property
    def backward_reads_newest(self) -> bool:
        """Whether a backward reads the newest version, and not that of its forward."""
        return isinstance(self.consistency, Bounded)

    @property
    def max_version_lag(self) -> int:
        """The most updates that a backward may be ahead of its forward."""
        return -(-(self.window - 1) // self.microbatches_per_update) if self.backward_reads_newest else 0

    def last_reader(self, version: int) -> int:
        """The last micro-batch of the run whose forward reads the version, or an older one."""
        return min((version + 1) * self.microbatches_per_update + self.window - 2, self.total - 1)

    def last_microbatch(self, slot: int) -> int:
        """The last micro-batch of a slot; its step's learning rate is the update's. The run's last slot may be
        short."""
        return min((slot + 1) * self.microbatches_per_update, self.total) - 1

    def steps(self, slot: int) -> range:
        """The steps whose micro-batches a slot holds."""
        return range(slot * self.microbatches_per_update // self.m, self.last_microbatch(slot) // self.m + 1)

    @property
    def microbatches_per_update(self) -> int:
        """Micro-batches in a full slot."""
        match self.consistency:
            case Lagged(steps):
                return steps * self.m
            case VirtualPipeline(every, _):
                return every
            case _:
                return self.m


_equal_schedules = lru_cache(4096)(VersionSchedule)
"""Equal schedules are one object."""


def version_schedule(consistency: Consistency, block: int, blocks: int, m: int, steps: int) -> VersionSchedule:
    """The schedule of a layer in the given block; raises ConsistencyError where the run cannot keep its consistency."""
    window = 1
    if isinstance(consistency, VirtualPipeline):
        if consistency.every % m:
            raise ConsistencyError(
                f"{consistency} needs K to be a multiple of the {m} micro-batches of a step: "
                f"use K = {m * -(-consistency.every // m)}"
            )
        if consistency.depth > blocks:
            raise ConsistencyError(
                f"{consistency} asks for {consistency.depth} virtual stages, but the chain has {blocks} blocks: "
                f"use a depth of at most {blocks}"
            )
        window = consistency.depth - block * consistency.depth // blocks
    return _equal_schedules(consistency, m, steps * m, window)
