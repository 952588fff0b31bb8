"""Replays a timeline through the simulated allocator: peaks by phase, and what the highest one consists of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from weft.memory.allocator import (
    AllocationFailed,
    AllocatorConfig,
    CachingAllocator,
    ExactAllocator,
    ExpandableAllocator,
    MonotonicAddresses,
    SlotAddresses,
)
from weft.memory.timeline import CATEGORIES, PHASES, AllocationTimeline, repeat_last_step


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes. Phases are of the last step; parts and modules are at the highest point."""

    allocated: int
    reserved: int
    phases: Mapping[str, int]
    parts: Mapping[str, int]
    modules: Mapping[str, Mapping[str, int]]


def allocator_factories(config: AllocatorConfig | None = None) -> tuple[Callable[..., CachingAllocator], ...]:
    """Factories of allocators, with an optional ``limit``: one for each order of addresses that the driver may use.

    Allocators of one factory share their addresses, as the pools of a process do. An expandable segment has its
    addresses from the start, so it needs one factory only.
    """
    if config is not None and config.exact:
        return (partial(ExactAllocator, config),)
    if config is not None and config.expandable:
        return (partial(ExpandableAllocator, config),)
    orders = SlotAddresses(), MonotonicAddresses(), MonotonicAddresses(down=True)
    return tuple(partial(CachingAllocator, config, addresses=order) for order in orders)


def replay(timeline: AllocationTimeline, config: AllocatorConfig | None = None) -> PeakMemory:
    """The peaks of a timeline on a device with enough memory; of the possible reserved bytes, the largest."""
    timeline = repeat_last_step(timeline)
    allocator, *others = (make() for make in allocator_factories(config))
    reserved = max((_reserved(timeline, other) for other in others), default=0)
    phases: dict[str, int] = {}
    best = moment = 0
    for place, phase in _events(timeline, allocator):
        if timeline.events[place] == 0 and timeline.phases[phase - 1] in ("setup", "optimizer"):
            phases.clear()  # a new step
        name = timeline.phases[phase]
        phases[name] = max(allocator.allocated, phases.get(name, 0))
        if allocator.allocated > best:
            best, moment = allocator.allocated, place
    parts, modules = _breakdown(timeline, moment)
    parts["rounding"] = best - sum(parts.values())
    reserved = max(reserved, allocator.reserved_peak)
    return PeakMemory(best, reserved, {name: phases.get(name, 0) for name in PHASES[1:]}, parts, modules)


def fits(timeline: AllocationTimeline, memory: int, config: AllocatorConfig | None = None) -> bool:
    """Whether the steps run within so many bytes, wherever the segments lie; the cache is released where needed."""
    timeline = repeat_last_step(timeline)
    try:
        for make in allocator_factories(config):
            _reserved(timeline, make(limit=memory))
    except AllocationFailed:
        return False
    return True


def reserved_in_two_pools(timeline: AllocationTimeline, config: AllocatorConfig) -> int:
    """Bytes that are reserved at most where forwards and backwards are CUDA graphs with a pool of memory of their own.

    What one pool has free, the other cannot use. The batch lies outside, with the weights and the optimizer's states.
    Nobody knows where a process's segments lie: the largest figure counts.
    """
    timeline = repeat_last_step(timeline)
    return max(_reserved(timeline, make(), make()) for make in allocator_factories(config))


def _reserved(timeline: AllocationTimeline, outside: CachingAllocator, inside: CachingAllocator | None = None) -> int:
    """Bytes that are reserved at most; what graphs allocate lies ``inside``, if there is such a pool."""
    pools = [outside] if inside is None else [outside, inside]
    return max(sum(pool.reserved for pool in pools) for _ in _events(timeline, outside, inside))


def _events(
    timeline: AllocationTimeline, outside: CachingAllocator, inside: CachingAllocator | None = None
) -> Iterator[tuple[int, int]]:
    """Replays the timeline; the places of each event and of its phase, once it has happened."""
    blocks = {}
    phase = 0
    for place, event in enumerate(timeline.events):
        number = abs(event) - 1
        if event == 0:
            phase += 1
        elif event > 0 and timeline.sizes[number]:
            captured = timeline.phases[phase] in ("forward", "backward") and timeline.categories[number] != "batch"
            pool = inside if captured and inside is not None else outside
            blocks[number] = pool, pool.alloc(timeline.sizes[number])
        elif event < 0 and timeline.sizes[number]:
            pool, block = blocks.pop(number)
            pool.free(block)
        yield place, phase


def _breakdown(timeline: AllocationTimeline, moment: int) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    alive: set[int] = set()
    for event in timeline.events[: moment + 1]:
        if event > 0:
            alive.add(event - 1)
        elif event < 0:
            alive.discard(-event - 1)
    parts = dict.fromkeys(CATEGORIES, 0)
    modules: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for block in alive:
        size, part = timeline.sizes[block], timeline.categories[block]
        parts[part] += size
        modules[timeline.modules[block]][part] += size
    return parts, {name: dict(held) for name, held in sorted(modules.items())}
