"""The order in which each stage of a pipeline takes its micro-batches: one forward, one backward, then a flush.

stage 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3    Each stage begins with one forward more than the next,
stage 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3    so that stage s of S never holds more than S - s
stage 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3    micro-batches.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from weft.errors import PlanError


class Op(NamedTuple):
    """The forward or backward of one micro-batch on one stage."""

    stage: int
    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def schedule(stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    """What a stage does in a step, in order. Forwards and backwards each come in the order of the micro-batches.

    >>> " ".join(map(str, schedule(1, 3, 4)))
    '1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3'
    """
    if not 0 <= stage < stages or microbatches < 1:
        raise PlanError(f"stage {stage} of {stages} with {microbatches} micro-batches: there is no such schedule")
    ahead = min(stages - stage - 1, microbatches)
    ops = [Op(stage, "F", number) for number in range(ahead)]
    for number in range(microbatches):
        if number + ahead < microbatches:
            ops.append(Op(stage, "F", number + ahead))
        ops.append(Op(stage, "B", number))
    return tuple(ops)
