"""Data that a trial keeps on its device, since it is small."""

from __future__ import annotations

from weft.data import Data, Source, Subset, Tensors, Text

SMALL = 64 * 2**20
"""Bytes of data that are worth keeping on the device rather than sending batch by batch."""


def resident(data: Data) -> int:
    """Bytes of the data set on a device that is not the CPU: all of it where it is small and in memory, else 0."""
    sources = {id(source): source for source in map(_source, data.parts().values())}
    total = sum(map(_bytes, sources.values()))
    return int(total) if total <= SMALL else 0


def _source(part: Source) -> Source:
    return _source(part.source) if isinstance(part, Subset) else part


def _bytes(source: Source) -> float:
    if isinstance(source, Text):
        return source.tokens.nbytes
    if isinstance(source, Tensors):
        return sum(tensor.nbytes for tensor in source._named.values())
    return float("inf")
