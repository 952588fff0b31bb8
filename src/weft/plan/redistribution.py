"""What it costs to lay a tensor out differently, in seconds, by the collectives that DTensor uses.

From one layout to another each mesh axis takes one step: a slice (free), a reduce-scatter (partial to cut), an
all-to-all (cut here to cut there), an all-reduce (partial to whole) or an all-gather (cut to whole), in this order, so
that the tensor is small when it travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.hardware import collectives
from weft.hardware.machine import Machine
from weft.plan.sharding import PARTIAL, REPLICATED, Mesh, Placements

Table = NDArray[np.float64]


class Redistribution:
    """Costs on one mesh of one machine; tables are kept, since a network's layers are alike."""

    def __init__(self, mesh: Mesh, machine: Machine) -> None:
        self.mesh = mesh
        self._links = [machine.axis_link(mesh.sizes, axis) for axis in range(len(mesh.sizes))]
        self._kept: dict[tuple[object, ...], Table] = {}

    def table(self, size: float, sources: Sequence[Placements], targets: Sequence[Placements]) -> Table:
        """Seconds from every source (a row) to every target (a column) for a tensor of ``size`` bytes in all."""
        key = (size, tuple(sources), tuple(targets))
        if key not in self._kept:
            self._kept[key] = self._table(size, sources, targets)
        return self._kept[key]

    def _table(self, size: float, sources: Sequence[Placements], targets: Sequence[Placements]) -> Table:
        axes = len(self.mesh.sizes)
        shape = (len(sources), len(targets))
        a = np.array(sources, dtype=np.int64).reshape(len(sources), 1, axes)
        b = np.array(targets, dtype=np.int64).reshape(1, len(targets), axes)
        counts = np.array(self.mesh.sizes, dtype=np.float64)
        local = np.broadcast_to(size / np.where(a >= 0, counts, 1.0).prod(-1), shape).copy()
        total = np.zeros(shape)
        for k in range(axes):
            local /= np.where((a[..., k] == REPLICATED) & (b[..., k] >= 0), counts[k], 1.0)
        for k in range(axes):
            step = (a[..., k] == PARTIAL) & (b[..., k] >= 0)
            total += np.where(step, collectives.reduce_scatter(local, counts[k], *self._links[k]), 0.0)
            local /= np.where(step, counts[k], 1.0)
        for k in range(axes):
            step = (a[..., k] >= 0) & (b[..., k] >= 0) & (a[..., k] != b[..., k])
            total += np.where(step, collectives.all_to_all(local, counts[k], *self._links[k]), 0.0)
        for k in range(axes):
            step = (a[..., k] == PARTIAL) & (b[..., k] == REPLICATED)
            total += np.where(step, collectives.all_reduce(local, counts[k], *self._links[k]), 0.0)
        for k in reversed(range(axes)):
            step = (a[..., k] >= 0) & (b[..., k] == REPLICATED)
            step = step | self._cut_anew(a, b, k)
            total += np.where(step, collectives.all_gather(local * counts[k], counts[k], *self._links[k]), 0.0)
            local *= np.where(step, counts[k], 1.0)
        return total

    def _cut_anew(self, a: NDArray[np.int64], b: NDArray[np.int64], k: int) -> NDArray[np.bool_]:
        """Where axis k cuts a tensor axis before and after, but an outer mesh axis begins or ceases to cut it: the
        parts are others then, so it is gathered, and cut again."""
        same = (a[..., k] >= 0) & (a[..., k] == b[..., k])
        moved = np.zeros(same.shape, dtype=bool)
        for outer in range(k):
            moved |= (a[..., outer] == a[..., k]) != (b[..., outer] == a[..., k])
        return np.asarray(same & moved, dtype=np.bool_)


def grad_placements(laid: Placements) -> Placements:
    """How the gradient of a result must lie where the result lies so: partial results have whole gradients."""
    return tuple(REPLICATED if place == PARTIAL else place for place in laid)


def meshes(devices: int, axes: int = 3) -> list[Mesh]:
    """Every grid of so many devices with at most so many axes, none of size 1, few axes first.

    >>> [str(mesh) for mesh in meshes(12, axes=2)]
    ['12', '2x6', '3x4', '4x3', '6x2']
    """
    if devices == 1:
        return [Mesh((1,))]
    found = [[devices]]
    grids = list(found)
    for _ in range(axes - 1):
        found = [
            [*grid[:-1], first, grid[-1] // first]
            for grid in found
            for first in range(2, grid[-1] // 2 + 1)
            if grid[-1] % first == 0
        ]
        grids += found
    return [Mesh(tuple(grid)) for grid in grids if math.prod(grid) == devices]
