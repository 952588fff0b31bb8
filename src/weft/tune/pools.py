"""What a step reserves where it is captured: its forwards and backwards have a pool of memory of their own."""

from __future__ import annotations

from collections.abc import Callable

from weft.plan.memory.allocator import CachingAllocator, Rules
from weft.plan.memory.replay import makers
from weft.plan.memory.steady import lasting
from weft.plan.memory.tape import Tape


def reserved_apart(tape: Tape, rules: Rules) -> int:
    """Bytes that are reserved at most: what one pool has free, the other cannot use.

    The batch lies outside, with the weights and the optimizer's states. Nobody knows where a worker's segments lie: the
    largest figure counts.
    """
    tape = lasting(tape)
    return max(_reserved(tape, make) for make in makers(rules))


def _reserved(tape: Tape, make: Callable[[], CachingAllocator]) -> int:
    outside, inside = make(), make()
    blocks = {}
    phase = most = 0
    for event in tape.order:
        number = abs(event) - 1
        if event == 0:
            phase += 1
        elif event > 0 and tape.sizes[number]:
            captured = tape.phases[phase] in ("forward", "backward") and tape.parts[number] != "batch"
            pool = inside if captured else outside
            blocks[number] = pool, pool.alloc(tape.sizes[number])
            most = max(most, outside.reserved + inside.reserved)
        elif event < 0 and tape.sizes[number]:
            pool, block = blocks.pop(number)
            pool.free(block)
    return most
