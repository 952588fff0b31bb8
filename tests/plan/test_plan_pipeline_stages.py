"""Cuts of a graph into stages, against all that there are; and stages that are solved again within their memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.hardware.machine import DeviceSpec, Link, Machine
from weft.plan.configurations import ParallelConfig, price_assignment, solve_stages
from weft.plan.costs import Tables, TrainingSpec
from weft.plan.graph import PARAMETER, Dim, Graph, Operator, Read, Tensor
from weft.plan.pipeline_stages import OpLoad, best_boundaries, cut
from weft.plan.sharding import Mesh
from weft.plan.solver import OverLimit


def chain(sizes: list[int], bare: Collection[int] = (), tied: bool = False) -> Graph:
    """A parameter and an operator in turn, but for operators that are bare; the k-th one's output has sizes[k]
    elements. The last operator may be tied to the first one's parameter."""
    operators: list[Operator] = []
    for number, size in enumerate(sizes):
        dims = (Dim.free("n", size),)
        tensor = Tensor((size,), 4, (0,))
        before, reads = len(operators) - 1, []
        if number not in bare:
            operators.append(Operator(f"p{number}", PARAMETER, "", dims, (), (tensor,)))
            reads.append(Read(len(operators) - 1, 0, tensor))
        if tied and number == len(sizes) - 1:
            reads.append(Read(0, 0, tensor))
        if number:
            reads.append(Read(before, 0, Tensor((sizes[number - 1],), 4, (0 if tied else None,))))
        operators.append(Operator(f"x{number}", "elementwise", "add", dims, tuple(reads), (tensor,), moved=1.0))
    return Graph("chain", tuple(operators))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_no_cut_is_better_in_which_every_stage_has_parameters_where_there_are_enough(
    seed: int, count: int, stages: int, microbatches: int, tight: bool
) -> None:
    rng = np.random.default_rng(seed)
    bare = {int(n) for n in np.flatnonzero(rng.random(count) < 0.3) if n}
    graph = chain([int(n) for n in rng.integers(1, 9, count)], bare)
    numbers = [int(operator.name[1:]) for operator in graph.operators]
    sent = {number: 2.0 * operator.outputs[0].bytes for number, operator in zip(numbers, graph.operators, strict=True)}
    loads = [
        OpLoad(float(rng.integers(1, 9)), *(float(n) for n in rng.integers(0, 9, 2)), float(rng.choice([0.0, 6.0])))
        for _ in graph.operators
    ]
    limit = float(rng.integers(10, 80)) if tight else 1e9
    send = float(rng.choice([0.01, 0.1]))
    enough = count - len(bare) >= stages

    def stage_costs(bounds: tuple[int, ...]) -> tuple[list[float], list[float]]:
        seconds, memory = [], []
        for stage, (a, b) in enumerate(pairwise((0, *bounds, count))):
            own = [load for number, load in zip(numbers, loads, strict=True) if a <= number < b]
            crossed = sum(sent[end - 1] for end in (a, b) if 0 < end < count)
            device = sum(load.seconds for load in own) + microbatches * send * crossed
            seconds.append(max(device, sum(load.launch for load in own)))
            flights = min(microbatches, stages - stage)
            memory.append(sum(load.kept + flights * load.activations for load in own))
        return seconds, memory

    def step(seconds: Sequence[float]) -> float:
        parts = max(microbatches, 2)  # a batch in one piece is cut as if it were two
        return (sum(seconds) + (parts - 1) * max(seconds)) / parts

    def empty(bounds: tuple[int, ...]) -> bool:
        return any(bare.issuperset(range(a, b)) for a, b in pairwise((0, *bounds, count)))

    every = [bounds for bounds in combinations(range(1, count), stages - 1) if not (enough and empty(bounds))]
    allowed = [seconds for seconds, memory in map(stage_costs, every) if max(memory) <= limit]
    found = cut(graph, loads, stages, microbatches, limit, send)
    assert (found is None) == (not allowed)
    if found is None:
        return
    assert step(found.seconds) == pytest.approx(min(map(step, allowed)))
    assert max(found.memory) <= limit
    assert list(found.stage) == sorted(found.stage)
    bounds = tuple(
        min(n for n, s in zip(numbers, found.stage, strict=True) if s == stage) for stage in range(1, stages)
    )
    assert not (enough and empty(bounds))
    seconds, memory = stage_costs(bounds)
    assert found.seconds == pytest.approx(tuple(seconds))
    assert found.memory == pytest.approx(tuple(memory))


def test_a_line_too_long_to_weigh_every_cut_is_cut_where_least_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain([9, 9, 1, 9, 9, 9])
    loads = [OpLoad(float(op in (1, 3, 7, 11)), 0.0, 0.0) for op in range(len(graph))]
    every = cut(graph, loads, 2, 4, 1e9, 0.01)
    monkeypatch.setattr("weft.plan.pipeline_stages._CUTS", 3)  # the third to the last operator take no time, but one
    assert every is not None
    assert every.stage == (0,) * 6 + (1,) * 6
    assert cut(graph, loads, 2, 4, 1e9, 0.01) == every


@given(st.integers(0, 10_000), st.integers(2, 9), st.integers(1, 4), st.integers(2, 9))
def test_no_division_of_a_line_is_better(seed: int, ends: int, stages: int, microbatches: int) -> None:
    rng = np.random.default_rng(seed)
    never = np.tri(ends, dtype=bool)
    every = [np.where(never | (rng.random((ends, ends)) < 0.1), math.inf, rng.gamma(2.0, 1.0, (ends, ends)))]
    every += [every[0] if rng.random() < 0.5 else np.where(never, math.inf, rng.gamma(2.0, 1.0, (ends, ends)))] * 3
    spans = every[:stages]

    def step(bounds: tuple[int, ...]) -> float:
        own = [float(span[a, b]) for span, (a, b) in zip(spans, pairwise(bounds), strict=True)]
        return (math.fsum(own) + (microbatches - 1) * max(own)) / microbatches

    divisions = [(0, *inner, ends - 1) for inner in combinations(range(1, ends - 1), stages - 1)]
    best = min(map(step, divisions), default=math.inf)
    found = best_boundaries(spans, microbatches)
    assert (found is None) == math.isinf(best)
    if found is not None:
        assert step(found) <= best * (1 + 2e-4)


DEVICE = DeviceSpec({"float32": 1e13}, ((1e6, 0.1), (1e9, 0.8)), 1e12, 1e10, 0.0)
MACHINE = Machine("test", DEVICE, (Link("node", None, 1e10, 1e-6),))


def tied_chain(count: int) -> Graph:
    """Operators in a chain, each with a parameter; the last one reads the first one's."""
    return chain([8] * count, bare={count - 1}, tied=True)


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
