"""How much of a device a run needs at least, found before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from weft.errors import TrainError
from weft.pipeline.residency.block import Layout
from weft.pipeline.residency.value import Residency
from weft.pipeline.weights import Weights
from weft.units import size


def least(sizes: Mapping[str, int], routes: Iterable[Sequence[str]], reserve: int, said: Residency) -> int:
    """The least budget that would do, which the one that there is must reach."""
    found = reserve + max((sum(sizes.get(name, 0) for name in dict.fromkeys(names)) for names in routes), default=0)
    if found > said.bytes:
        name, most = max(sizes.items(), key=lambda pair: pair[1])
        alone = f": layer '{name}' alone needs {size(most)}" if most > said.bytes else ""
        raise TrainError(
            f"residency.budget = {size(said.bytes)} cannot hold the layers of one micro-batch{alone}. The least that "
            f"would do is {found} bytes ({size(found)})"
        )
    return found


def need(layout: Layout, weights: Weights) -> int:
    """What a micro-batch that uses a layer may need: the layer, the version that it sees, and room for another."""
    if weights.single:
        return layout.bytes
    return layout.bytes + layout.weight_bytes + (layout.weight_bytes if weights.inplace else layout.moved_bytes)


def largest(weights: Mapping[str, Weights], sizes: Mapping[str, int]) -> list[str]:
    """The largest layer of every block."""
    found: dict[int, str] = {}
    for name, own in weights.items():
        other = found.get(own.layer.block)
        if other is None or sizes[name] > sizes[other]:
            found[own.layer.block] = name
    return list(found.values())
