"""What a user says about memory: how much of a device its layers may take, and where the others lie meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.errors import ConfigError
from weft.units import size_of

AHEAD = 32
"""Micro-batches that may have their layers on the device before they begin."""


@dataclass(frozen=True, slots=True)
class Residency:
    """Layers live on the host, and on the device while micro-batches need them; no result depends on any of this.

    ``budget`` is what the layers of one stage may take on its device: weights, optimizer state and older versions.
    Activations and gradients are beside it. ``host`` is what they may take on the host, all of it if not given; the
    rest lies in a file in the folder ``disk`` (where the run is, if not given). Sizes are written 8GiB, 24GB, or
    as a number of bytes. Micro-batches get their layers up to ``ahead`` early; with 0 they wait for every copy.
    """

    budget: str | float
    host: str | float | None = None
    disk: str | Path | None = None
    ahead: int = AHEAD

    def __post_init__(self) -> None:
        size_of(self.budget, ConfigError)
        if self.host is not None and str(self.host) != "0":
            size_of(self.host, ConfigError)
        if self.disk is not None and not Path(self.disk).is_dir():
            raise ConfigError(f"residency.disk = '{self.disk}' is no folder: name one that is there, on a fast disk")
        if self.ahead < 0:
            raise ConfigError(f"residency.ahead = {self.ahead}: a number of micro-batches, 0 or more")

    @property
    def bytes(self) -> int:
        """The budget."""
        return int(size_of(self.budget, ConfigError))

    @property
    def host_bytes(self) -> int | None:
        """What layers may take on the host; None: all that they need."""
        if self.host is None:
            return None
        return 0 if str(self.host) == "0" else int(size_of(self.host, ConfigError))
