"""A tape with more steps: holes that one step leaves may fit the next one badly, and what is reserved grows."""

from __future__ import annotations

from dataclasses import replace

from weft.plan.memory.tape import Tape

STEPS = 3
"""Steps after which what is reserved is looked at."""


def lasting(tape: Tape, steps: int = STEPS) -> Tape:
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


def _second(tape: Tape) -> int | None:
    """The phase with which the second step begins."""
    ends = [place for place, phase in enumerate(tape.phases) if phase == "optimizer"]
    return ends[0] + 1 if len(ends) == 2 and ends[0] + 1 < len(tape.phases) else None


def _carried(tape: Tape, begin: int) -> dict[int, int] | None:
    """For each block that the second step frees but has not made, the one of its own that the next step frees
    instead: those that it leaves, in the order in which they were made."""
    made = [event - 1 for event in tape.order[begin:] if event > 0]
    freed = {-event - 1 for event in tape.order[begin:] if event < 0}
    older = [event - 1 for event in tape.order[:begin] if event - 1 in freed]
    left = [block for block in made if block not in freed]
    if [tape.sizes[block] for block in older] != [tape.sizes[block] for block in left]:
        return None
    return dict(zip(older, left, strict=True))
