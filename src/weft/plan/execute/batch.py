"""The parts of a batch: those that processes give, where each gives its own, and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from weft.errors import PlanError
from weft.plan.capture import Captured
from weft.plan.capture.batch import Batch
from weft.plan.execute.calling import Input
from weft.plan.execute.reading import Value
from weft.plan.graph import INPUT
from weft.plan.layout import REPLICATED, Layout, Mesh
from weft.plan.strategy import Strategy


def data_axes(captured: Captured, strategy: Strategy) -> tuple[int, ...]:
    """The mesh axes that share the batch: those along which somebody wants the first axis cut of an input, or of what
    is computed from inputs without gradient."""
    graph = captured.graph
    plain: set[int] = set()
    found: set[int] = set()
    for place, operator in enumerate(graph.operators):
        given = operator.kind == INPUT or any(read.source in plain for read in operator.reads)
        if given and not any(tensor.gradient for tensor in operator.outputs):
            plain.add(place)
        for number, read in enumerate(operator.reads):
            if read.source in plain:
                wanted = strategy.operand(graph, place, number)
                found.update(axis for axis, cut in enumerate(wanted) if cut == 0)
    return tuple(sorted(found))


def part(inputs: Sequence[Input], axes: Sequence[int], mesh: Mesh) -> dict[Value, Layout]:
    """How inputs lie: cut along their first axis by these mesh axes. An input whose first axis is not as long as that
    of the first input holds no batch, and is whole."""
    whole: Layout = (REPLICATED,) * len(mesh.sizes)
    if any(not 0 <= axis < len(mesh.sizes) for axis in axes):
        raise PlanError(f"local_batch={tuple(axes)} names an axis that a mesh of {mesh} lacks")
    cut = tuple(0 if axis in axes else REPLICATED for axis in range(len(mesh.sizes)))
    parts = 1
    for axis in axes:
        parts *= mesh.sizes[axis]
    rows = next((each.shape[0] for each in inputs if each.shape), 0)
    if rows % parts:
        raise PlanError(f"a batch of {rows} cannot be given in {parts} equal parts")
    return {each.value: cut if each.shape[:1] == (rows,) else whole for each in inputs}


def microbatches(batch: Batch, rows: int, count: int) -> list[Batch]:
    """A batch of so many rows in equal parts, in order. Tensors whose first axis is not that long are in each part."""

    def cut(value: Any, number: int) -> Any:
        if isinstance(value, Tensor) and value.shape[:1] == (rows,):
            return value.tensor_split(count)[number]
        return value

    if rows % count:
        raise PlanError(f"a batch of {rows} is not {count} equal micro-batches")
    parts: list[Batch] = []
    for number in range(count):
        if isinstance(batch, Tensor):
            parts.append(cut(batch, number))
        elif isinstance(batch, Mapping):
            parts.append({key: cut(value, number) for key, value in batch.items()})
        else:
            parts.append(tuple(cut(value, number) for value in batch))
    return parts


def arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the arguments of a call."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    return ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
