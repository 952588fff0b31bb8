"""The placement: which rank runs which stages, where a chain is cut into more stages than there are ranks.

    line   rank 0: 0    rank 1: 1    rank 2: 2        a stage a rank
    loop   rank 0: 0 3  rank 1: 1 4  rank 2: 2 5      interleaved stages, which shorten filling and draining
    v      rank 0: 0 5  rank 1: 1 4  rank 2: 2 3      the first and the last stage on one rank

A placement is a matter of time and memory: the result of a run never depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from weft.errors import ConsistencyError, nearest

SHAPES = ("line", "loop", "v")


@dataclass(frozen=True, slots=True)
class Placement:
    """``chunks`` stages on each of ``ranks`` ranks; the first stage is always on rank 0."""

    ranks: int
    chunks: int = 1
    shape: str = "line"

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ConsistencyError(f"unknown placement '{self.shape}'{nearest(self.shape, SHAPES)}")
        if self.ranks < 1 or self.chunks < 1:
            raise ConsistencyError(f"a placement of {self.chunks} stages on each of {self.ranks} ranks: 1 or more each")
        if self.shape == "line" and self.chunks != 1:
            raise ConsistencyError(
                f"placement 'line' has one stage a rank, not {self.chunks}: use 'loop', or as many ranks as stages"
            )
        if self.shape == "v" and self.chunks != 2:
            raise ConsistencyError(
                f"placement 'v' has two stages a rank, one there and one back, not {self.chunks}: "
                f"use {2 * self.ranks} stages on {self.ranks} ranks, or 'loop'"
            )

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def group(self) -> int:
        """Micro-batches that a rank takes through one of its stages before it turns to the next; see ``turns``."""
        return self.ranks if self.shape == "loop" else 1

    def rank_of(self, stage: int) -> int:
        """The rank that runs a stage."""
        if not 0 <= stage < self.stages:
            raise ConsistencyError(f"there is no stage {stage}: {self} has the stages 0 to {self.stages - 1}")
        chunk, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.shape == "v" and chunk else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the chain."""
        if not 0 <= rank < self.ranks:
            raise ConsistencyError(f"there is no rank {rank}: {self} has the ranks 0 to {self.ranks - 1}")
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def links(self) -> tuple[tuple[int, int], ...]:
        """The pairs of ranks that send each other messages, smaller rank first, in order.

        >>> Placement(4, 2, "loop").links()
        ((0, 1), (0, 3), (1, 2), (2, 3))
        """
        ranks = [self.rank_of(stage) for stage in range(self.stages)]
        return tuple(sorted({(min(pair), max(pair)) for pair in pairwise(ranks) if pair[0] != pair[1]}))

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The ranks that a rank sends messages to and gets them from, in order."""
        return tuple(sorted(left + right - rank for left, right in self.links() if rank in (left, right)))

    def together(self, stage: int) -> bool:
        """Whether a stage and the next one are on one rank, so that what passes between them needs no link."""
        return self.rank_of(stage) == self.rank_of(stage + 1)

    def __str__(self) -> str:
        return f"'{self.shape}' of {self.chunks} x {self.ranks}"


def place(stages: int, ranks: int | None = None, shape: str | None = None) -> Placement:
    """The placement of a number of stages, from what a user says of it; raises ConsistencyError where that cannot be.

    There are as many ranks as stages if not said otherwise, and it is a line then, else a loop.

    >>> place(4, 2)
    Placement(ranks=2, chunks=2, shape='loop')
    """
    count = stages if ranks is None else ranks
    if count < 1 or stages < 1 or stages % count:
        raise ConsistencyError(
            f"{stages} stages cannot be placed on {count} ranks: every rank has the same number of them, 1 or more"
        )
    return Placement(count, stages // count, shape or ("line" if count == stages else "loop"))


def checked(placement: Placement | None, stages: int) -> Placement:
    """The placement, if it is one of that many stages; a line where there is none."""
    if placement is not None and placement.stages != stages:
        raise ConsistencyError(f"the placement {placement} is one of {placement.stages} stages, but there are {stages}")
    return placement or Placement(stages)
