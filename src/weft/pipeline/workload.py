"""The layers that every micro-batch uses, and what they cost: all that a schedule depends on, without a tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from weft.engine.consistency import Bounded, Consistency, VersionSchedule, version_schedule
from weft.errors import ConsistencyError
from weft.pipeline.scheduler import FORWARDS, Counters, DependenciesOf, Kind, LayerDependency
from weft.space import Stream
from weft.supernet import Chain
from weft.supernet.partition import Cut, stage_of

Costs = Mapping[Hashable, tuple[float, float]]
"""Time of a layer's forward and backward for one micro-batch."""

Picks = Callable[[int], Sequence[tuple[int, Hashable]]]
"""The layers of a micro-batch, as (block, layer), in chain order; a pure function."""

Shares = Callable[[int], list[list[tuple[int, Hashable]]]]
"""The picks of a micro-batch, by stage."""


@dataclass(frozen=True)
class Workload:
    """A run as the scheduler knows it."""

    blocks: int
    microbatches: int
    steps: int
    picks: Picks
    consistency: Callable[[Hashable], Consistency | None]
    """The consistency of a layer; None for a frozen layer, which waits for nothing."""
    costs: Costs | None = None
    sizes: Sequence[float] | None = None
    """Bytes that enter each block in the forward of one micro-batch, and leave it as gradients in its backward."""
    _schedules: dict[tuple[int, Hashable], VersionSchedule | None] = field(default_factory=dict, init=False, repr=False)
    _shares: dict[Cut, Shares] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def total(self) -> int:
        return self.steps * self.microbatches

    def dependencies_of(self, cut: Cut, stage: int) -> DependenciesOf:
        """The layers that micro-batches use on one stage of a cut, for its scheduler."""
        shares = self._shares_of(cut)

        def dependencies(n: int) -> list[LayerDependency]:
            used = []
            reads: dict[int, tuple[int, int, int]] = {}  # most layers have the same schedule: it is read once
            for block, layer in shares(n)[stage]:
                at = self._schedule(block, layer)
                if at is not None:
                    if id(at) not in reads:
                        reads[id(at)] = (at.slot(n), at.forward_reads(n), at.backward_reads(n))
                    used.append(LayerDependency(layer, *reads[id(at)]))
            return used

        return dependencies

    def consistencies(self) -> set[Consistency]:
        """Those of the layers that train, as far as the first 64 micro-batches show."""
        layers = {layer for n in range(min(self.total, 64)) for _, layer in self.picks(n)}
        return {consistency for layer in layers if (consistency := self.consistency(layer)) is not None}

    def counters(self, cut: Cut, stage: int, max_in_flight: int) -> Counters | None:
        """What operations wait for beside versions, where there is one copy of the weights."""
        stages = len(cut) + 1
        if max_in_flight < stages - stage or not single_copy(self.consistencies(), cut, self.blocks):
            return None
        one, block = next(iter(self.consistencies())), (0, *cut)[stage]
        at = version_schedule(one, block, self.blocks, self.microbatches, self.steps)
        return lambda kind, n: forwards_to_await(at, kind, n)

    def _schedule(self, block: int, layer: Hashable) -> VersionSchedule | None:
        key = (block, layer)
        if key not in self._schedules:
            rule = self.consistency(layer)
            made = None if rule is None else version_schedule(rule, block, self.blocks, self.microbatches, self.steps)
            self._schedules[key] = made
        return self._schedules[key]

    def stage_costs(self, cut: Cut, n: int) -> list[tuple[float, float]]:
        """Forward and backward time of micro-batch n on every stage, on devices of speed 1."""
        by_stage = []
        for share in self._shares_of(cut)(n):
            forward = backward = 0.0
            for _, layer in share:
                one = (1.0, 2.0) if self.costs is None else self.costs[layer]
                forward += one[0]
                backward += one[1]
            by_stage.append((forward, backward))
        return by_stage

    def transfers(self, cut: Cut, bandwidth: float | None) -> list[float]:
        """How long a message occupies the link behind every stage but the last, either way; no time where None."""
        if bandwidth is None:
            return [0.0] * len(cut)
        if bandwidth <= 0:
            raise ConsistencyError(f"bandwidth={bandwidth}: bytes per unit of time, more than 0")
        if self.sizes is None:
            raise ConsistencyError("a bandwidth needs the bytes of the messages: give the workload its sizes")
        return [self.sizes[block] / bandwidth for block in cut]

    def expected_costs(self, samples: int = 256) -> list[float]:
        """The mean time of every block over the run, for cutting."""
        sums = [0.0] * self.blocks
        every = max(1, self.total // samples)
        for n in range(0, self.total, every):
            for block, layer in self.picks(n):
                sums[block] += 3.0 if self.costs is None else sum(self.costs[layer])
        return sums

    def _shares_of(self, cut: Cut) -> Shares:
        # All stages ask for the same micro-batches at about the same time: each is divided once.
        if cut not in self._shares:
            stages = stage_of(cut, self.blocks)

            def divide(n: int) -> list[list[tuple[int, Hashable]]]:
                by_stage: list[list[tuple[int, Hashable]]] = [[] for _ in range(len(cut) + 1)]
                for pick in self.picks(n):
                    by_stage[stages[pick[0]]].append(pick)
                return by_stage

            self._shares[cut] = lru_cache(1024)(divide)
        return self._shares[cut]


def chain_workload(
    chain: Chain,
    stream: Stream,
    consistency: Mapping[str, Consistency],
    microbatches: int,
    steps: int,
    costs: Costs | None = None,
    sizes: Sequence[float] | None = None,
) -> Workload:
    """The workload of a real chain: layers with parameters, by name."""
    trained = {name for name in chain.layers if any(p.requires_grad for p in chain.module(name).parameters())}

    def picks(n: int) -> list[tuple[int, Hashable]]:
        subnets = stream[n // microbatches]
        return [(layer.block, layer.name) for layer in chain.route(subnets[n % microbatches % len(subnets)])]

    rules: Mapping[Hashable, Consistency] = {name: consistency[name] for name in trained}
    return Workload(len(chain.blocks), microbatches, steps, picks, rules.get, costs, sizes)


# One copy of the weights is enough under ``bounded`` where the real pipeline is the virtual one.
#
# An update then waits for the forwards that must read the version before it. At most L - 1 micro-batches are in flight
# at that moment, so a window of L = depth - stage never stands in the way, and no older version is ever read.


def virtual_cut(depth: int, blocks: int) -> Cut:
    """The first block of every virtual stage but the first.

    >>> virtual_cut(3, 8)
    (3, 6)
    """
    return tuple(-(-stage * blocks // depth) for stage in range(1, depth))


def common_bounded(consistencies: Iterable[Consistency]) -> Bounded | None:
    """The consistency of all layers, if they have one in common whose backwards read the newest weights."""
    distinct = set(consistencies)
    one = next(iter(distinct)) if len(distinct) == 1 else None
    return one if isinstance(one, Bounded) else None


def single_copy(consistencies: Iterable[Consistency], cut: Cut, blocks: int) -> bool:
    """Whether one copy of the weights is enough for layers with these consistencies on the stages of this cut."""
    one = common_bounded(consistencies)
    return one is not None and len(cut) + 1 == one.depth and tuple(cut) == virtual_cut(one.depth, blocks)


def forwards_to_await(at: VersionSchedule, kind: Kind, n: int) -> list[tuple[Hashable, int]]:
    """A backward that must read an update waits for the forwards that must not."""
    version = at.backward_reads(n) if kind == "B" else 0
    return [(FORWARDS, 1 + at.last_reader(version - 1))] if version else []


def in_flight_limits(stages: int, one_copy: bool, max_in_flight: int | None, microbatches: int = 1) -> list[int]:
    """How many micro-batches each stage may have in flight: ``max_in_flight`` if given, else what one copy needs, else
    those of two steps for every stage, since operations never take equally long."""
    if max_in_flight is not None:
        return [max_in_flight] * stages
    return [stages - stage for stage in range(stages)] if one_copy else [2 * stages * microbatches] * stages
