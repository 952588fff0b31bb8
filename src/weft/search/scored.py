"""A subnet with its scores, before and after it was picked from a front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weft.errors import SearchError
from weft.search.objective import Scores
from weft.space import Subnet

Extract = Callable[[Subnet], Any]


@dataclass(frozen=True, slots=True)
class Scored:
    """A subnet with what was measured of it."""

    subnet: Subnet
    scores: Scores = field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scores", {name: float(value) for name, value in self.scores.items()})


@dataclass(frozen=True, slots=True)
class Picked(Scored):
    """A subnet of a front, which knows how to become a plain module where the front is bound to a supernet."""

    extractor: Extract | None = field(default=None, repr=False, compare=False)
    origin: Any = field(default=None, repr=False, compare=False)
    """The trained run that it was found in, for `weft.retrain(pick)`; None for a front read from a file."""

    def extract(self) -> Any:
        """The subnet as a plain `nn.Module` with the supernet's weights; SearchError where no supernet is bound."""
        if self.extractor is None:
            raise SearchError(
                f"subnet {self.subnet.id} has no supernet to be extracted from: use Front(..., extract=...)"
            )
        return self.extractor(self.subnet)
