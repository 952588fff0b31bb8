"""The batches of a stage: read ahead in order, given out as micro-batches in whatever order the schedule takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from weft.data import Batch, IterableLoader, Loader
from weft.engine.bilevel import BilevelLoader
from weft.engine.train_step import split
from weft.errors import TrainError


class MicroBatches:
    """Micro-batches by number, each given out once."""

    def __init__(
        self,
        loader: Loader | IterableLoader | BilevelLoader,
        first: int,
        steps: int,
        m: int,
        parts: Callable[[Batch], list[Batch]] | None = None,
    ) -> None:
        self._batches = loader.iterate(first, steps)
        self._parts = parts or partial(split, m=m)
        self._m = m
        self._next = first
        self._held: dict[int, list[Batch | None]] = {}

    def __call__(self, n: int) -> Batch:
        step, j = divmod(n, self._m)
        while self._next <= step:
            batch = next(self._batches)
            self._held[self._next] = list(self._parts(batch))
            self._next += 1
        held = self._held.get(step)
        part = None if held is None else held[j]
        if held is None or part is None:
            raise TrainError(f"micro-batch {n} was asked for twice")
        held[j] = None
        if all(other is None for other in held):
            del self._held[step]
        return part

    def close(self) -> None:
        self._batches.close()
