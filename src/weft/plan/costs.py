"""From a graph, a mesh and a machine to the tables that the solver works on: seconds, and bytes a device.

Parameters that several operators read are fetched once for all that read them alike; what that saves is part of the
tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weft.errors import PlanError
from weft.hardware.machine import Machine
from weft.plan.graph import PARAMETER, Dim, Graph, Operator, Tensor, layer_of
from weft.plan.redistribution import Redistribution, gathered_again
from weft.plan.sharding import (
    Mesh,
    OpSplit,
    Placements,
    operand_placements,
    result_placements,
    shards,
    splits,
    without_partials,
)
from weft.plan.solver import Problem

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """What a step is, beside the model: the dtype that matrix products run in, and what is kept a parameter element.

    ``optimizer_bytes`` is the optimizer's state in bytes an element (8 for Adam in fp32, 4 for momentum, 0 for plain
    SGD). With ``recompute`` layers keep their inputs alone and run their forward again. The graph is of one of
    ``microbatches``.
    """

    dtype: str = "float32"
    optimizer_bytes: float = 8.0
    recompute: bool = False
    microbatches: int = 1

    def width(self, tensor: Tensor) -> float:
        """The size of an activation over its size as captured: products may run in a narrower dtype."""
        return 0.5 if tensor.itemsize == 4 and self.dtype in ("bfloat16", "float16") else 1.0


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Seconds of a step as predicted, and bytes of the fullest device. No plan with this mesh, these stages and
    micro-batches takes less than ``lower_bound`` seconds."""

    step_time: float
    compute: float
    communication: float
    bubble: float
    memory: float
    parameters: float
    activations: float
    lower_bound: float


@dataclass(frozen=True, slots=True)
class Tables:
    """The splits of every operator, and their costs: ``compute`` in seconds a split, ``moves`` in seconds a pair of
    splits of the two ends of an edge (parallel edges summed), ``memory`` in bytes of a device."""

    mesh: Mesh
    splits: tuple[tuple[OpSplit, ...], ...]
    compute: tuple[Table, ...]
    moves: dict[tuple[int, int], Table]
    memory: tuple[Table, ...]

    def problem(self, limit: float = float("inf")) -> Problem:
        """What the solver solves: with a limit, the memory of an assignment keeps it."""
        weights = self.memory if limit != float("inf") else None
        return Problem(self.compute, self.moves, weights, limit)

    def chosen(self, assignment: Sequence[int]) -> tuple[OpSplit, ...]:
        """The splits of an assignment."""
        return tuple(splits[k] for splits, k in zip(self.splits, assignment, strict=True))


SplitFilter = Callable[[int, OpSplit], bool]


def tables(
    graph: Graph,
    mesh: Mesh,
    machine: Machine,
    training: TrainingSpec | None = None,
    allowed: SplitFilter | None = None,
    stages: int = 1,
) -> Tables:
    """The costs of one training step of the graph on the mesh.

    ``allowed`` says whether an operator (by its index) may be split so; one of which nothing is left is refused. In one
    stage a parameter is fetched once for all that read it alike, in several ``stages`` each reader is charged.
    """
    training = training or TrainingSpec()
    builder = _CostBuilder(mesh, machine, training)
    choices = split_choices(graph, mesh, allowed)
    # Layers of a network are alike: what a table depends on is compared once, as a number.
    alike: dict[object, int] = {}
    kinds = [
        alike.setdefault((_signature(operator), own), len(alike))
        for operator, own in zip(graph.operators, choices, strict=True)
    ]
    compute: dict[int, Table] = {}
    edges: dict[tuple[int, int, int, int, bool], Table] = {}
    regathered = gathered_again(graph, training.recompute)
    moves: dict[tuple[int, int], Table] = {}
    for op, (operator, own, kind) in enumerate(zip(graph.operators, choices, kinds, strict=True)):
        if kind not in compute:
            compute[kind] = builder.compute(operator, own)
        for number, read in enumerate(operator.reads):
            key = (kinds[read.source], read.output, kind, number, (op, number) in regathered)
            if key not in edges:
                source = graph.operators[read.source]
                ends = (source.outputs[read.output], choices[read.source], read.tensor, own)
                edges[key] = builder.edge(*ends, source.kind == PARAMETER, (op, number) in regathered)
            edge = (read.source, op)
            moves[edge] = moves[edge] + edges[key] if edge in moves else edges[key]
    if stages == 1:
        for edge, table in builder.shared_parameter_savings(graph, choices):
            moves[edge] = moves[edge] + table if edge in moves else table
    memory = memories(graph, choices, mesh, training)
    return Tables(mesh, tuple(choices), tuple(compute[kind] for kind in kinds), moves, tuple(memory))


def memories(graph: Graph, choices: Sequence[tuple[OpSplit, ...]], mesh: Mesh, training: TrainingSpec) -> list[Table]:
    """The memory of the tables alone, for these splits of each operator."""
    kept = _kept(graph, training.recompute)
    found: dict[object, Table] = {}
    every = []
    for operator, own, keeps in zip(graph.operators, choices, kept, strict=True):
        key = (operator.kind, operator.dims, operator.outputs, operator.saved, own, keeps)
        if key not in found:
            found[key] = _memory(operator, own, keeps, mesh, training)
        every.append(found[key])
    return every


def split_choices(graph: Graph, mesh: Mesh, allowed: SplitFilter | None) -> list[tuple[OpSplit, ...]]:
    """The splits of each operator that are allowed."""
    every: dict[tuple[Dim, ...], tuple[OpSplit, ...]] = {}
    found = []
    for op, operator in enumerate(graph.operators):
        if operator.dims not in every:
            every[operator.dims] = tuple(splits(operator, mesh))
        own = every[operator.dims]
        if allowed is not None:
            own = tuple(split for split in own if allowed(op, split))
        if not own:
            raise PlanError(f"'{operator.name}' has no split left on the mesh {mesh}: relax what is asked of it")
        found.append(own)
    return found


def _signature(operator: Operator) -> object:
    """What the tables of an operator depend on, beside its splits."""
    reads = tuple(read.tensor for read in operator.reads)
    costs = (operator.flops, operator.moved, operator.backward, operator.saved)
    return operator.kind, operator.dims, reads, operator.outputs, costs


class _CostBuilder:
    """The tables of one operator, and of one edge."""

    def __init__(self, mesh: Mesh, machine: Machine, training: TrainingSpec) -> None:
        self.mesh, self.machine, self.training = mesh, machine, training
        self._moving = Redistribution(mesh, machine)

    def compute(self, operator: Operator, choices: Sequence[OpSplit]) -> Table:
        """Seconds of forward and backward, or of the update of a parameter."""
        machine, training = self.machine, self.training
        if operator.kind == PARAMETER:
            tensor = operator.outputs[0]
            local = np.array([1 / shards(result_placements(tensor, split), self.mesh) for split in choices])
            # Weight and state are read and written, the gradient is read.
            moved = tensor.bytes * 3 + tensor.elements * 2 * training.optimizer_bytes
            return machine.compute_seconds(np.zeros(len(choices)), local * moved, training.dtype)
        sizes = np.array(self.mesh.sizes, dtype=np.float64)
        used = np.array(choices, dtype=np.int64).reshape(len(choices), len(sizes)) >= 0
        parts = np.where(used, sizes, 1.0).prod(1)
        touched = sum(t.bytes for t in (*(r.tensor for r in operator.reads), *operator.outputs)) or 1
        whole = np.array([self._local_bytes(operator, split) for split in choices]) / touched
        held = operator.moved * self.training.width(operator.outputs[0]) * whole
        forward = machine.compute_seconds(operator.flops / parts, held, training.dtype)
        if not operator.has_gradient:
            return forward * training.microbatches
        times = operator.backward
        backward = machine.compute_seconds(times * operator.flops / parts, times * held, training.dtype)
        return training.microbatches * (forward * (2.0 if training.recompute else 1.0) + backward)

    def _local_bytes(self, operator: Operator, split: OpSplit) -> float:
        reads = sum(r.tensor.bytes / shards(operand_placements(r.tensor, split), self.mesh) for r in operator.reads)
        return reads + sum(t.bytes / shards(result_placements(t, split), self.mesh) for t in operator.outputs)

    def edge(
        self,
        result: Tensor,
        sources: Sequence[OpSplit],
        operand: Tensor,
        readers: Sequence[OpSplit],
        parameter: bool,
        regathered: bool = False,
    ) -> Table:
        """Seconds that moving the tensor takes, and its gradient back, for every split of both ends; where it is
        ``regathered``, it is moved once more for the backward."""
        count = self.training.microbatches
        out, out_of = _distinct([result_placements(result, split) for split in sources])
        wanted, wanted_of = _distinct([operand_placements(operand, split) for split in readers])
        size = operand.bytes * (1.0 if parameter else self.training.width(operand))
        forward = self._moving.table(size, out, wanted)[np.ix_(out_of, wanted_of)]
        there = count * (2 if regathered else 1) * forward
        if not (result.gradient and operand.gradient):
            return there
        back, back_of = _distinct([result_placements(operand, split) for split in readers])
        stored, stored_of = _distinct([without_partials(result_placements(result, split)) for split in sources])
        backward = self._moving.table(size, back, stored).T[np.ix_(stored_of, back_of)]
        if not parameter:
            return there + count * backward
        # The gradients of a parameter that is used as it is stored are summed over the micro-batches before they
        # travel. Of one that is gathered each micro-batch's gradient travels, since their sum would be as large as the
        # whole parameter.
        moved = np.array([[one != other for other in wanted] for one in out])[np.ix_(out_of, wanted_of)]
        return there + np.where(moved, count, 1) * backward

    def shared_parameter_savings(
        self, graph: Graph, choices: Sequence[Sequence[OpSplit]]
    ) -> Iterator[tuple[tuple[int, int], Table]]:
        """A negative cost between two readers of a parameter where both read it alike: it is fetched once, and the sum
        of their gradients travels once.

        What is saved is the least that fetching it and sending its gradient back take, however the parameter is stored:
        all of it where it is stored as data parallelism does, and never more than what a reader is charged.
        """
        readers: dict[int, dict[int, Tensor]] = {}
        for op, operator in enumerate(graph.operators):
            for read in operator.reads:
                if graph.operators[read.source].kind == PARAMETER:
                    readers.setdefault(read.source, {})[op] = read.tensor
        for source, reading in readers.items():
            stored = graph.operators[source]
            every = list(splits(stored, self.mesh))
            for (one, first), (other, second) in pairwise(reading.items()):
                least = self.edge(stored.outputs[0], every, first, choices[one], parameter=True).min(0)
                own, others = (
                    [(operand_placements(tensor, split), result_placements(tensor, split)) for split in choices[op]]
                    for op, tensor in ((one, first), (other, second))
                )
                alike = np.array([[a == b for b in others] for a in own])
                if (alike & (least[:, None] > 0)).any():
                    yield (one, other), np.where(alike, -least[:, None], 0.0)


def _memory(operator: Operator, choices: Sequence[OpSplit], kept: bool, mesh: Mesh, training: TrainingSpec) -> Table:
    """Bytes of a device for as long as the step lasts: weight, gradient and state, or what the backward keeps."""
    if not operator.outputs or not (kept or operator.kind == PARAMETER):
        return np.zeros(len(choices))
    tensor = operator.outputs[0]
    local = np.array([1 / shards(result_placements(tensor, split), mesh) for split in choices])
    if operator.kind == PARAMETER:
        learned = tensor.bytes + tensor.elements * training.optimizer_bytes if tensor.gradient else 0.0
        return local * (tensor.bytes + learned)
    return local * operator.saved * training.width(tensor)


def _distinct(placements: Sequence[Placements]) -> tuple[list[Placements], list[int]]:
    """The placements without repetition, and which of them each one is."""
    numbers: dict[Placements, int] = {}
    of = [numbers.setdefault(each, len(numbers)) for each in placements]
    return list(numbers), of


def _kept(graph: Graph, recompute: bool) -> list[bool]:
    """Which operators keep what their backward needs. With recomputation only one layer does at a time: the one that
    keeps most; of the others only what enters a layer from another one is kept."""
    if not recompute:
        return [True] * len(graph)
    layers = [layer_of(operator.module) for operator in graph.operators]
    held: dict[str, float] = {}
    for operator, name in zip(graph.operators, layers, strict=True):
        held[name] = held.get(name, 0.0) + operator.saved
    largest = max((name for name in held if name), key=lambda name: held[name], default="")
    crossing_bytes = {
        read.source
        for o, name in zip(graph.operators, layers, strict=True)
        for read in o.reads
        if layers[read.source] != name
    }
    return [name in ("", largest) or op in crossing_bytes for op, name in enumerate(layers)]
