"""The configurations of a plan: how many stages, which mesh, how many micro-batches, and whether to recompute.

They are enumerated, the most promising first, and each is solved for the splits that suit it best. The first assignment
of several stages keeps the memory of all together. Once the cut is known, each stage may fill its own memory: with few
micro-batches in flight there is more room in the last stages. Then the graph is cut anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from weft.hardware.machine import Machine
from weft.plan.costs import PlanCost, SplitFilter, Tables, TrainingSpec, memories, split_choices, tables
from weft.plan.graph import PARAMETER, Graph, batch_size, microbatch
from weft.plan.options import PlanRequest
from weft.plan.pipeline_stages import OpLoad, StageCut, cut, stage_anchors
from weft.plan.redistribution import gathered_bytes, meshes
from weft.plan.sharding import Mesh
from weft.plan.solver import OverLimit, Problem, solve

SECONDS = 5.0  # for one solution; what it then proves is its bound
_RESERVATIONS = 4  # solutions on one stage, each of which leaves room for what the one before gathers
_STAGE_SECONDS = 0.5  # for one stage, solved again
_PASSES = 3  # over all stages, each solved with the others as they are


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How the devices are used: so many stages, each a mesh, for a graph of one micro-batch."""

    graph: Graph
    mesh: Mesh
    stages: int
    training: TrainingSpec


@dataclass(frozen=True, slots=True)
class SolvedConfig:
    """A configuration with its best splits."""

    config: ParallelConfig
    tables: Tables
    assignment: tuple[int, ...]
    stage_cut: StageCut
    cost: PlanCost
    memory_bound: bool = False  # whether more memory would make it faster


class NotFaster(Exception):
    """The configuration is proven to be no faster than what was to be beaten; ``always``: with any memory."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always


def solve_config(
    config: ParallelConfig,
    machine: Machine,
    limit: float,
    allowed: SplitFilter | None = None,
    tolerance: float = 0.01,
    beat: float = math.inf,
    seconds: float = SECONDS,
) -> SolvedConfig:
    """Good splits within the memory of each device, the best ones on a single stage; raises OverLimit, with the least
    that would do, if none fit, and NotFaster if a step takes ``beat`` seconds or more."""
    least = math.fsum(_least_memory(config, allowed))  # of one device of each stage together
    if least > config.stages * limit:
        raise OverLimit(least / config.stages, limit)
    found = tables(config.graph, config.mesh, machine, config.training, allowed, config.stages)
    unsplit_moves = math.fsum(float(costs.min()) for costs in found.compute)
    if _step_seconds(config, unsplit_moves, found) >= beat:
        raise NotFaster(always=True)
    free = solve(found.problem(), tolerance=tolerance, time_limit=seconds)
    bound = free.bound
    if _step_seconds(config, bound, found) >= beat:
        raise NotFaster(always=True)
    # The memory of all stages together is a limit that is never too tight; then ever tighter, until a cut keeps each.
    # On one stage room is left for the weights that the splits before would gather.
    reserved = 0.0
    for share in (1.0, 0.9, 0.8, 0.65, 0.5) if config.stages > 1 else (1.0,) * _RESERVATIONS:
        total = share * config.stages * limit - reserved
        if least > total:
            break
        picked = (
            free
            if (limited := found.problem(total)).weight(free.assignment) <= total
            else solve(limited, tolerance=tolerance, time_limit=seconds)
        )
        if share == 1.0 and not reserved:
            bound = max(bound, picked.bound)  # of a tighter limit than there is, it would be none
            if _step_seconds(config, bound, found) >= beat:
                raise NotFaster(always=False)
        with suppress(OverLimit):
            made = price_assignment(config, machine, found, picked.assignment, limit, bound)
            memory_bound = (
                picked is not free
                or made.cost.step_time
                > price_assignment(config, machine, found, free.assignment, math.inf).cost.step_time
            )
            return replace(made, memory_bound=memory_bound)
        if config.stages == 1:
            splits = found.chosen(picked.assignment)
            gathered = max(gathered_bytes(config.graph, config.mesh, splits, config.training.recompute))
            if gathered <= reserved:
                break
            reserved = gathered
    # The lightest splits fit where any do, but for what they gather.
    light = tuple(int(memory.argmin()) for memory in found.memory)
    return replace(price_assignment(config, machine, found, light, limit, bound), memory_bound=True)


def _step_seconds(config: ParallelConfig, total: float, found: Tables) -> float:
    """Seconds of a step of which all stages together have ``total``: at best they have equal parts, unless one
    operator alone, which no cut divides, takes longer."""
    count = config.training.microbatches
    heaviest = max((float(costs.min()) for costs in found.compute), default=0.0)
    return (total + (count - 1) * max(total / config.stages, heaviest)) / count


def price_assignment(
    config: ParallelConfig,
    machine: Machine,
    found: Tables,
    assignment: tuple[int, ...],
    limit: float,
    bound: float | None = None,
) -> SolvedConfig:
    """What an assignment costs; raises OverLimit where no cut into stages keeps the limit."""
    stages, count = config.stages, config.training.microbatches
    loads = _loads(config, machine, found, assignment)
    compute = math.fsum(float(costs[k]) for costs, k in zip(found.compute, assignment, strict=True))
    send = send_seconds(machine, config)
    stage_cut = cut(config.graph, loads, stages, count, limit, send)
    if stage_cut is None:
        least = sum(load.kept for load in loads) / stages
        raise OverLimit(max(least, math.nextafter(limit, math.inf)), limit)
    total = math.fsum(stage_cut.seconds)
    # A step fills the pipeline once, and then the slowest stage goes on.
    step = (total + (count - 1) * max(stage_cut.seconds)) / count
    moving = math.fsum(load.seconds for load in loads) - compute + math.fsum(stage_cut.sent)
    fullest = max(range(stages), key=lambda stage: stage_cut.memory[stage])
    own = [load for load, stage in zip(loads, stage_cut.stage, strict=True) if stage == fullest]
    kept = math.fsum(load.kept for load in own) + max((load.gathered for load in own), default=0.0)
    ideal = total / stages
    launching = math.fsum(load.launch for load in loads)
    return SolvedConfig(
        config,
        found,
        assignment,
        stage_cut,
        PlanCost(
            step_time=step,
            compute=(total - moving) / stages,  # and waiting for the host, which starts every kernel
            communication=moving / stages,
            bubble=step - ideal,
            memory=stage_cut.memory[fullest],
            parameters=kept,
            activations=stage_cut.memory[fullest] - kept,
            lower_bound=step if bound is None else min(step, _step_seconds(config, max(bound, launching), found)),
        ),
    )


def solve_stages(
    found: SolvedConfig, machine: Machine, memory_limit: float, tolerance: float, deadline: float = math.inf
) -> SolvedConfig:
    """The configuration, or a faster one of the same mesh, stages and micro-batches: each stage is solved again within
    the memory of its own devices."""
    config, best = found.config, found
    seen: set[tuple[int, ...]] = set()
    while best.assignment not in seen and len(seen) < _PASSES and time.monotonic() < deadline:
        seen.add(best.assignment)
        assignment = list(best.assignment)
        try:
            for stage in range(config.stages):
                inside = [op for op, of in enumerate(best.stage_cut.stage) if of == stage]
                room = memory_limit - best.stage_cut.gathered[stage]
                in_flight = min(config.training.microbatches, config.stages - stage)
                problem = _stage_problem(config.graph, found.tables, inside, assignment, in_flight, room)
                solved = solve(problem, tolerance=tolerance / 4, time_limit=_STAGE_SECONDS)
                for op, choice in zip(inside, solved.assignment, strict=True):
                    assignment[op] = choice
            made = price_assignment(config, machine, found.tables, tuple(assignment), memory_limit)
        except OverLimit:
            break
        if made.cost.step_time < best.cost.step_time:
            bound = min(found.cost.lower_bound, made.cost.step_time)
            best = replace(made, cost=replace(made.cost, lower_bound=bound))
    return best


def _stage_problem(
    graph: Graph, found: Tables, inside: Sequence[int], around: Sequence[int], in_flight: int, limit: float
) -> Problem:
    """The operators of one stage as a problem, where all others have the configurations ``around``."""
    number = {op: at for at, op in enumerate(inside)}
    costs = {op: found.compute[op] for op in inside}
    pairs = {}
    for (source, reader), table in found.moves.items():
        if source in number and reader in number:
            pairs[number[source], number[reader]] = table
        elif reader in number:
            costs[reader] = costs[reader] + table[around[source]]
        elif source in number:
            costs[source] = costs[source] + table[:, around[reader]]
    # No flight multiplies what a parameter takes.
    flights = [1 if graph.operators[op].kind == PARAMETER else in_flight for op in inside]
    weights = tuple(count * found.memory[op] for count, op in zip(flights, inside, strict=True))
    return Problem(tuple(costs.values()), pairs, None if math.isinf(limit) else weights, limit)


def _launch_seconds(config: ParallelConfig, machine: Machine) -> list[float]:
    """Seconds of a step that a host needs to start the kernels of each operator, which no split makes fewer."""
    once = machine.device.launch * config.training.microbatches
    return [
        once * (1 + (operator.has_gradient and operator.kind != PARAMETER))
        if operator.flops or operator.moved or operator.kind == PARAMETER
        else 0.0
        for operator in config.graph.operators
    ]


def _loads(config: ParallelConfig, machine: Machine, found: Tables, assignment: tuple[int, ...]) -> list[OpLoad]:
    seconds = [float(costs[k]) for costs, k in zip(found.compute, assignment, strict=True)]
    for (source, reader), table in found.moves.items():
        seconds[reader] += float(table[assignment[source], assignment[reader]])
    gathered = gathered_bytes(config.graph, config.mesh, found.chosen(assignment), config.training.recompute)
    loads = []
    for op, (operator, launch) in enumerate(zip(config.graph.operators, _launch_seconds(config, machine), strict=True)):
        memory = float(found.memory[op][assignment[op]])
        kept, activations = (memory, 0.0) if operator.kind == PARAMETER else (0.0, memory)
        loads.append(OpLoad(seconds[op], kept, activations, launch, gathered[op]))
    return loads


def send_seconds(machine: Machine, config: ParallelConfig) -> float:
    """Seconds a byte of a tensor takes from one stage to the next: every device sends its part."""
    if config.stages == 1:
        return 0.0
    bandwidth, _ = machine.axis_link((config.stages, *config.mesh.sizes), 0)
    return 1 / bandwidth / config.mesh.devices


def lightest_memory(config: ParallelConfig) -> float:
    """Bytes of a device under the lightest splits on one stage, with what these gather: a plan that surely fits."""
    choices = split_choices(config.graph, config.mesh, None)
    found = memories(config.graph, choices, config.mesh, config.training)
    lightest = [own[int(memory.argmin())] for own, memory in zip(choices, found, strict=True)]
    gathered = gathered_bytes(config.graph, config.mesh, lightest, config.training.recompute)
    return math.fsum(float(memory.min()) for memory in found) + max(gathered)


def least_of_stage(config: ParallelConfig) -> float:
    """Bytes that some stage needs on each of its devices at least: its equal part, or an operator with its parameters,
    which no cut divides."""
    least = _least_memory(config, None)
    held = dict.fromkeys(range(len(least)), 0.0)
    for op, anchor in enumerate(stage_anchors(config.graph)):
        held[anchor] += least[op]
    return max(math.fsum(least) / config.stages, max(held.values(), default=0.0))


def _least_memory(config: ParallelConfig, allowed: SplitFilter | None) -> list[float]:
    """The fewest bytes of a device that any split of each operator needs."""
    choices = split_choices(config.graph, config.mesh, allowed)
    return [float(memory.min()) for memory in memories(config.graph, choices, config.mesh, config.training)]


_MANY = 16  # beyond so many devices in a stage meshes have two axes at most


def parallel_configs(graph: Graph, request: PlanRequest) -> list[tuple[float, ParallelConfig]]:
    """Every configuration that the options allow, each with seconds that no plan of it is below, the most promising
    first."""
    small = lru_cache(maxsize=None)(lambda count: microbatch(graph, count))
    found = []
    for stages, mesh, count, recompute in _choices(graph, request):
        training = replace(request.training, recompute=recompute, microbatches=count)
        config = ParallelConfig(small(count), mesh, stages, training)
        found.append((least_seconds(config, request.machine), config))

    def promise(one: tuple[float, ParallelConfig]) -> tuple[float, int, int, int]:
        least, config = one
        likely = least + _exchange(config, request.machine)
        # Among equals the simplest: few stages, few micro-batches, few axes.
        return likely, config.stages, config.training.microbatches, len(config.mesh.sizes)

    return sorted(found, key=promise)


def _exchange(config: ParallelConfig, machine: Machine) -> float:
    """Seconds that the gradients of all parameters take among the devices of their stage, if they are exchanged."""
    count, sizes = config.mesh.devices, (config.stages, *config.mesh.sizes)
    if count == 1:
        return 0.0
    slowest = min(machine.axis_link(sizes, axis)[0] for axis in range(1, len(sizes)) if sizes[axis] > 1)
    size = sum(o.outputs[0].bytes for o in config.graph.operators if o.kind == PARAMETER)
    return 2 * size * (count - 1) / count / config.stages / slowest


def _choices(graph: Graph, request: PlanRequest) -> Iterator[tuple[int, Mesh, int, bool]]:
    size = batch_size(graph)
    recomputes = [False, True] if request.options.recompute is None else [request.options.recompute]
    fixed = bool(request.options.stages or request.options.mesh)
    counts = [request.devices] if fixed else _counts(graph, request.devices)
    for stages, share in ((stages, n // stages) for n in counts for stages in _divisors(n)):
        if request.options.stages not in (None, stages):
            continue
        if request.options.mesh is not None:
            grids = [Mesh(request.options.mesh)] if math.prod(request.options.mesh) == share else []
        else:
            grids = meshes(share, 3 if share <= _MANY else 2)
        pieces = [request.options.microbatches] if request.options.microbatches else _pieces(size, stages)
        yield from ((stages, mesh, count, again) for count, mesh, again in product(pieces, grids, recomputes))


def _counts(graph: Graph, devices: int) -> list[int]:
    """How many devices are worth using: all; the most that most of the work can be divided among, which a batch of 48
    cannot among 7; and the largest power of two, which suits most dimensions."""
    work: dict[int, float] = {}
    for operator in graph.operators:
        parts = math.prod(dim.parts for dim in operator.dims)
        work[parts] = work.get(parts, 0.0) + operator.flops
    half = sum(work.values()) / 2
    divided = next(
        (n for n in range(devices, 0, -1) if sum(flops for parts, flops in work.items() if parts % n == 0) >= half), 1
    )
    return sorted({devices, divided, 2 ** (devices.bit_length() - 1)}, reverse=True)


def _pieces(size: int, stages: int) -> list[int]:
    """How many micro-batches are worth trying: on several stages about one to eight for each."""
    if stages == 1:
        return [count for count in (1, 2, 4, 8, 16) if count == 1 or (size and size % count == 0)]
    whole = _divisors(size) or [1]
    return sorted({max(count for count in whole if count <= times * stages) for times in (1, 2, 4, 8)}, reverse=True)


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def least_seconds(config: ParallelConfig, machine: Machine) -> float:
    """Seconds that no plan of the shape is below: every operator split over all devices of its stage, nothing sent,
    and stages that are equal; or the hosts start kernels all the time."""
    training, share = config.training, config.mesh.devices
    own = [o for o in config.graph.operators if o.kind != PARAMETER]
    flops = np.array([o.flops for o in own]) / share
    moved = np.array([o.moved * (training.width(o.outputs[0]) if o.outputs else 1.0) for o in own])
    back = np.array([o.backward if o.has_gradient else 0.0 for o in own])
    forward = machine.compute_seconds(flops, moved / share, training.dtype)
    backward = machine.compute_seconds(back * flops, back * moved / share, training.dtype)
    times = np.where(back > 0, 2.0 if training.recompute else 1.0, 1.0)
    once = float((times * forward + backward).sum())
    total = max(once * training.microbatches, math.fsum(_launch_seconds(config, machine)))
    return total / training.microbatches * (training.microbatches + config.stages - 1) / config.stages
