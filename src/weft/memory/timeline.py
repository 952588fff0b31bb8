"""The allocation timeline: what a step allocates and frees, in order, as a value that an allocator can replay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

PHASES = ("setup", "forward", "backward", "optimizer")
CATEGORIES = ("weights", "gradients", "optimizer", "batch", "activations", "workspaces")


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator with workspaces, the first of which is ``block``, and the shapes of its arguments and results."""

    block: int
    name: str
    args: tuple[Any, ...]
    result: Any


@dataclass(frozen=True, slots=True)
class AllocationTimeline:
    """``events`` holds n + 1 where block n is allocated, -(n + 1) where it is freed, and 0 where a phase begins.

    The phases are the set-up, and then forward, backward and optimizer of each step. Every block has a size in bytes, a
    category and the module that it belongs to; a block of 0 bytes is not allocated. ``calls`` are the operators whose
    workspaces are among the blocks.
    """

    events: tuple[int, ...]
    sizes: tuple[int, ...]
    categories: tuple[str, ...]
    modules: tuple[str, ...]
    phases: tuple[str, ...]
    calls: tuple[OperatorCall, ...] = ()

    def __len__(self) -> int:
        return len(self.sizes)


def sum_in_place(order: Sequence[int], sums: dict[int, tuple[int, ...]]) -> tuple[list[int], dict[int, int]]:
    """The events without the sums that are formed in place, and for each of these blocks the one that it stays in.

    The autograd engine adds a gradient to an earlier one in place where nothing else refers to it, but never with fake
    tensors: there the sum is a new block, and a summand is freed right after. ``sums`` has the summands of each sum.
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


# A timeline with more steps: holes that one step leaves may not fit the next one, and the reserved memory grows.


STEPS = 3
"""Steps that are simulated."""
_OF_BLOCKS = ("sizes", "categories", "modules")


def repeat_last_step(timeline: AllocationTimeline, steps: int = STEPS) -> AllocationTimeline:
    """The timeline of two steps with the second repeated until there are ``steps``.

    It is returned as it is where the second step does not end with the blocks with which it began.
    """
    ends = [place for place, phase in enumerate(timeline.phases) if phase == "optimizer"]
    if len(ends) != 2 or ends[0] + 1 == len(timeline.phases):
        return timeline
    second = ends[0] + 1
    begin = [place for place, event in enumerate(timeline.events) if event == 0][second - 1]
    found = _carried_over(timeline, begin)
    if found is None:
        return timeline
    order = list(timeline.events)
    copied = list(range(len(timeline)))  # for each block, the one whose size, category and module it has
    now = {block: block for block in copied}  # what stands for each block of the second step by now
    for _ in range(steps - 2):
        now |= {old: now[new] for old, new in found.items()}
        for event in timeline.events[begin:]:
            block = abs(event) - 1
            if event > 0:
                now[block] = len(copied)
                copied.append(block)
            order.append(0 if event == 0 else now[block] + 1 if event > 0 else -now[block] - 1)
    columns = {name: tuple(map(getattr(timeline, name).__getitem__, copied)) for name in _OF_BLOCKS}
    phases = (*timeline.phases, *timeline.phases[second:] * (steps - 2))
    return replace(timeline, events=tuple(order), phases=phases, **columns)


def _carried_over(timeline: AllocationTimeline, begin: int) -> dict[int, int] | None:
    """For each older block that the second step frees, the block of its own that the next step frees instead.

    These are the blocks that the second step leaves, in the order of their allocation.
    """
    made = [event - 1 for event in timeline.events[begin:] if event > 0]
    freed = {-event - 1 for event in timeline.events[begin:] if event < 0}
    older = [event - 1 for event in timeline.events[:begin] if event - 1 in freed]
    left = [block for block in made if block not in freed]
    if [timeline.sizes[block] for block in older] != [timeline.sizes[block] for block in left]:
        return None
    return dict(zip(older, left, strict=True))


# Tensors without data or device, at any batch size.


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Shape, strides and size of an element, with the methods of a tensor: all that the rules for workspaces read."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element: int

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.element

    def stride(self, dim: int) -> int:
        return self.strides[dim]

    @property
    def bytes(self) -> int:
        return self.numel() * self.element

    def is_contiguous(self) -> bool:
        return self._is_dense_in(range(self.dim()))

    def has_channels_last(self) -> bool:
        """Whether it is dense in NHWC order."""
        return self.dim() > 2 and self._is_dense_in((0, *range(2, self.dim()), 1))

    def _is_dense_in(self, order: Sequence[int]) -> bool:
        step = 1
        for dim in reversed(order):
            if self.shape[dim] != 1 and self.strides[dim] != step:
                return False
            step *= self.shape[dim]
        return True


def to_shapes(value: Any) -> Any:
    """Arguments or results of an operator with a `TensorShape` in place of every tensor."""
    if isinstance(value, Tensor):
        return TensorShape(tuple(value.shape), value.stride(), value.element_size())
    if isinstance(value, (tuple, list)):
        return tuple(to_shapes(one) for one in value)
    return value


def weighted_sum(values: Sequence[Any], shares: Sequence[int], whole: int) -> Any:
    """The sum of the values, each weighted by its share of ``whole``; what is not a number is as in the first value.

    >>> weighted_sum([(2, "a"), (4, "a")], [-1, 2], 1)
    (6, 'a')
    """
    first = values[0]
    if isinstance(first, TensorShape):
        shape = weighted_sum([one.shape for one in values], shares, whole)
        return TensorShape(shape, weighted_sum([one.strides for one in values], shares, whole), first.element)
    if isinstance(first, tuple):
        return tuple(weighted_sum(each, shares, whole) for each in zip(*values, strict=True))
    if isinstance(first, int) and not isinstance(first, bool) and any(one != first for one in values):
        total = sum(one * share for one, share in zip(values, shares, strict=True))
        return max(0, (2 * total + whole) // (2 * whole))
    return first
