"""What each operator of a plan costs by itself: seconds of a step, and bytes of a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.candidate import Shape, priced
from weft.plan.graph import PARAMETER
from weft.plan.layout import result_layout, shards
from weft.plan.machine import Machine
from weft.plan.plan import Cost, Plan
from weft.plan.presets import preset
from weft.plan.solve import OverLimit
from weft.plan.tables import Tables, tables


@dataclass(frozen=True, slots=True)
class Prices:
    """Of each operator, in the order of the graph. ``communication`` is what its reads and their gradients take to
    move; ``moved`` are the edges, as (source, reader), that move anything. ``weights`` and ``states`` (gradients and
    the optimizer's) are of parameters, ``activations`` of one micro-batch in flight."""

    compute: tuple[float, ...]
    communication: tuple[float, ...]
    moved: frozenset[tuple[int, int]]
    weights: tuple[float, ...]
    states: tuple[float, ...]
    activations: tuple[float, ...]

    def stage_memory(self, plan: Plan, stage: int) -> tuple[float, float, float]:
        """Bytes of each device of a stage: weights, gradients with states, activations in flight."""
        own = [place for place, where in enumerate(plan.stage) if where == stage]
        flying = min(plan.microbatches, plan.stages - stage)
        return (
            math.fsum(self.weights[place] for place in own),
            math.fsum(self.states[place] for place in own),
            flying * math.fsum(self.activations[place] for place in own),
        )


def prices(plan: Plan, machine: Machine | None = None) -> Prices | None:
    """The prices, on the machine, else that of the plan or the preset that it names; None where they cannot be told:
    the machine is not known, or the costs of the plan are others, as after its splits were edited."""
    try:
        found = _tables(plan, machine or plan.computer or preset(plan.machine))
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
    return Prices(
        tuple(float(table[0]) for table in found.compute),
        tuple(communication),
        frozenset(edge for edge, table in found.moves.items() if table[0, 0] > 0),
        tuple(weights),
        tuple(b - w if own else 0.0 for b, w, own in zip(memory, weights, parameters, strict=True)),
        tuple(0.0 if own else b for b, own in zip(memory, parameters, strict=True)),
    )


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
