"""Stage cuts: where to divide a chain of blocks so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from weft.errors import ConsistencyError

Cut = tuple[int, ...]
"""The first block of every stage after the first: ``(3, 7)`` divides ten blocks into 0..2, 3..6 and 7..9."""


def best_cut(costs: Sequence[float], stages: int) -> Cut:
    """The cut with the smallest cost of its most expensive stage; among equal ones that with the earliest last cuts.

    >>> best_cut([1, 1, 4, 1, 1], 3)
    (2, 3)
    """
    blocks = len(costs)
    check_stages(stages, blocks)
    sums = [0.0, *accumulate(costs)]
    # least[k][j]: the smallest possible largest cost when the first j blocks make k stages;
    # last[k][j]: the block that the k-th of them starts with.
    least = [[0.0] + [float("inf")] * blocks]
    last: list[list[int]] = [[0] * (blocks + 1)]
    for k in range(1, stages + 1):
        row, starts = [float("inf")] * (blocks + 1), [0] * (blocks + 1)
        for j in range(k, blocks + 1):
            for i in range(k - 1, j):
                largest = max(least[k - 1][i], sums[j] - sums[i])
                if largest < row[j]:
                    row[j], starts[j] = largest, i
        least.append(row)
        last.append(starts)
    cut: list[int] = []
    end = blocks
    for k in range(stages, 1, -1):
        end = last[k][end]
        cut.append(end)
    return tuple(reversed(cut))


def stage_of(cut: Cut, blocks: int) -> list[int]:
    """The stage of every block; raises ConsistencyError for a cut that leaves a stage empty."""
    if list(cut) != sorted(set(cut)) or (cut and (cut[0] < 1 or cut[-1] >= blocks)):
        raise ConsistencyError(
            f"the cut {cut} of {blocks} blocks must rise from 1 to at most {blocks - 1}: no stage may be empty"
        )
    return [sum(first <= block for first in cut) for block in range(blocks)]


def check_cut(cut: Sequence[int], stages: int, blocks: int) -> Cut:
    """The user's cut; ConsistencyError unless it makes that many stages."""
    first = tuple(int(block) for block in cut)
    if len(first) != stages - 1:
        raise ConsistencyError(
            f"the cut {first} makes {len(first) + 1} stages, but {stages} {'is' if stages == 1 else 'are'} asked for: "
            "it gives the first block of every stage after the first"
        )
    stage_of(first, blocks)
    return first


def check_stages(stages: int, blocks: int) -> None:
    """Raises ConsistencyError unless every stage can have a block."""
    if not 1 <= stages <= blocks:
        raise ConsistencyError(f"{stages} stages cannot share {blocks} blocks: use 1 to {blocks} stages")
