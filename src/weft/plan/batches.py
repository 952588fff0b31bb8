"""Which dimension of each operator counts the samples of a batch, and the graph of a smaller batch."""

from __future__ import annotations

from dataclasses import replace

from weft.errors import PlanError
from weft.plan.graph import INPUT, Dim, Graph, Operator, Tensor


def batch_dims(graph: Graph) -> tuple[int | None, ...]:
    """For each operator the dimension that holds the samples, followed from the first axis of the inputs; None where it
    has none."""
    size = batch_size(graph)
    axes: dict[tuple[int, int], int] = {}  # of an output: the axis that holds the samples
    found: list[int | None] = []
    for place, operator in enumerate(graph.operators):
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
                axes[place, number] = tensor.dims.index(dim)
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
