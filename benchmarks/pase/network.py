"""A network as PaSE sees it: vertices with iteration spaces, and how splits of those cut the tensors between them."""

from __future__ import annotations

from dataclasses import dataclass

EMBEDDING = "embedding"
BATCH_NORM = "batch norm"


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a vertex: for each axis, the dimensions of the iteration space whose splits cut it."""

    shape: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], *dims: int) -> Operand:
        """A tensor each of whose axes is cut by one dimension; by default the dimensions in their order."""
        return cls(shape, tuple((dim,) for dim in dims or range(len(shape))))


@dataclass(frozen=True, slots=True)
class Product:
    """What multiplies matrices: the dimensions that number the products, and those of rows, columns and sum."""

    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vertex:
    """One operator. Equal vertices have equal tables, so a layer that is repeated is computed once.

    ``kind`` is PaSE's name. ``whole`` are dimensions that are never split, ``batch`` is the one that data parallelism
    splits, ``axes`` those that a norm or softmax works along or a mean removes, ``window`` what a pooling covers.
    ``role`` tells what the kind does not: a product that stands for an embedding, a norm that is a batch norm.
    """

    kind: str
    space: tuple[int, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    pointwise: int = 0
    whole: tuple[int, ...] = ()
    batch: int = 0
    axes: tuple[int, ...] = ()
    window: tuple[int, int] = (0, 0)
    product: Product | None = None
    role: str = ""


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor: output ``output`` of vertex ``source``, read as input ``input`` of vertex ``target``."""

    source: int
    output: int
    target: int
    input: int


@dataclass(frozen=True, slots=True)
class Network:
    """Vertices in an order in which they can run. A dimension is split no finer than into parts of ``cutoff``."""

    name: str
    batch: int
    cutoff: int
    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]

    def pairs(self, *, parallel: bool) -> dict[tuple[int, int], tuple[Edge, ...]]:
        """The edges between each two vertices: all of them, or, as PaSE's graph keeps them, the last one."""
        found: dict[tuple[int, int], tuple[Edge, ...]] = {}
        for edge in self.edges:
            pair = edge.source, edge.target
            found[pair] = (*found.get(pair, ()), edge) if parallel else (edge,)
        return found
