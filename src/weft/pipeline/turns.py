"""Whose turn it is: which of the stages that share a rank works next, decided from what each of them could do.

A rank does forwards and backwards by turns, where both are ready. In a loop it takes micro-batches in groups of as many
as there are ranks, so that a group comes back for its next stage when the last of it has left (drawn: rank 0 of 2 with
the stages 0 and 2); in a v the smallest micro-batch goes first.

    0F0 0F1 2F0 2F1 0F2 0F3 2B0 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3

This is the order of interleaved 1F1B, but found from what is ready, so that it holds under any timing. Backwards first,
as on a rank with a single stage, would leave the ranks behind without forwards and cost half of what a loop gains.
The simulator asks here, and so does the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.pipeline.scheduler import Kind, Op, Scheduler


def choose(offers: Sequence[Op], kinds: Sequence[Kind], group: int) -> Op:
    """Of operations that stages of one rank could do, the one that it does: the first of these kinds that is there, the
    first group of micro-batches, and within a group stage by stage, forwards from the first and backwards from the
    last.

    >>> could = [Op(0, "F", 4), Op(2, "F", 1), Op(0, "B", 1), Op(2, "B", 1)]
    >>> str(choose(could, "EFBW", 2)), str(choose(could, "BEFW", 2))
    ('2F1', '2B1')
    """

    def turn(op: Op) -> tuple[int, int, int, int]:
        return (
            kinds.index(op.kind),
            op.microbatch // group,
            op.stage if op.kind in ("F", "E") else -op.stage,
            op.microbatch,
        )

    return min(offers, key=turn)


class Turns:
    """The schedulers of one rank; ``group`` is that of its placement.

    A rule that prefers forwards (GPipe) has them first here too; any other takes turns.
    """

    def __init__(self, schedulers: Sequence[Scheduler], group: int) -> None:
        self._schedulers = {scheduler.stage: scheduler for scheduler in schedulers}
        self._only = schedulers[0] if len(schedulers) == 1 else None
        self._group = group
        self._alternate = schedulers[0].rule.prefer != "forward"
        self._last: Kind = "B"

    def next(self) -> Op | None:
        """The operation to start now, which is then in flight; None where the rank has to wait."""
        if self._only is not None:
            return self._only.next()
        offers = [op for scheduler in self._schedulers.values() for op in scheduler.offers()]
        if not offers:
            return None
        op = choose(offers, _BACKWARDS if self._alternate and self._last == "F" else _FORWARDS, self._group)
        if op.kind in ("F", "B"):
            self._last = op.kind
        return self._schedulers[op.stage].next(op.kind)


_BACKWARDS: tuple[Kind, ...] = ("B", "E", "F", "W")
_FORWARDS: tuple[Kind, ...] = ("E", "F", "B", "W")
