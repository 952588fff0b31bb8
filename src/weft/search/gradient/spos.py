"""SPOS (Guo et al., 2020): every step trains one subnet, drawn uniformly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SPOS:
    """A uniform stream; the subnet is found by evolution afterwards."""

    name: str = "spos"
    stream: str = "iid"
    microbatches: int | None = None
    distils: bool = False
