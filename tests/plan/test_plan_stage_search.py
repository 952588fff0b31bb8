"""Plans of several stages: no slower than the configuration they start from, and within the memory of each stage."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.hardware.machine import DeviceSpec, Link, Machine
from weft.plan.configurations import ParallelConfig, price_assignment, solve_stages
from weft.plan.costs import Tables, TrainingSpec
from weft.plan.graph import PARAMETER, Dim, Graph, Operator, Read
from weft.plan.graph import Tensor as Laid
from weft.plan.sharding import Mesh
from weft.plan.solver import OverLimit

DEVICE = DeviceSpec({"float32": 1e13}, ((1e6, 0.1), (1e9, 0.8)), 1e12, 1e10, 0.0)
MACHINE = Machine("test", DEVICE, (Link("node", None, 1e10, 1e-6),))


def tied_chain(count: int) -> Graph:
    """Operators in a chain, each with a parameter; the last one reads the first one's."""
    laid = Laid((8,), 4, (0,))
    dims = (Dim.free("n", 8),)
    operators: list[Operator] = []
    for number in range(count):
        last = number == count - 1
        if not last:
            operators.append(Operator(f"p{number}", PARAMETER, "", dims, (), (laid,)))
        reads = [Read(0 if last else len(operators) - 1, 0, laid)]
        if number:
            reads.append(Read(len(operators) - (1 if last else 2), 0, laid))
        operators.append(Operator(f"x{number}", "elementwise", "add", dims, tuple(reads), (laid,), moved=1.0))
    return Graph("chain", tuple(operators))


def best_of_all(config: ParallelConfig, found: Tables, limit: float, machine: Machine) -> float:
    """The step of the best cut of the best pick."""
    best = math.inf
    for assignment in product(*(range(len(own)) for own in found.splits)):
        with suppress(OverLimit):
            best = min(best, price_assignment(config, machine, found, assignment, limit).cost.step_time)
    return best


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 3), st.integers(1, 6), st.sampled_from([1.0, 0.8, 0.6]))
def test_stages_solved_again_keep_their_memory_and_are_never_slower(
    seed: int, stages: int, count: int, part: float
) -> None:
    rng = np.random.default_rng(seed)
    graph = tied_chain(4)
    sizes = [int(n) for n in rng.integers(1, 4, len(graph))]
    moves = {(read.source, op): None for op, o in enumerate(graph.operators) for read in o.reads}
    found = Tables(
        Mesh((2,)),
        tuple(tuple((k,) for k in range(size)) for size in sizes),
        tuple(rng.gamma(2.0, 1e-3, size) for size in sizes),
        {(i, j): rng.gamma(1.0, 1e-3, (sizes[i], sizes[j])) for i, j in moves},
        tuple(rng.gamma(2.0, 100.0, size) for size in sizes),
    )
    config = ParallelConfig(graph, Mesh((2,)), stages, TrainingSpec(microbatches=count))
    light = tuple(int(memory.argmin()) for memory in found.memory)
    least = price_assignment(config, MACHINE, found, light, math.inf).cost
    limit = least.memory / part if part < 1 else math.inf
    start = price_assignment(config, MACHINE, found, light, limit, 0.0)
    made = solve_stages(start, MACHINE, limit, 0.0)
    assert made.cost.memory <= limit
    assert best_of_all(config, found, limit, MACHINE) * (1 - 1e-9) <= made.cost.step_time <= start.cost.step_time
    assert made.cost.lower_bound <= made.cost.step_time


def test_a_stage_with_fewer_micro_batches_in_flight_fills_its_memory() -> None:
    graph = tied_chain(3)
    # Each operator computes in 2 ms and is light, or in 1 ms and takes as much memory as one stage spares.
    found = Tables(
        Mesh((2,)),
        tuple(((0,), (1,)) for _ in graph.operators),
        tuple(np.array([1e-3, 2e-3]) if o.kind != PARAMETER else np.zeros(2) for o in graph.operators),
        {(read.source, op): np.zeros((2, 2)) for op, o in enumerate(graph.operators) for read in o.reads},
        tuple(np.array([10.0, 1.0]) if o.kind != PARAMETER else np.ones(2) for o in graph.operators),
    )
    config = ParallelConfig(graph, Mesh((2,)), 2, TrainingSpec(microbatches=4))
    light = tuple(1 for _ in graph.operators)
    start = price_assignment(config, MACHINE, found, light, 40.0)
    made = solve_stages(start, MACHINE, 40.0, 0.0)
    assert made.cost.memory <= 40.0
    assert made.cost.step_time < start.cost.step_time
