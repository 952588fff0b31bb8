"""The options of offloading: how much of a device its layers may take, and how early they are prefetched."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import ConfigError
from weft.utils.units import parse_bytes

PREFETCH = 32
"""Micro-batches that may have their layers on the device before they begin."""


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Layers live on the host, and on the device while micro-batches need them. No result depends on these options.

    ``budget`` is what the layers of one stage may take on its device: weights, optimizer state and older versions.
    Activations and gradients come on top. All layers of the stage must fit into the memory of its host. Sizes are
    written 8GiB, 24GB, or as a number of bytes. Layers are loaded for up to ``prefetch`` micro-batches ahead; with 0
    every micro-batch waits for its copies.
    """

    budget: str | float
    """what the layers of a stage may take on its device, such as `8GiB`"""
    prefetch: int = PREFETCH
    """micro-batches whose layers are loaded early; with 0 each waits for its copies"""

    def __post_init__(self) -> None:
        parse_bytes(self.budget, ConfigError)
        if self.prefetch < 0:
            raise ConfigError(f"offload.prefetch = {self.prefetch}: a number of micro-batches, 0 or more")

    @property
    def bytes(self) -> int:
        return int(parse_bytes(self.budget, ConfigError))
