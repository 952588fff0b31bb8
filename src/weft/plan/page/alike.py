"""Which parts of a graph are drawn alike, and where they repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.plan.page.boxes import Boxes
from weft.plan.plan import Plan

_PERIOD = 8  # the most parts that are repeated together


class Signatures:
    """Numbers that are equal for groups that are drawn alike."""

    def __init__(self, plan: Plan, boxes: Boxes) -> None:
        self.plan = plan
        self._folded = boxes.folded()
        self._sources: dict[int, list[int]] = {}
        for source, reader in boxes.edges:
            self._sources.setdefault(reader, []).append(source)
        self._numbers: dict[object, int] = {}

    def of(self, places: Sequence[int], layer: str | None) -> int:
        """Of the boxes at some places; ``layer`` is the path of their layer, None where they are in none."""
        at = {place: number for number, place in enumerate(places)}
        key = tuple(self._box(place, layer, at) for place in places)
        return self._numbers.setdefault((layer is None, key), len(self._numbers))

    def _box(self, place: int, layer: str | None, at: dict[int, int]) -> object:
        operators, splits = self.plan.graph.operators, self.plan.splits
        operator = operators[place]
        return (
            self.plan.stage[place],
            operator.module.removeprefix(layer or ""),
            (operator.kind, operator.target, operator.dims, operator.outputs, splits[place]),
            # A constant that all layers share is folded into the first of them, and makes it no other layer.
            tuple(
                (operators[own].kind, operators[own].dims, splits[own])
                for own in self._folded[place]
                if operators[own].module.startswith(layer or "")
            ),
            tuple(sorted(at[source] for source in self._sources.get(place, ()) if source in at)),
        )


def repeats(keys: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, period, times): the keys as blocks that are repeated, each as much as can be.

    >>> list(repeats([7, 1, 2, 1, 2, 1, 2, 5, 5]))
    [(0, 1, 1), (1, 2, 3), (7, 1, 2)]
    """
    start = 0
    while start < len(keys):
        saved, best = 0, (1, 1)
        for period in range(1, min(_PERIOD, (len(keys) - start) // 2) + 1):
            times, block = 1, keys[start : start + period]
            while keys[start + times * period : start + (times + 1) * period] == block:
                times += 1
            if (times - 1) * period > saved:
                saved, best = (times - 1) * period, (period, times)
        yield start, *best
        start += best[0] * best[1]
