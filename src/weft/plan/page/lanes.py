"""Lanes for the lines between boxes: lines that would lie on each other get different ones."""

from __future__ import annotations


class Lanes:
    """Spans, each with a key; a key that comes again makes its span longer."""

    def __init__(self) -> None:
        self._spans: dict[int, tuple[float, float]] = {}

    def add(self, key: int, *ends: float) -> None:
        ends = (*self._spans.get(key, ends), *ends)
        self._spans[key] = (min(ends), max(ends))

    def assigned(self) -> dict[int, int]:
        """A lane for each key, as few as can be: spans that touch lie in different lanes.

        >>> lanes = Lanes()
        >>> lanes.add(7, 0, 2), lanes.add(8, 3, 1), lanes.add(9, 3, 4)
        (None, None, None)
        >>> lanes.assigned()
        {7: 0, 8: 1, 9: 0}
        """
        ends: list[float] = []  # of each lane: where its last span ends
        found: dict[int, int] = {}
        for key, (low, high) in sorted(self._spans.items(), key=lambda item: item[1]):
            lane = next((number for number, end in enumerate(ends) if end < low), len(ends))
            ends[lane : lane + 1] = [high]
            found[key] = lane
        return found
