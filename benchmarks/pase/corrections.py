"""Which defects of PaSE's published cost model are corrected."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Corrections:
    """One switch for each defect; all off is the published model.

    - ``edges``: tensors between the same two operators are all counted; as published the last one replaces the others.
    - ``gather``: an embedding reads rows of its table; as published it multiplies by one-hot vectors.
    - ``batch_norm``: statistics are over images and positions, and as many as channels; as published over images alone.
    - ``slices``: a tensor lies on every device that its operator uses, so a part of a copy is free to take, and the way
      forward and the way back are counted each for itself; as published a copy after a sum counts as one device's, and
      the way back as the way forward.
    - ``units``: a multiply-add is two operations and a word four bytes; as published one and eight.
    """

    edges: bool = False
    gather: bool = False
    batch_norm: bool = False
    slices: bool = False
    units: bool = False


AS_PUBLISHED = Corrections()
CORRECTED = Corrections(edges=True, gather=True, batch_norm=True, slices=True, units=True)
