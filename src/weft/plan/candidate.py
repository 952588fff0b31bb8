"""One way to use the devices (stages, mesh, micro-batches, recomputation), solved for the splits that suit it best."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

from weft.hardware.machine import Machine
from weft.plan.cutting import Cutting, Load, cut
from weft.plan.graph import PARAMETER, Graph
from weft.plan.layout import Mesh
from weft.plan.line import homes
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
    total: float = 0.0  # seconds that all stages together are not below, whatever the splits
    pressed: bool = False  # whether more memory would make it faster


class Slower(Exception):
    """The shape is proven to be no faster than what was to be beaten; ``always``: with any memory."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always


def solved(
    shape: Shape,
    machine: Machine,
    limit: float,
    allowed: Allowed | None = None,
    gap: float = 0.01,
    beat: float = math.inf,
    seconds: float = SECONDS,
) -> Candidate:
    """Good splits within the memory of each device, the best ones on a single stage; raises OverLimit, with the least
    that would do, if none fit, and Slower if a step takes ``beat`` seconds or more."""
    least = least_memory(shape, allowed)
    if least > shape.stages * limit:
        raise OverLimit(least / shape.stages, limit)
    found = tables(shape.graph, shape.mesh, machine, shape.training, allowed, shape.stages)
    alone = math.fsum(float(costs.min()) for costs in found.compute)
    if _stretched(shape, alone, found) >= beat:
        raise Slower(always=True)
    free = solve(found.problem(), gap=gap, seconds=seconds)
    bound = free.bound
    if _stretched(shape, bound, found) >= beat:
        raise Slower(always=True)
    # The memory of all stages together is a limit that is never too tight; then ever tighter, until a cut keeps each.
    for share in (1.0, 0.9, 0.8, 0.65, 0.5) if shape.stages > 1 else (1.0,):
        total = share * shape.stages * limit
        if least > total:
            break
        picked = free if found.weight(free.pick) <= total else solve(found.problem(total), gap=gap, seconds=seconds)
        if share == 1.0:
            bound = max(bound, picked.bound)  # of a tighter limit than there is, it would be none
            if _stretched(shape, bound, found) >= beat:
                raise Slower(always=False)
        with suppress(OverLimit):
            made = priced(shape, machine, found, picked.pick, limit, bound)
            pressed = (
                picked is not free or made.cost.step > priced(shape, machine, found, free.pick, math.inf).cost.step
            )
            return replace(made, total=bound, pressed=pressed)
    # If anything fits, then the lightest splits do.
    light = tuple(int(memory.argmin()) for memory in found.memory)
    return replace(priced(shape, machine, found, light, limit, bound), total=bound, pressed=True)


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
    loads = _loads(shape, machine, found, pick)
    compute = math.fsum(float(costs[k]) for costs, k in zip(found.compute, pick, strict=True))
    send = send_seconds(machine, shape)
    cutting = cut(shape.graph, loads, stages, count, limit, send)
    if cutting is None:
        least = sum(load.kept for load in loads) / stages
        raise OverLimit(max(least, math.nextafter(limit, math.inf)), limit)
    total = math.fsum(cutting.seconds)
    # A step fills the pipeline once, and then the slowest stage goes on.
    step = (total + (count - 1) * max(cutting.seconds)) / count
    moving = math.fsum(load.seconds for load in loads) - compute + math.fsum(cutting.sent)
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
            compute=(total - moving) / stages,  # and waiting for the host, which starts every kernel
            communication=moving / stages,
            bubble=step - ideal,
            memory=cutting.memory[fullest],
            parameters=kept,
            activations=cutting.memory[fullest] - kept,
            bound=step if bound is None else min(step, _stretched(shape, max(bound, launches(shape, machine)), found)),
        ),
    )


def launches(shape: Shape, machine: Machine) -> float:
    """Seconds that the hosts of all stages need to start the kernels of a step, which no split makes fewer."""
    return math.fsum(launches_of(shape, machine))


def launches_of(shape: Shape, machine: Machine) -> list[float]:
    """Seconds of each operator that a host needs to start its kernels."""
    once = machine.device.launch * shape.training.microbatches
    return [
        once * (1 + (any(tensor.gradient for tensor in operator.outputs) and operator.kind != PARAMETER))
        if operator.flops or operator.moved or operator.kind == PARAMETER
        else 0.0
        for operator in shape.graph.operators
    ]


def _loads(shape: Shape, machine: Machine, found: Tables, pick: tuple[int, ...]) -> list[Load]:
    seconds = [float(costs[k]) for costs, k in zip(found.compute, pick, strict=True)]
    for (source, reader), table in found.moves.items():
        seconds[reader] += float(table[pick[source], pick[reader]])
    loads = []
    for place, (operator, launch) in enumerate(zip(shape.graph.operators, launches_of(shape, machine), strict=True)):
        memory = float(found.memory[place][pick[place]])
        parameter = operator.kind == PARAMETER
        loads.append(Load(seconds[place], memory if parameter else 0.0, 0.0 if parameter else memory, launch))
    return loads


def send_seconds(machine: Machine, shape: Shape) -> float:
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
