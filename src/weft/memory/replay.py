"""Replaying a tape through the simulated allocator: peaks by phase, and what the highest one consists of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from weft.memory.allocator import (
    AllocatorConfig,
    CachingAllocator,
    ExactAllocator,
    ExpandableAllocator,
    OutOfMemory,
    orders,
)
from weft.memory.timeline import PARTS, PHASES, AllocationTimeline, repeat_last_step


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes; of phases those of the last step, of parts and modules those at the highest point."""

    allocated: int
    reserved: int
    phases: Mapping[str, int]
    parts: Mapping[str, int]
    modules: Mapping[str, Mapping[str, int]]


def makers(rules: AllocatorConfig | None = None) -> tuple[Callable[..., CachingAllocator], ...]:
    """What makes allocators, perhaps with a ``limit``: one for each way in which things may turn out. All that one of
    them makes belong to one process.

    Where the driver puts a segment depends on all that the process ever mapped, and which of two holes is filled first
    depends on that. An expandable segment has its addresses from the start."""
    if rules is not None and rules.exact:
        return (partial(ExactAllocator, rules),)
    if rules is not None and rules.expandable:
        return (partial(ExpandableAllocator, rules),)
    return tuple(partial(CachingAllocator, rules, addresses=order) for order in orders())


def replay(tape: AllocationTimeline, rules: AllocatorConfig | None = None) -> Peaks:
    """The peaks of a tape on a device that has enough; of what may be reserved, the largest figure."""
    tape = repeat_last_step(tape)
    allocator, *others = (make() for make in makers(rules))
    for other in others:
        _run(tape, other)
    blocks = {}
    phases: dict[str, int] = {}
    phase = 0
    best, moment = -1, 0
    now = 0
    for place, event in enumerate(tape.order):
        if event == 0:
            if tape.phases[phase] in ("setup", "optimizer"):
                phases.clear()  # a new step
            phase += 1
            name = tape.phases[phase]
            phases[name] = max(allocator.allocated, phases.get(name, 0))
        elif tape.sizes[abs(event) - 1] == 0:
            continue
        elif event > 0:
            blocks[event] = allocator.alloc(tape.sizes[event - 1])
            now = allocator.allocated
            name = tape.phases[phase]
            if now > phases.get(name, -1):
                phases[name] = now
            if now > best:
                best, moment = now, place
        else:
            allocator.free(blocks.pop(-event))
    parts, modules = _held(tape, moment, allocator)
    reserved = max(each.reserved_peak for each in (allocator, *others))
    return Peaks(allocator.peak, reserved, {n: phases.get(n, 0) for n in PHASES[1:]}, parts, modules)


def fits(tape: AllocationTimeline, memory: int, rules: AllocatorConfig | None = None) -> bool:
    """Whether the steps of a tape run within so many bytes, cached ones being given back where that helps, wherever
    the segments lie."""
    tape = repeat_last_step(tape)
    try:
        for make in makers(rules):
            _run(tape, make(limit=memory))
    except OutOfMemory:
        return False
    return True


def _run(tape: AllocationTimeline, allocator: CachingAllocator) -> None:
    blocks = {}
    for event in tape.order:
        if event == 0 or tape.sizes[abs(event) - 1] == 0:
            continue
        if event > 0:
            blocks[event] = allocator.alloc(tape.sizes[event - 1])
        else:
            allocator.free(blocks.pop(-event))


def _held(
    tape: AllocationTimeline, moment: int, allocator: CachingAllocator
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    alive: set[int] = set()
    for event in tape.order[: moment + 1]:
        if event > 0:
            alive.add(event - 1)
        elif event < 0:
            alive.discard(-event - 1)
    parts = dict.fromkeys((*PARTS, "rounding"), 0)
    modules: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for block in alive:
        size, part = tape.sizes[block], tape.parts[block]
        parts[part] += size
        parts["rounding"] += allocator.rounded(size) - size if size else 0
        modules[tape.modules[block]][part] += size
    return parts, {name: dict(held) for name, held in sorted(modules.items())}
