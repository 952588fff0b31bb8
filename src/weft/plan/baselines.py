"""What a plan is compared with: data parallelism, fully sharded data parallelism, and what experts do by hand.

Each is a rule that says which splits are allowed; the best plan within the rule stands for it.
"""

from __future__ import annotations

from weft.plan.batches import batch_dims
from weft.plan.graph import PARAMETER, Graph
from weft.plan.layout import REPLICATED, Mesh, Split, splits
from weft.plan.tables import Allowed, layer_of


def data_parallel(graph: Graph, mesh: Mesh) -> Allowed:
    """Every device has all parameters and its part of the batch."""
    dims = batch_dims(graph)

    def allowed(place: int, split: Split) -> bool:
        operator = graph.operators[place]
        dim = dims[place]
        if operator.kind == PARAMETER or dim is None or not _fits(operator.dims[dim].parts, mesh):
            return split == (REPLICATED,) * len(split)
        return split == (dim,) * len(split)

    return allowed


def fully_sharded(graph: Graph, mesh: Mesh) -> Allowed:
    """Data parallelism whose parameters, gradients and states are each cut along their first axis that can be; what is
    too small to cut stays whole."""
    same = data_parallel(graph, mesh)
    stored = {}
    for place, operator in enumerate(graph.operators):
        if operator.kind == PARAMETER:
            able = [dim for dim in range(len(operator.dims)) if _fits(operator.dims[dim].parts, mesh)]
            stored[place] = (able[0] if able else REPLICATED,) * len(mesh.sizes)

    def allowed(place: int, split: Split) -> bool:
        return split == stored[place] if place in stored else same(place, split)

    return allowed


def _fits(parts: int, mesh: Mesh) -> bool:
    return mesh.devices > 1 and parts % mesh.devices == 0


def expert(graph: Graph, mesh: Mesh) -> Allowed | None:
    """On a mesh of two axes: the outer one has the batch. Along the inner one, the products of each layer of a
    transformer are cut by heads and hidden units, and what lies between layers is whole, as Megatron does; in a network
    without attention, the linear layers are cut and the convolutions are not, which is the one weird trick of
    Krizhevsky. None where the rule does not apply."""
    if len(mesh.sizes) != 2:
        return None
    dims = batch_dims(graph)
    attention = any(operator.kind == "attention" for operator in graph.operators)
    parameters = {place for place, operator in enumerate(graph.operators) if operator.kind == PARAMETER}
    outside = {
        place
        for place, operator in enumerate(graph.operators)
        if operator.kind == "norm" or (operator.kind == "conv") or (not attention and operator.kind != "matmul")
    }

    def fits(place: int) -> set[Split]:
        """The splits that follow the rule, if the operator can follow it."""
        operator, dim = graph.operators[place], dims[place]
        every = set(splits(operator, mesh))
        if place in parameters:
            return {split for split in every if split[0] == REPLICATED}
        outer = {split for split in every if split[0] == (REPLICATED if dim is None else dim)} or {
            split for split in every if split[0] == REPLICATED
        }
        if place in outside:
            return {split for split in outer if split[1] == REPLICATED} or outer
        weighs = operator.kind == "matmul" and any(read.source in parameters for read in operator.reads)
        if weighs and (not attention or layer_of(operator.module)):
            cut = {split for split in outer if split[1] not in (REPLICATED, dim)}
            return {s for s in cut if operator.dims[s[1]].name in ("n", "k")} or cut or outer
        return {split for split in outer if split[1] != dim} or outer

    rule = [fits(place) for place in range(len(graph))]
    return lambda place, split: split in rule[place]
