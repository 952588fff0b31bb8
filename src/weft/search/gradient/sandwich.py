"""The sandwich rule (Yu et al., 2019): every step trains the largest subnet, the smallest and some random ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sandwich:
    """``random`` subnets beside the largest and the smallest, as micro-batches of one step; the largest teaches."""

    random: int = 2
    name: str = "sandwich"
    distils: bool = True

    @property
    def stream(self) -> str:
        return f"sandwich:{self.random}"

    @property
    def microbatches(self) -> int | None:
        return 2 + self.random
