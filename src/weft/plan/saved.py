"""What a saved plan holds, and how it is read again, perhaps edited by hand.

A saved plan holds its decisions, its costs, and a row for each operator with what that costs by itself, to be shown.
The keys are those of format 1, whatever the names of the fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from weft.errors import PlanError
from weft.hardware.presets import preset
from weft.plan.configurations import ParallelConfig, price_assignment
from weft.plan.costs import Tables, tables
from weft.plan.graph import PARAMETER, Graph, Tensor, batch_dims
from weft.plan.redistribution import gathered_bytes
from weft.plan.sharding import (
    PARTIAL,
    REPLICATED,
    Mesh,
    OpSplit,
    Placements,
    local_shape,
    operand_placements,
    result_placements,
    shards,
    splits,
)
from weft.plan.solver import OverLimit
from weft.utils.files import read_json

if TYPE_CHECKING:
    from weft.hardware.machine import Machine
    from weft.plan.plan import Plan

FORMAT = 1

COST_KEYS = {"step_time": "step", "lower_bound": "bound"}
"""Fields of `PlanCost` that a file calls otherwise."""

_Count = Annotated[int, msgspec.Meta(ge=1)]


class SavedCost(msgspec.Struct, rename=COST_KEYS):
    """A `PlanCost` as a file has it."""

    step_time: float
    compute: float
    communication: float
    bubble: float
    memory: float
    parameters: float
    activations: float
    lower_bound: float


class SavedPlan(msgspec.Struct):
    """What of a saved plan is read again; files of older versions have no ``training`` and no ``machine_spec``."""

    format: int
    machine: str
    devices: _Count
    mesh: list[_Count]
    microbatches: _Count
    recompute: bool
    splits: dict[str, list[str]]
    stage: dict[str, int]
    idle: int = 0
    limit: float | None = None
    training: dict[str, Any] | None = None
    machine_spec: dict[str, Any] | None = None

    @classmethod
    def of(cls, found: Any, where: str = "what is given") -> SavedPlan:
        """The values of a saved plan; PlanError where it has not the form of one."""
        if isinstance(found, Mapping) and found.get("format", FORMAT) != FORMAT:
            raise PlanError(f"{where} has format {found['format']!r}, and format {FORMAT} is read here: plan again")
        try:
            saved = msgspec.convert(found, cls)
        except msgspec.ValidationError as error:
            raise PlanError(f"{where} is no plan: {error}") from error
        if saved.devices % math.prod(saved.mesh):
            raise PlanError(f"{where} is no plan: {saved.devices} devices are not stages of the mesh {saved.mesh}")
        return saved


def read_plan(path: Path | str) -> dict[str, Any]:
    """What `Plan.save` wrote, checked for its form; `weft.plan.load` binds it to a model."""
    found = read_json(Path(path))
    SavedPlan.of(found, f"'{path}'")
    return dict(found)


def read_splits(graph: Graph, mesh: Mesh, given: Mapping[str, Any]) -> tuple[OpSplit, ...]:
    """Splits from the names of dimensions; raises PlanError for an operator or a split that cannot be."""
    known = {operator.name for operator in graph.operators}
    if unknown := [name for name in given if name not in known]:
        raise PlanError(
            f"the plan splits '{unknown[0]}', which the model has not: it is of another model, batch or torch"
        )
    found = []
    for operator in graph.operators:
        if operator.name not in given:
            raise PlanError(f"the plan says nothing of '{operator.name}'")
        names = [dim.name for dim in operator.dims]
        words = list(given[operator.name])
        if len(words) != len(mesh.sizes):
            raise PlanError(
                f"'{operator.name}' is split as {words}: the mesh {mesh} takes {len(mesh.sizes)}, one for each axis"
            )
        if wrong := [word for word in words if word != "-" and word not in names]:
            raise PlanError(f"'{operator.name}' has no dimension '{wrong[0]}': it has {', '.join(names) or 'none'}")
        split = tuple(REPLICATED if word == "-" else names.index(word) for word in words)
        if split not in set(splits(operator, mesh)):
            raise PlanError(f"'{operator.name}' cannot be split as {words} on the mesh {mesh}: the parts are not equal")
        found.append(split)
    return tuple(found)


def operators(plan: Plan) -> list[dict[str, Any]]:
    """A row for each operator: what it is, its split as names of dimensions, what it reads and gives, whole and on a
    device, and its costs where they are known. A read is ``moved`` where anything goes from one device to another."""
    costs, moved = op_costs(plan) or ({}, set())
    batch = batch_dims(plan.graph)
    rows = []
    for op, operator in enumerate(plan.graph.operators):
        split, dim = plan.splits[op], batch[op]
        row: dict[str, Any] = {
            "name": operator.name,
            "kind": operator.kind,
            "target": operator.target,
            "module": operator.module,
            "known": operator.known,
            "flops": operator.flops,
            "dims": [[own.name, own.size] for own in operator.dims],
            "split": list(plan.names(op)),
            "batch": None if dim is None else operator.dims[dim].name,
            "stage": plan.stage[op],
            "reads": [
                {
                    "source": read.source,
                    # What no gradient flows through is made anew in each stage.
                    "moved": (read.source, op) in moved
                    or (plan.stage[read.source] != plan.stage[op] and read.tensor.gradient),
                    **_tensor(read.tensor, operand_placements(read.tensor, split), plan.mesh),
                }
                for read in operator.reads
            ],
            "gives": [_tensor(own, result_placements(own, split), plan.mesh) for own in operator.outputs],
        }
        rows.append({**row, **{name: values[op] for name, values in costs.items()}})
    return rows


def op_costs(plan: Plan) -> tuple[dict[str, list[float]], set[tuple[int, int]]] | None:
    """Columns of costs, a value for each operator, and the edges (source, reader) that move anything: on the machine of
    the plan or the preset that it names. None where the costs cannot be known: the machine is not, or the costs of the
    plan are others, as after its splits were edited.

    ``compute`` and ``communication`` (of its reads and their gradients) are seconds of a step, the others bytes of a
    device: ``weights`` and ``states`` (gradients and the optimizer's) of parameters, ``activations`` of one micro-batch
    in flight, ``gathered`` of gathered weights and their gradients while the operator runs.
    """
    try:
        found = _tables(plan, plan.machine_spec or preset(plan.machine))
    except PlanError:
        return None
    if found is None:
        return None
    communication = [0.0] * len(plan.graph)
    for (_, reader), table in found.moves.items():
        communication[reader] += float(table[0, 0])
    weights, states, activations = [], [], []
    for operator, split, table in zip(plan.graph.operators, plan.splits, found.memory, strict=True):
        parameter, memory = operator.kind == PARAMETER, float(table[0])
        own = (
            operator.outputs[0].bytes / shards(result_placements(operator.outputs[0], split), plan.mesh)
            if parameter
            else 0.0
        )
        weights.append(own)
        states.append(memory - own if parameter else 0.0)
        activations.append(0.0 if parameter else memory)
    columns = {
        "compute": [float(table[0]) for table in found.compute],
        "communication": communication,
        "weights": weights,
        "states": states,
        "activations": activations,
        "gathered": gathered_bytes(plan.graph, plan.mesh, plan.splits, plan.recompute),
    }
    return columns, {edge for edge, table in found.moves.items() if table[0, 0] > 0}


def _tensor(tensor: Tensor, placements: Placements, mesh: Mesh) -> dict[str, Any]:
    here = local_shape(tensor.shape, placements, mesh)
    return {"shape": list(tensor.shape), "local": list(here), "partial": PARTIAL in placements}


def _tables(plan: Plan, machine: Machine) -> Tables | None:
    """The tables that have each operator's own split alone, if they give the costs of the plan."""
    own = plan.splits
    made = tables(plan.graph, plan.mesh, machine, plan.training, lambda at, split: split == own[at], plan.stages)
    config = ParallelConfig(plan.graph, plan.mesh, plan.stages, plan.training)
    assignment = (0,) * len(plan.graph)
    try:
        cost = price_assignment(config, machine, made, assignment, plan.memory_limit).cost
    except OverLimit:
        cost = price_assignment(config, machine, made, assignment, math.inf).cost
    pairs = [(getattr(cost, name), getattr(plan.cost, name)) for name in ("compute", "communication", "memory")]
    return made if all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in pairs) else None
