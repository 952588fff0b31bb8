"""Placements of tensors on a mesh of devices, which follow from a split of an operator's iteration space.

A mesh has axes, outermost first. A *split* gives each mesh axis a dimension of the iteration space, or REPLICATED: then
the devices along that axis compute the same. *Placements* give each mesh axis the tensor axis that is cut along it,
REPLICATED, or PARTIAL: each device holds a summand. They are those of DTensor. Where several mesh axes cut one
tensor axis, the outer one cuts first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from weft.plan.graph import Graph, Operator, Tensor

REPLICATED = -1
PARTIAL = -2

OpSplit = tuple[int, ...]
Placements = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices in a grid; the last axis has the nearest neighbours."""

    sizes: tuple[int, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes)) or "1"


def splits(operator: Operator, mesh: Mesh) -> Iterator[OpSplit]:
    """Every split of the operator on the mesh, the one that computes all on every device first.

    >>> from weft.plan.graph import Dim
    >>> wide = Operator("mm", "matmul", "mm", (Dim.free("m", 4), Dim.whole("k", 8)), (), ())
    >>> list(splits(wide, Mesh((2, 2))))
    [(-1, -1), (-1, 0), (0, -1), (0, 0)]
    """
    choices = [REPLICATED, *(number for number, dim in enumerate(operator.dims) if dim.parts > 1)]
    for split in product(*(choices if size > 1 else choices[:1] for size in mesh.sizes)):
        parts = dict.fromkeys(split, 1)
        for size, dim in zip(mesh.sizes, split, strict=True):
            parts[dim] *= size
        if all(dim == REPLICATED or operator.dims[dim].parts % n == 0 for dim, n in parts.items()):
            yield split


def operand_placements(tensor: Tensor, split: OpSplit) -> Placements:
    """The placements that an operator needs of an operand to compute its part: cut or whole, never partial."""
    return tuple(tensor.dims.index(dim) if dim >= 0 and dim in tensor.dims else REPLICATED for dim in split)


def result_placements(tensor: Tensor, split: OpSplit) -> Placements:
    """The placements of a result: partial where a dimension is split that it lacks. An operand's gradient
    has the same as it comes out of the backward."""
    return tuple(REPLICATED if dim < 0 else tensor.dims.index(dim) if dim in tensor.dims else PARTIAL for dim in split)


def without_partials(placements: Placements) -> Placements:
    """The placements once partial sums are added up. The gradient of a result has them, too."""
    return tuple(REPLICATED if each == PARTIAL else each for each in placements)


def shards(placements: Placements, mesh: Mesh) -> int:
    """Into how many parts the placements cut a tensor."""
    return math.prod(size for size, axis in zip(mesh.sizes, placements, strict=True) if axis >= 0)


def local_shape(shape: Sequence[int], placements: Placements, mesh: Mesh) -> tuple[int, ...]:
    """The shape of one device's part."""
    sizes = list(shape)
    for size, axis in zip(mesh.sizes, placements, strict=True):
        if axis >= 0:
            sizes[axis] //= size
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class ShardingStrategy:
    """A split for each operator of a graph, in its order."""

    mesh: Mesh
    splits: tuple[OpSplit, ...]

    def result(self, graph: Graph, op: int, output: int = 0) -> Placements:
        """The placements of an output of an operator."""
        return result_placements(graph.operators[op].outputs[output], self.splits[op])
