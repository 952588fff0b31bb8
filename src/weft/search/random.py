"""Random search: distinct subnets as the space samples them, deaf to their scores."""

from __future__ import annotations

from collections.abc import Sequence

from weft import keys
from weft.search.method import Draw
from weft.search.scored import Scored
from weft.space import Space, Subnet


class Random:
    """Samples without replacement; a space of up to 65,536 subnets is drawn to its last one."""

    def __init__(self, space: Space, seed: int = 0, batch: int = 32) -> None:
        self.batch = batch
        self._draw = Draw(space, keys.generator(seed, "search", "random"))

    def ask(self) -> list[Subnet]:
        return self._draw.batch(self.batch)

    def tell(self, scored: Sequence[Scored]) -> None:
        pass
