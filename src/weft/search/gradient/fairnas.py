"""FairNAS-style sampling (Chu et al., 2021): options of a choice are trained equally often, in weft's spaced order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FairNAS:
    """A spaced stream: strictly fair, and free of conflicts between steps that follow each other."""

    name: str = "fairnas"
    stream: str = "spaced"
    microbatches: int | None = None
    distils: bool = False
