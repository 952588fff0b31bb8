"""What a step allocates and frees, in order, as a value that can be replayed at any batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

PHASES = ("setup", "forward", "backward", "optimizer")
PARTS = ("weights", "gradients", "optimizer", "batch", "activations", "workspaces")


@dataclass(frozen=True, slots=True)
class Call:
    """An operator with workspaces, which begin with this block, and sketches of its arguments and results."""

    block: int
    name: str
    args: tuple[Any, ...]
    result: Any


@dataclass(frozen=True, slots=True)
class AllocationTimeline:
    """``order`` holds n + 1 where block n is allocated, -(n + 1) where it is freed, and 0 where a phase begins.

    The phases are the set-up, and then forward, backward and optimizer of each step. ``sizes`` are the bytes of each
    block, ``parts`` and ``modules`` what it is of; a block of 0 bytes is none. ``calls`` are the operators whose
    workspaces are among the blocks.
    """

    order: tuple[int, ...]
    sizes: tuple[int, ...]
    parts: tuple[str, ...]
    modules: tuple[str, ...]
    phases: tuple[str, ...]
    calls: tuple[Call, ...] = ()

    def __len__(self) -> int:
        return len(self.sizes)


def in_place(order: Sequence[int], sums: dict[int, tuple[int, ...]]) -> tuple[list[int], dict[int, int]]:
    """The order without the sums that a GPU forms in place, and for each of these blocks the one whose place it takes.

    The autograd engine adds a gradient to an earlier one in place where nobody else holds it, but never with fake
    tensors: there the sum is a new block, and a summand is freed right after. ``sums`` gives the summands of each.
    """
    taken: dict[int, int] = {}
    kept: list[int] = []
    place = 0
    while place < len(order):
        event = order[place]
        if event > 0 and event - 1 in sums:
            summands = sums[event - 1]
            ahead = place + 1
            while ahead < len(order) and order[ahead] < 0:
                ahead += 1
            freed = [-e - 1 for e in order[place + 1 : ahead]]
            old = next((one for one in summands if one in freed), None)
            if old is not None:
                taken[event - 1] = old
                kept += [-1 - one for one in freed if one != old]
                place = ahead
                continue
        kept.append(event)
        place += 1

    # A block that took another's place is known by that one's number from then on, through chains of sums.
    def first(block: int) -> int:
        while block in taken:
            block = taken[block]
        return block

    named = [0 if e == 0 else (first(e - 1) + 1 if e > 0 else -first(-e - 1) - 1) for e in kept]
    return named, {block: first(block) for block in taken}


# A tape with more steps: holes that one step leaves may fit the next one badly, and what is reserved grows.


STEPS = 3
"""Steps after which what is reserved is looked at."""


def repeat_last_step(tape: AllocationTimeline, steps: int = STEPS) -> AllocationTimeline:
    """The tape of two steps with the second repeated, until there are so many; the same tape where the second does not
    end as it began."""
    second = _second(tape)
    if second is None:
        return tape
    begin = [place for place, event in enumerate(tape.order) if event == 0][second - 1]
    found = _carried(tape, begin)
    if found is None:
        return tape
    order, sizes, parts, modules = list(tape.order), list(tape.sizes), list(tape.parts), list(tape.modules)
    now = {block: block for block in range(len(tape))}  # what stands for each block of the second step by now
    for _ in range(steps - 2):
        now |= {old: now[new] for old, new in found.items()}
        for event in tape.order[begin:]:
            block = abs(event) - 1
            if event > 0:
                now[block] = len(sizes)
                sizes.append(tape.sizes[block])
                parts.append(tape.parts[block])
                modules.append(tape.modules[block])
            order.append(0 if event == 0 else now[block] + 1 if event > 0 else -now[block] - 1)
    phases = (*tape.phases, *tape.phases[second:] * (steps - 2))
    return replace(
        tape, order=tuple(order), sizes=tuple(sizes), parts=tuple(parts), modules=tuple(modules), phases=phases
    )


def _second(tape: AllocationTimeline) -> int | None:
    """The phase with which the second step begins."""
    ends = [place for place, phase in enumerate(tape.phases) if phase == "optimizer"]
    return ends[0] + 1 if len(ends) == 2 and ends[0] + 1 < len(tape.phases) else None


def _carried(tape: AllocationTimeline, begin: int) -> dict[int, int] | None:
    """For each block that the second step frees but has not made, the one of its own that the next step frees
    instead: those that it leaves, in the order in which they were made."""
    made = [event - 1 for event in tape.order[begin:] if event > 0]
    freed = {-event - 1 for event in tape.order[begin:] if event < 0}
    older = [event - 1 for event in tape.order[:begin] if event - 1 in freed]
    left = [block for block in made if block not in freed]
    if [tape.sizes[block] for block in older] != [tape.sizes[block] for block in left]:
        return None
    return dict(zip(older, left, strict=True))
