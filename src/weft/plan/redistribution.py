"""What it costs to redistribute a tensor, in seconds, by the collectives that DTensor uses.

From placements to others each mesh axis takes one step: a slice (free), a reduce-scatter (partial to cut), an
all-to-all (cut here to cut there), an all-reduce (partial to whole) or an all-gather (cut to whole), in this order, so
that the tensor is small when it travels. A weight that is gathered is freed after its last reader: what is there at
once is counted here, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from weft.hardware import collectives
from weft.hardware.machine import Machine
from weft.plan.graph import Graph, Operator, Tensor, layer_of, parameter_values
from weft.plan.sharding import (
    PARTIAL,
    REPLICATED,
    Mesh,
    OpSplit,
    Placements,
    operand_placements,
    result_placements,
    shards,
    without_partials,
)

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


def meshes(devices: int, axes: int = 3) -> list[Mesh]:
    """Every grid of so many devices with at most so many axes, none of size 1, few axes first.

    >>> [str(mesh) for mesh in meshes(12, axes=2)]
    ['12', '2x6', '3x4', '4x3', '6x2']
    """
    sizes = [size for size in range(2, devices + 1) if devices % size == 0]
    grids = (grid for count in range(1, axes + 1) for grid in product(sizes, repeat=count))
    return [Mesh(grid) for grid in grids if math.prod(grid) == devices] or [Mesh((1,))]


def gathered_again(graph: Graph, recompute: bool) -> frozenset[tuple[int, int]]:
    """The reads (operator, which of its reads) of weights that the backward needs once more: a weight that is gathered
    is freed after the forward. These are the reads of what is computed again, and of weights that the gradient of
    another operand depends on; addends are none."""
    weights = parameter_values(graph)
    found: set[tuple[int, int]] = set()
    needed: set[int] = set()  # views of weights that are needed again
    for op in reversed(range(len(graph))):
        operator = graph.operators[op]
        if not operator.has_gradient and op not in needed:
            continue
        factors = [number for number, read in enumerate(operator.reads) if not _is_addend(operator, read.tensor)]
        for number, read in enumerate(operator.reads):
            if read.source not in weights:
                continue
            others = [operator.reads[each].tensor.gradient for each in factors if each != number]
            again = (recompute and layer_of(operator.module)) or op in needed
            if again or (number in factors and any(others)):
                found.add((op, number))
                if graph.operators[read.source].kind == "view":  # a cast keeps its result, and needs no weight again
                    needed.add(read.source)
    return frozenset(found)


def _is_addend(operator: Operator, tensor: Tensor) -> bool:
    """Whether an operand is only added, as a bias is."""
    if operator.kind == "elementwise":
        return operator.target.split(".")[1:2] in (["add"], ["sub"], ["rsub"])
    made = {dim for output in operator.outputs for dim in output.dims}
    return operator.kind in ("matmul", "conv") and len(operator.reads) > 2 and made.issuperset(tensor.dims)


def gathered_bytes(graph: Graph, mesh: Mesh, splits: Sequence[OpSplit], recompute: bool) -> list[float]:
    """For each operator the bytes of a device that gathered weights, and their gradients before they are scattered,
    take while it runs: at most, forward or backward.

    A weight is gathered for its first reader, and freed after its last one. The backward of an operator gathers its
    weights again, and the gradients of several readers are summed until that of the first one is there. With
    recomputation the weights of a layer are gathered together, and what a later layer reads too is kept for it.
    """
    weights, again = parameter_values(graph), gathered_again(graph, recompute)
    layer = [layer_of(operator.module) if recompute else "" for operator in graph.operators]
    forward, backward = np.zeros(len(graph) + 1), np.zeros(len(graph))
    uses: dict[tuple[int, int, Placements], list[int]] = {}
    together: dict[str, float] = {"": 0.0}
    for op, operator in enumerate(graph.operators):
        for number, read in enumerate(operator.reads):
            if read.source not in weights:
                continue
            stored = without_partials(
                result_placements(graph.operators[read.source].outputs[read.output], splits[read.source])
            )
            wanted = operand_placements(read.tensor, splits[op])
            if stored == wanted:
                continue
            size = read.tensor.bytes / shards(wanted, mesh)
            backward[op] += size * (((op, number) in again) + read.tensor.gradient)
            key = (read.source, read.output, wanted)
            if layer[op] and key not in uses:
                together[layer[op]] = together.get(layer[op], 0.0) + size
            uses.setdefault(key, []).append(op)
    for (source, output, wanted), readers in uses.items():
        tensor = graph.operators[source].outputs[output]
        size = tensor.bytes / shards(wanted, mesh)
        later = [op for op in readers if layer[op] not in ("", layer[readers[0]])]
        forward[readers[0]] += size
        if later:
            backward[later[0] :] += size
        else:
            forward[readers[-1] + 1] -= size
        if tensor.gradient:
            backward[readers[0] : readers[-1]] += size
    alive = np.maximum(np.cumsum(forward)[:-1], 0.0)
    return [
        max(float(a), float(b) + together.get(name, 0.0)) for a, b, name in zip(alive, backward, layer, strict=True)
    ]
