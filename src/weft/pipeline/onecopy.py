"""Where one copy of the weights is enough under ``bounded``: the real pipeline is the virtual one.

An update then waits for the forwards that must see the version before it. At most L - 1 micro-batches are in flight at
that moment, so a window of L = depth - stage never stands in the way, and no older version is ever read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from weft.pipeline.consistency import Bounded, Clock, Consistency, Recomputed
from weft.pipeline.scheduler import FORWARDS, Kind
from weft.plan.cut import Cut


def virtual_cut(depth: int, blocks: int) -> Cut:
    """The first block of every virtual stage but the first.

    >>> virtual_cut(3, 8)
    (3, 6)
    """
    return tuple(-(-stage * blocks // depth) for stage in range(1, depth))


def moving(promises: Iterable[Consistency]) -> Bounded | Recomputed | None:
    """The one consistency of all layers, if it is one whose backwards move on to the newest weights."""
    found = set(promises)
    one = next(iter(found)) if len(found) == 1 else None
    return one if isinstance(one, Bounded | Recomputed) else None


def single_copy(promises: Iterable[Consistency], cut: Cut, blocks: int) -> bool:
    """Whether the layers with these promises, all that train, need no second copy on the stages of this cut."""
    one = moving(promises)
    return one is not None and len(cut) + 1 == one.depth and tuple(cut) == virtual_cut(one.depth, blocks)


def forwards_first(at: Clock, kind: Kind, n: int) -> list[tuple[Hashable, int]]:
    """A backward that must see an update waits for the forwards that must not."""
    version = at.backward_reads(n) if kind == "B" else 0
    return [(FORWARDS, 1 + at.last_reader(version - 1))] if version else []


def windows(stages: int, one_copy: bool, given: int | None, microbatches: int = 1) -> list[int]:
    """How many micro-batches each stage may have in flight: as many as were given, else what one copy needs and no
    more, else those of two steps for every stage, since operations never take equally long."""
    if given is not None:
        return [given] * stages
    return [stages - stage for stage in range(stages)] if one_copy else [2 * stages * microbatches] * stages
