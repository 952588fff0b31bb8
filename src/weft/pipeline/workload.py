"""Which layers every micro-batch uses, and what they cost: all that a schedule depends on, without a tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from weft.pipeline.consistency import Clock, Consistency, clock
from weft.pipeline.cut import Cut, stage_of
from weft.pipeline.scheduler import Need, Uses
from weft.space import Stream
from weft.supernet import Chain

Costs = Mapping[Hashable, tuple[float, float]]
"""Time of a layer's forward and backward for one micro-batch."""

Picks = Callable[[int], Sequence[tuple[int, Hashable]]]
"""The layers of a micro-batch, as (block, layer), in chain order; a pure function."""


@dataclass(frozen=True)
class Workload:
    """A run as the scheduler sees it."""

    blocks: int
    microbatches: int
    steps: int
    picks: Picks
    consistency: Callable[[Hashable], Consistency | None]
    """What a layer promises; None for a layer that is frozen and waits for nobody."""
    costs: Costs | None = None
    _clocks: dict[tuple[int, Hashable], Clock | None] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def total(self) -> int:
        """Micro-batches in the run."""
        return self.steps * self.microbatches

    def uses(self, cut: Cut, stage: int) -> Uses:
        """The needs of a micro-batch on one stage of a cut, as a scheduler takes them."""
        stages = stage_of(cut, self.blocks)

        def needs(n: int) -> list[Need]:
            found = []
            for block, layer in self.picks(n):
                if stages[block] == stage:
                    at = self._clock(block, layer)
                    if at is not None:
                        found.append(Need(layer, at.slot(n), at.forward_reads(n), at.backward_reads(n)))
            return found

        return needs

    def stage_costs(self, cut: Cut, n: int) -> list[tuple[float, float]]:
        """Forward and backward time of micro-batch n on every stage."""
        stages = stage_of(cut, self.blocks)
        found = [[0.0, 0.0] for _ in range(len(cut) + 1)]
        for block, layer in self.picks(n):
            forward, backward = (1.0, 2.0) if self.costs is None else self.costs[layer]
            found[stages[block]][0] += forward
            found[stages[block]][1] += backward
        return [(forward, backward) for forward, backward in found]

    def expected_costs(self, samples: int = 256) -> list[float]:
        """The mean time of every block over the run, for cutting."""
        sums = [0.0] * self.blocks
        every = max(1, self.total // samples)
        for n in range(0, self.total, every):
            for block, layer in self.picks(n):
                sums[block] += 3.0 if self.costs is None else sum(self.costs[layer])
        return sums

    def _clock(self, block: int, layer: Hashable) -> Clock | None:
        key = (block, layer)
        if key not in self._clocks:
            promised = self.consistency(layer)
            self._clocks[key] = (
                None if promised is None else clock(promised, block, self.blocks, self.microbatches, self.steps)
            )
        return self._clocks[key]


def chain_workload(
    chain: Chain,
    stream: Stream,
    consistency: Mapping[str, Consistency],
    microbatches: int,
    steps: int,
    costs: Costs | None = None,
) -> Workload:
    """The workload of a real chain: layers with parameters, by name."""
    trained = {name for name in chain.layers if any(p.requires_grad for p in chain.module(name).parameters())}

    def picks(n: int) -> list[tuple[int, Hashable]]:
        subnets = stream[n // microbatches]
        return [(layer.block, layer.name) for layer in chain.route(subnets[n % microbatches % len(subnets)])]

    def promised(layer: Hashable) -> Consistency | None:
        return consistency[str(layer)] if layer in trained else None

    return Workload(len(chain.blocks), microbatches, steps, picks, promised, costs)
