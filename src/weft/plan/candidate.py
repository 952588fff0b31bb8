"""One way to use the devices (stages, mesh, micro-batches, recomputation), solved for the splits that suit it best."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from weft.plan.cutting import Cutting, Load, cut, homes
from weft.plan.graph import PARAMETER, Graph
from weft.plan.layout import Mesh
from weft.plan.machine import Machine
from weft.plan.plan import Cost
from weft.plan.solve import OverLimit, solve
from weft.plan.tables import Allowed, Tables, Training, memories, tables

SECONDS = 5.0  # for one solution; what it then proves is its bound


@dataclass(frozen=True, slots=True)
class Shape:
    """How the devices are used: so many stages, each a mesh, for a graph of one micro-batch."""

    graph: Graph
    mesh: Mesh
    stages: int
    training: Training


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape with its best splits."""

    shape: Shape
    tables: Tables
    pick: tuple[int, ...]
    cutting: Cutting
    cost: Cost
    pressed: bool = False  # whether more memory would make it faster


class Slower(Exception):
    """The shape is proven to be no faster than what was to be beaten."""


def solved(
    shape: Shape,
    machine: Machine,
    limit: float,
    allowed: Allowed | None = None,
    gap: float = 0.01,
    beat: float = math.inf,
    seconds: float = SECONDS,
) -> Candidate:
    """The best splits within the memory of each device; raises OverLimit, with the least that would do, if none fit,
    and Slower if a step takes ``beat`` seconds or more."""
    least = least_memory(shape, allowed)
    if least > shape.stages * limit:
        raise OverLimit(least / shape.stages, limit)
    found = tables(shape.graph, shape.mesh, machine, shape.training, allowed)
    free = solve(found.problem(), gap=gap, seconds=seconds)
    if _stretched(shape, free.bound, found) >= beat:
        raise Slower
    last: OverLimit | None = None
    # The memory of all stages together is a limit that is never too tight; then ever tighter, until a cut keeps each.
    for share in (1.0, 0.9, 0.8, 0.65, 0.5) if shape.stages > 1 else (1.0,):
        total = share * shape.stages * limit
        picked = free if found.weight(free.pick) <= total else solve(found.problem(total), gap=gap, seconds=seconds)
        if _stretched(shape, picked.bound, found) >= beat:
            raise Slower
        try:
            made = priced(shape, machine, found, picked.pick, limit, picked.bound)
            return replace(made, pressed=picked is not free)
        except OverLimit as problem:
            last = problem
    assert last is not None
    raise last


def _stretched(shape: Shape, total: float, found: Tables) -> float:
    """Seconds of a step of which all stages together have ``total``: at best they have equal parts, unless one
    operator alone, which no cut divides, takes longer."""
    count = shape.training.microbatches
    heaviest = max((float(costs.min()) for costs in found.compute), default=0.0)
    return (total + (count - 1) * max(total / shape.stages, heaviest)) / count


def priced(
    shape: Shape, machine: Machine, found: Tables, pick: tuple[int, ...], limit: float, bound: float | None = None
) -> Candidate:
    """What a pick costs; raises OverLimit where no cut into stages keeps the limit."""
    stages, count = shape.stages, shape.training.microbatches
    loads = _loads(shape.graph, found, pick)
    compute = math.fsum(float(costs[k]) for costs, k in zip(found.compute, pick, strict=True))
    send = _send(machine, shape)
    cutting = cut(shape.graph, loads, stages, count, limit, send)
    if cutting is None:
        least = sum(load.kept for load in loads) / stages
        raise OverLimit(max(least, math.nextafter(limit, math.inf)), limit)
    slowest, total = max(cutting.seconds), sum(cutting.seconds)
    waited = max(1.0, launches(shape, machine) / total) if total else 1.0  # for the host, which starts every kernel
    slowest, total, compute = slowest * waited, total * waited, compute + total * (waited - 1)
    # A step fills the pipeline once, and then the slowest stage goes on.
    step = (total + (count - 1) * slowest) / count
    fullest = max(range(stages), key=lambda stage: cutting.memory[stage])
    kept = math.fsum(load.kept for load, stage in zip(loads, cutting.stage, strict=True) if stage == fullest)
    ideal = total / stages
    return Candidate(
        shape,
        found,
        pick,
        cutting,
        Cost(
            step=step,
            compute=compute / stages,
            communication=(total - compute) / stages,
            bubble=step - ideal,
            memory=cutting.memory[fullest],
            parameters=kept,
            activations=cutting.memory[fullest] - kept,
            bound=step if bound is None else min(step, _stretched(shape, max(bound, launches(shape, machine)), found)),
        ),
    )


def launches(shape: Shape, machine: Machine) -> float:
    """Seconds that the hosts of all stages need to start the kernels of a step, which no split makes fewer."""
    kernels = sum(
        1 + (any(tensor.gradient for tensor in operator.outputs) and operator.kind != PARAMETER)
        for operator in shape.graph.operators
        if operator.flops or operator.moved or operator.kind == PARAMETER
    )
    return machine.device.launch * kernels * shape.training.microbatches


def _loads(graph: Graph, found: Tables, pick: tuple[int, ...]) -> list[Load]:
    seconds = [float(costs[k]) for costs, k in zip(found.compute, pick, strict=True)]
    for (source, reader), table in found.moves.items():
        seconds[reader] += float(table[pick[source], pick[reader]])
    loads = []
    for place, operator in enumerate(graph.operators):
        memory = float(found.memory[place][pick[place]])
        parameter = operator.kind == PARAMETER
        loads.append(Load(seconds[place], memory if parameter else 0.0, 0.0 if parameter else memory))
    return loads


def _send(machine: Machine, shape: Shape) -> float:
    """Seconds a byte of a tensor takes from one stage to the next: every device sends its part."""
    if shape.stages == 1:
        return 0.0
    bandwidth, _ = machine.axis_link((shape.stages, *shape.mesh.sizes), 0)
    return 1 / bandwidth / shape.mesh.devices


def least_memory(shape: Shape, allowed: Allowed | None = None) -> float:
    """The fewest bytes that any splits need, of one device of each stage together."""
    return math.fsum(_least(shape, allowed))


def least_of_stage(shape: Shape) -> float:
    """Bytes that some stage needs on each of its devices at least: its equal part, or an operator with its parameters,
    which no cut divides."""
    least = _least(shape, None)
    held = dict.fromkeys(range(len(least)), 0.0)
    for place, home in enumerate(homes(shape.graph)):
        held[home] += least[place]
    return max(math.fsum(least) / shape.stages, max(held.values(), default=0.0))


def _least(shape: Shape, allowed: Allowed | None) -> list[float]:
    return [float(memory.min()) for memory in memories(shape.graph, shape.mesh, shape.training, allowed)]
