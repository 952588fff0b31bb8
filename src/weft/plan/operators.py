"""The operators of a plan as plain values, with what each costs by itself: a saved plan holds them to be shown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.errors import PlanError
from weft.hardware.presets import preset
from weft.plan.batches import batch_dims
from weft.plan.candidate import Shape, priced
from weft.plan.graph import PARAMETER, Tensor
from weft.plan.layout import PARTIAL, Layout, Mesh, layout, local_shape, result_layout, shards
from weft.plan.solve import OverLimit
from weft.plan.tables import Tables, tables

if TYPE_CHECKING:
    from weft.hardware.machine import Machine
    from weft.plan.plan import Cost, Plan


@dataclass(frozen=True, slots=True)
class OpCosts:
    """Of each operator, in the order of the graph: seconds of a step, and bytes of a device.

    ``communication`` is what its reads and their gradients take to move; ``moved`` are the edges, as (source, reader),
    that move anything. ``weights`` and ``states`` (gradients and the optimizer's) are of parameters, ``activations`` of
    one micro-batch in flight.
    """

    compute: tuple[float, ...]
    communication: tuple[float, ...]
    moved: frozenset[tuple[int, int]]
    weights: tuple[float, ...]
    states: tuple[float, ...]
    activations: tuple[float, ...]


def operators(plan: Plan) -> list[dict[str, Any]]:
    """A row for each operator: what it is, its split as names of dimensions, what it reads and gives, whole and on a
    device, and its costs where they are known. A read is ``moved`` where anything goes from one device to another."""
    costs, batch = op_costs(plan), batch_dims(plan.graph)
    moved = set(costs.moved) if costs else set()
    rows = []
    for place, operator in enumerate(plan.graph.operators):
        split, dim = plan.splits[place], batch[place]
        row = {
            "name": operator.name,
            "kind": operator.kind,
            "target": operator.target,
            "module": operator.module,
            "known": operator.known,
            "flops": operator.flops,
            "dims": [[own.name, own.size] for own in operator.dims],
            "split": list(plan.names(place)),
            "batch": None if dim is None else operator.dims[dim].name,
            "stage": plan.stage[place],
            "reads": [
                {
                    "source": read.source,
                    # What no gradient flows through is made anew in each stage.
                    "moved": (read.source, place) in moved
                    or (plan.stage[read.source] != plan.stage[place] and read.tensor.gradient),
                    **_tensor(read.tensor, layout(read.tensor, split), plan.mesh),
                }
                for read in operator.reads
            ],
            "gives": [_tensor(own, result_layout(own, split), plan.mesh) for own in operator.outputs],
        }
        if costs:
            for name in ("compute", "communication", "weights", "states", "activations"):
                row[name] = getattr(costs, name)[place]
        rows.append(row)
    return rows


def op_costs(plan: Plan) -> OpCosts | None:
    """The costs of each operator, on the machine of the plan or the preset that it names; None where they cannot be
    known: the machine is not, or the costs of the plan are others, as after its splits were edited."""
    try:
        found = _tables(plan, plan.computer or preset(plan.machine))
    except PlanError:
        return None
    if found is None:
        return None
    communication = [0.0] * len(plan.graph)
    for (_, reader), table in found.moves.items():
        communication[reader] += float(table[0, 0])
    memory = [float(table[0]) for table in found.memory]
    parameters = [operator.kind == PARAMETER for operator in plan.graph.operators]
    weights = [
        operator.outputs[0].bytes / shards(result_layout(operator.outputs[0], split), plan.mesh) if parameter else 0.0
        for operator, split, parameter in zip(plan.graph.operators, plan.splits, parameters, strict=True)
    ]
    return OpCosts(
        tuple(float(table[0]) for table in found.compute),
        tuple(communication),
        frozenset(edge for edge, table in found.moves.items() if table[0, 0] > 0),
        tuple(weights),
        tuple(b - w if own else 0.0 for b, w, own in zip(memory, weights, parameters, strict=True)),
        tuple(0.0 if own else b for b, own in zip(memory, parameters, strict=True)),
    )


def _tensor(tensor: Tensor, laid: Layout, mesh: Mesh) -> dict[str, Any]:
    here = local_shape(tensor.shape, laid, mesh)
    return {"shape": list(tensor.shape), "local": list(here), "partial": PARTIAL in laid}


def _tables(plan: Plan, machine: Machine) -> Tables | None:
    """The tables that have each operator's own split alone, if they give the costs of the plan."""
    made, cost = _priced(plan, machine)
    pairs = [(getattr(cost, name), getattr(plan.cost, name)) for name in ("compute", "communication", "memory")]
    return made if all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in pairs) else None


def _priced(plan: Plan, machine: Machine) -> tuple[Tables, Cost]:
    own = plan.splits
    made = tables(plan.graph, plan.mesh, machine, plan.training, lambda at, split: split == own[at], plan.stages)
    shape = Shape(plan.graph, plan.mesh, plan.stages, plan.training)
    pick = (0,) * len(plan.graph)
    try:
        return made, priced(shape, machine, made, pick, plan.limit).cost
    except OverLimit:
        return made, priced(shape, machine, made, pick, math.inf).cost
