"""What the stages tell each other outside of their links: small values as JSON in the store that they share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weft.errors import PipelineError
from weft.runs.files import plain

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Accord:
    """The store as the stages use it: every key is told once, and hearing it waits until then."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world

    def tell(self, key: str, value: Any) -> None:
        self.store.set(f"told/{key}", json.dumps(plain(value)))

    def hear(self, key: str) -> Any:
        return json.loads(self.store.get(f"told/{key}"))

    def gather(self, key: str, value: Any) -> list[Any]:
        """The values of all stages, by rank; everyone must call it."""
        self.tell(f"{key}/{self.rank}", value)
        return [self.hear(f"{key}/{rank}") for rank in range(self.world)]

    def same(self, law: Mapping[str, Any]) -> None:
        """Raises PipelineError on every stage that was given another configuration than rank 0."""
        mine = json.loads(json.dumps(plain(law)))
        if self.rank == 0:
            self.tell("law", mine)
        theirs = self.hear("law")
        differ = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
        if differ:
            told = "; ".join(f"{key} is {mine.get(key)} here and {theirs.get(key)} on rank 0" for key in differ[:4])
            raise PipelineError(
                f"rank {self.rank} was started with another configuration: {told}. Start all with the same command"
            )

    def clone(self) -> Accord:
        """The same over a connection of its own, for another thread."""
        return Accord(self.store.clone(), self.rank, self.world)  # type: ignore[attr-defined]
