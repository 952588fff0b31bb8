"""What is packed: loads that wait for devices, and how much a device can take."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import TuneError


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much one device can take at once. A device that is gone has ``most=0``."""

    memory: int | None
    """Bytes; None: not counted."""
    node: str = "local"
    reserve: int = 0
    """Bytes that every process takes beside its load: on a GPU, the context."""
    most: int | None = None
    """How many loads may run at once; None: as many as memory and their speed allow."""


@dataclass(frozen=True, slots=True)
class Load:
    """A job that waits: what it takes of each of its devices, and for how long."""

    id: str
    memory: int | None
    """Bytes of each device; None: all of it."""
    degree: int = 1
    """Devices, all of one node."""
    seconds: float | None = None
    """That it takes by itself, where that can be said."""
    alone: bool = False
    """Whether it shares a device with no other."""
    share: float | None = None
    """Of each device's time that it uses by itself, where that can be said: 1 leaves nothing to others."""
    kind: str = ""
    """Loads of one kind compute alike: their rates compare. A shape key does."""

    @property
    def work(self) -> float:
        """Seconds of a device's time that it takes, on all its devices together; 0 where that cannot be said."""
        return (self.seconds or 0.0) * (1.0 if self.share is None else self.share) * self.degree

    def __post_init__(self) -> None:
        if self.degree < 1 or (self.memory is not None and self.memory < 0):
            raise TuneError(
                f"load '{self.id}' needs a degree of at least 1 and no fewer than 0 bytes; "
                f"it has {self.degree} and {self.memory}"
            )
        if self.seconds is not None and not self.seconds >= 0:
            raise TuneError(f"load '{self.id}' takes at least 0 s, not {self.seconds}")


@dataclass(slots=True)
class Running:
    """A load on its devices. ``ends`` is when it should, if known; ``rate`` what it does in its present company."""

    load: Load
    places: tuple[int, ...]
    ends: float | None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """Devices kept for the largest load that cannot start yet, and when it should; ``at`` None: not known."""

    load: Load
    places: tuple[int, ...]
    at: float | None
