"""What a plan is compared with: data parallelism, fully sharded data parallelism, and what experts do by hand.

Each is a rule that says which splits are allowed; the best plan within the rule stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from weft.plan.configurations import ParallelConfig, solve_config
from weft.plan.costs import PlanCost, SplitFilter
from weft.plan.graph import PARAMETER, Graph, batch_dims, layer_of
from weft.plan.options import PlanRequest
from weft.plan.redistribution import meshes
from weft.plan.sharding import REPLICATED, Mesh, OpSplit, splits


@dataclass(frozen=True, slots=True)
class Comparison:
    """Another strategy beside the plan; ``cost`` is None where it does not apply, and ``why`` says so."""

    name: str
    cost: PlanCost | None
    mesh: str = ""
    why: str = ""


def data_parallel(graph: Graph, mesh: Mesh) -> SplitFilter:
    """Every device has all parameters and its part of the batch."""
    dims = batch_dims(graph)

    def allowed(op: int, split: OpSplit) -> bool:
        operator = graph.operators[op]
        dim = dims[op]
        if operator.kind == PARAMETER or dim is None or not _fits(operator.dims[dim].parts, mesh):
            return split == (REPLICATED,) * len(split)
        return split == (dim,) * len(split)

    return allowed


def fully_sharded(graph: Graph, mesh: Mesh) -> SplitFilter:
    """Data parallelism whose parameters, gradients and states are each cut along their first axis that can be; what is
    too small to cut stays whole."""
    same = data_parallel(graph, mesh)
    stored = {}
    for op, operator in enumerate(graph.operators):
        if operator.kind == PARAMETER:
            able = [dim for dim in range(len(operator.dims)) if _fits(operator.dims[dim].parts, mesh)]
            stored[op] = (able[0] if able else REPLICATED,) * len(mesh.sizes)

    def allowed(op: int, split: OpSplit) -> bool:
        return split == stored[op] if op in stored else same(op, split)

    return allowed


def _fits(parts: int, mesh: Mesh) -> bool:
    return mesh.devices > 1 and parts % mesh.devices == 0


def expert(graph: Graph, mesh: Mesh) -> SplitFilter | None:
    """On a mesh of two axes: the outer one has the batch. Along the inner one, the products of each layer of a
    transformer are cut by heads and hidden units, and what lies between layers is whole, as Megatron does; in a network
    without attention, the linear layers are cut and the convolutions are not, which is the one weird trick of
    Krizhevsky. None where the rule does not apply."""
    if len(mesh.sizes) != 2:
        return None
    dims = batch_dims(graph)
    attention = any(operator.kind == "attention" for operator in graph.operators)
    parameters = {op for op, operator in enumerate(graph.operators) if operator.kind == PARAMETER}
    outside = {
        op
        for op, operator in enumerate(graph.operators)
        if operator.kind == "norm" or (operator.kind == "conv") or (not attention and operator.kind != "matmul")
    }

    def fits(op: int) -> set[OpSplit]:
        """The splits that follow the rule, if the operator can follow it."""
        operator, dim = graph.operators[op], dims[op]
        every = set(splits(operator, mesh))
        if op in parameters:
            return {split for split in every if split[0] == REPLICATED}
        outer = {split for split in every if split[0] == (REPLICATED if dim is None else dim)} or {
            split for split in every if split[0] == REPLICATED
        }
        if op in outside:
            return {split for split in outer if split[1] == REPLICATED} or outer
        weighs = operator.kind == "matmul" and any(read.source in parameters for read in operator.reads)
        if weighs and (not attention or layer_of(operator.module)):
            cut = {split for split in outer if split[1] not in (REPLICATED, dim)}
            return {s for s in cut if operator.dims[s[1]].name in ("n", "k")} or cut or outer
        return {split for split in outer if split[1] != dim} or outer

    rule = [fits(op) for op in range(len(graph))]
    return lambda op, split: split in rule[op]


def compare_with_others(graph: Graph, request: PlanRequest) -> Iterator[Comparison]:
    """What others would do with the same devices: the batch whole, one stage, no recomputation."""
    flat = Mesh((request.devices,))

    def within(mesh: Mesh, allowed: SplitFilter) -> PlanCost:
        config = ParallelConfig(graph, mesh, 1, request.training)
        return solve_config(config, request.machine, math.inf, allowed).cost

    yield Comparison("data parallel", within(flat, data_parallel(graph, flat)), str(flat))
    yield Comparison("fully sharded", within(flat, fully_sharded(graph, flat)), str(flat))
    experts = [(within(mesh, rule), mesh) for mesh in meshes(request.devices, 2) if (rule := expert(graph, mesh))]
    if experts:
        cost, mesh = min(experts, key=lambda one: one[0].step_time)
        yield Comparison("expert", cost, str(mesh))
    else:
        yield Comparison("expert", None, "", "needs at least 4 devices in two mesh axes")
