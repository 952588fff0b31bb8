"""What is planned: operators with their iteration spaces, and the tensors that flow between them.

An operator computes over an iteration space: a matrix product over ``(m, n, k)``, a convolution over images, output and
input channels. Splitting a dimension of that space splits each tensor that has it along one axis, and leaves the others
whole. A dimension that no output has is summed over: splitting it leaves partial sums.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from weft.errors import PlanError

PARAMETER = "parameter"
INPUT = "input"


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of an iteration space. ``parts`` is the size of what may be split: a split is into a number of
    equal parts that divides it. It is 1 where nothing may be split, and the number of heads where a tensor's axis holds
    heads times their size."""

    name: str
    size: int
    parts: int

    @classmethod
    def whole(cls, name: str, size: int) -> Dim:
        """A dimension that is never split."""
        return cls(name, size, 1)

    @classmethod
    def free(cls, name: str, size: int) -> Dim:
        """A dimension that may be split into any number of equal parts."""
        return cls(name, size, size)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as one operator sees it: for each axis the dimension (by its index in the iteration space) that splits
    it into contiguous parts, or None."""

    shape: tuple[int, ...]
    itemsize: int
    dims: tuple[int | None, ...]
    gradient: bool = True  # whether a gradient flows back through it

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True, slots=True)
class Read:
    """An operand: output ``output`` of operator ``source`` of the graph, as the reader sees it."""

    source: int
    output: int
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Operator:
    """A node of the graph.

    ``flops`` and ``moved`` (bytes read and written) are of the whole forward, a multiply-add counting as two;
    ``backward`` says how many forwards a backward costs. ``saved`` is what the backward keeps, in bytes, beyond what
    its inputs keep. ``known`` is False where no rule was found and it is computed on every device alike.
    """

    name: str
    kind: str
    target: str
    dims: tuple[Dim, ...]
    reads: tuple[Read, ...]
    outputs: tuple[Tensor, ...]
    flops: float = 0.0
    moved: float = 0.0
    backward: float = 2.0
    saved: float = 0.0
    module: str = ""
    known: bool = True

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient flows back through an output."""
        return any(tensor.gradient for tensor in self.outputs)


@dataclass(frozen=True, slots=True)
class Graph:
    """Operators in an order in which they can run: an operator reads from earlier ones only."""

    name: str
    operators: tuple[Operator, ...]
    notes: tuple[str, ...] = field(default=())  # how it was captured, where that matters

    def __len__(self) -> int:
        return len(self.operators)

    @property
    def unknown(self) -> dict[str, int]:
        """Targets that have no rule, with how often each occurs."""
        return dict(Counter(operator.target for operator in self.operators if not operator.known))


def batch_dims(graph: Graph) -> tuple[int | None, ...]:
    """For each operator the dimension that holds the samples, followed from the first axis of the inputs; None where it
    has none."""
    size = batch_size(graph)
    axes: dict[tuple[int, int], int] = {}  # of an output: the axis that holds the samples
    found: list[int | None] = []
    for op, operator in enumerate(graph.operators):
        dim = None
        if operator.kind == INPUT and operator.outputs[0].shape[:1] == (size,):
            dim = operator.outputs[0].dims[0]
        for read in operator.reads:
            axis = axes.get((read.source, read.output))
            if axis is not None and read.tensor.dims[axis] is not None:
                dim = read.tensor.dims[axis]
                break
        for number, tensor in enumerate(operator.outputs):
            if dim is not None and dim in tensor.dims:
                axes[op, number] = tensor.dims.index(dim)
        found.append(dim)
    return tuple(found)


def batch_size(graph: Graph) -> int:
    """The samples of the batch that the graph was captured with; 0 if its inputs have none."""
    return next((o.outputs[0].shape[0] for o in graph.operators if o.kind == INPUT and o.outputs[0].shape), 0)


def microbatch(graph: Graph, count: int) -> Graph:
    """The graph of one of ``count`` equal micro-batches of its batch."""
    if count == 1:
        return graph
    dims, size = batch_dims(graph), batch_size(graph)
    if size % count:
        raise PlanError(f"a batch of {size} is not {count} equal micro-batches")
    operators: list[Operator] = []
    for operator, dim in zip(graph.operators, dims, strict=True):
        if dim is None or operator.dims[dim].size % count:
            operators.append(operator)
            continue
        split = operator.dims[dim]
        parts = split.parts // count if split.parts % count == 0 else 1
        smaller = (*operator.dims[:dim], Dim(split.name, split.size // count, parts), *operator.dims[dim + 1 :])
        operators.append(
            replace(
                operator,
                dims=smaller,
                reads=tuple(replace(r, tensor=_smaller(r.tensor, dim, count)) for r in operator.reads),
                outputs=tuple(_smaller(t, dim, count) for t in operator.outputs),
                flops=operator.flops / count,
                moved=operator.moved / count,
                saved=operator.saved / count,
            )
        )
    return replace(graph, operators=tuple(operators))


def _smaller(tensor: Tensor, dim: int, count: int) -> Tensor:
    if dim not in tensor.dims:
        return tensor
    axis = tensor.dims.index(dim)
    shape = (*tensor.shape[:axis], tensor.shape[axis] // count, *tensor.shape[axis + 1 :])
    return replace(tensor, shape=shape)


def parameter_values(graph: Graph) -> frozenset[int]:
    """The parameters, and the operators that are views or casts of one parameter: what they hold is a weight."""
    found: set[int] = set()
    for op, operator in enumerate(graph.operators):
        same = operator.kind == "view" or operator.target.split(".")[1:2] in (["_to_copy"], ["to"])
        if operator.kind == PARAMETER or (same and len(operator.reads) == 1 and operator.reads[0].source in found):
            found.add(op)
    return frozenset(found)


def layer_of(module: str) -> str:
    """The repeated layer that a module lies in: its path up to the first number.

    >>> layer_of("transformer.h.3.attn.c_attn"), layer_of("lm_head")
    ('transformer.h.3', '')
    """
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""
