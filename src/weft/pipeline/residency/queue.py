"""Who gets layers next: micro-batches, and batches that are only scored, in the order of the stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

Item = tuple[str, int]
"""``("F", n)``: micro-batch n from its forward to its last update; ``("E", k)``: a batch that is only scored."""

Due = Callable[[int], Iterable[int]]
"""The batches that are scored before a micro-batch."""


class Queue:
    """Items come, are ``ready`` once they have their layers, and begin; whoever is ready can be put back."""

    def __init__(self) -> None:
        self.ready: deque[Item] = deque()
        self._source: Iterator[Item] = iter(())
        self._coming: deque[Item] = deque()
        self._begun: set[Item] = set()

    def __contains__(self, item: Item) -> bool:
        """Whether it has its layers."""
        return item in self._begun or item in self.ready

    def fill(self, first: int, total: int, due: Due | None) -> None:
        """From here on the micro-batches ``first`` to ``total - 1`` come."""
        self._coming.clear()
        self._source = _items(first, total, due)

    def next(self) -> Item | None:
        if not self._coming:
            item = next(self._source, None)
            if item is None:
                return None
            self._coming.append(item)
        return self._coming[0]

    def admit(self) -> None:
        """The next one is ready."""
        self.ready.append(self._coming.popleft())

    def back_off(self) -> Item:
        """The last one that became ready comes again."""
        item = self.ready.pop()
        self._coming.appendleft(item)
        return item

    def begin(self, item: Item) -> None:
        self.ready.remove(item)
        self._begun.add(item)

    def end(self, item: Item) -> None:
        self._begun.remove(item)


def _items(first: int, total: int, due: Due | None) -> Iterator[Item]:
    for n in range(first, total):
        for number in due(n) if due is not None and n > first else ():
            yield ("E", number)
        yield ("F", n)
