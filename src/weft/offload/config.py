"""How much of a device a run needs at least, found before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.engine.weight_versions import VersionedLayer
from weft.errors import ConfigError, TrainError
from weft.offload.layout import BlockLayout
from weft.utils.units import format_bytes, parse_bytes


def least(sizes: Mapping[str, int], routes: Iterable[Sequence[str]], reserve: int, said: OffloadConfig) -> int:
    """The least budget that would do, which the one that there is must reach."""
    found = reserve + max((sum(sizes.get(name, 0) for name in dict.fromkeys(names)) for names in routes), default=0)
    if found > said.bytes:
        name, most = max(sizes.items(), key=lambda pair: pair[1])
        alone = f": layer '{name}' alone needs {format_bytes(most)}" if most > said.bytes else ""
        raise TrainError(
            f"residency.budget = {format_bytes(said.bytes)} cannot hold the layers of one "
            f"micro-batch{alone}. The least that "
            f"would do is {found} bytes ({format_bytes(found)})"
        )
    return found


def need(layout: BlockLayout, weights: VersionedLayer) -> int:
    """What a micro-batch that uses a layer may need: the layer, the version that it sees, and room for another."""
    if weights.single:
        return layout.bytes
    return layout.bytes + layout.weight_bytes + (layout.weight_bytes if weights.inplace else layout.moved_bytes)


def largest(weights: Mapping[str, VersionedLayer], sizes: Mapping[str, int]) -> list[str]:
    """The largest layer of every block."""
    found: dict[int, str] = {}
    for name, own in weights.items():
        other = found.get(own.layer.block)
        if other is None or sizes[name] > sizes[other]:
            found[own.layer.block] = name
    return list(found.values())


# What a user says about memory: how much of a device its layers may take, and where the others lie meanwhile.

AHEAD = 32
"""Micro-batches that may have their layers on the device before they begin."""


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Layers live on the host, and on the device while micro-batches need them; no result depends on any of this.

    ``budget`` is what the layers of one stage may take on its device: weights, optimizer state and older versions.
    Activations and gradients are beside it. All layers of the stage must fit into the memory of its host. Sizes are
    written 8GiB, 24GB, or as a number of bytes. Micro-batches get their layers up to ``ahead`` early; with 0 they wait
    for every copy.
    """

    budget: str | float
    ahead: int = AHEAD

    def __post_init__(self) -> None:
        parse_bytes(self.budget, ConfigError)
        if self.ahead < 0:
            raise ConfigError(f"residency.ahead = {self.ahead}: a number of micro-batches, 0 or more")

    @property
    def bytes(self) -> int:
        """The budget."""
        return int(parse_bytes(self.budget, ConfigError))
