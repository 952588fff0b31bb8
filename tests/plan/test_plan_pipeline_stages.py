"""Cuts of a graph into stages, against all that there are."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.graph import PARAMETER, Dim, Graph, Operator, Read, Tensor
from weft.plan.pipeline_stages import OpLoad, best_boundaries, cut


def chain(sizes: list[int], bare: Collection[int] = ()) -> Graph:
    """A parameter and an operator in turn, but for operators that are bare; the k-th one's output has sizes[k]
    elements."""
    operators: list[Operator] = []
    for number, size in enumerate(sizes):
        dims = (Dim.free("n", size),)
        tensor = Tensor((size,), 4, (0,))
        before, reads = len(operators) - 1, []
        if number not in bare:
            operators.append(Operator(f"p{number}", PARAMETER, "", dims, (), (tensor,)))
            reads.append(Read(len(operators) - 1, 0, tensor))
        if number:
            reads.append(Read(before, 0, Tensor((sizes[number - 1],), 4, (None,))))
        operators.append(Operator(f"x{number}", "elementwise", "add", dims, tuple(reads), (tensor,)))
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


def test_a_parameter_lies_where_it_is_first_read() -> None:
    graph = chain([4, 4, 4, 4])
    found = cut(graph, [OpLoad(1.0, 0.0, 0.0)] * len(graph), 2, 1, 1e9, 0.0)
    assert found is not None
    assert found.stage == (0, 0, 0, 0, 1, 1, 1, 1)


@given(st.integers(0, 10_000), st.integers(2, 9), st.integers(1, 4), st.integers(1, 9))
def test_no_division_of_a_line_is_better(seed: int, ends: int, stages: int, microbatches: int) -> None:
    rng = np.random.default_rng(seed)
    never = np.tri(ends, dtype=bool)
    every = [np.where(never | (rng.random((ends, ends)) < 0.1), math.inf, rng.gamma(2.0, 1.0, (ends, ends)))]
    every += [every[0] if rng.random() < 0.5 else np.where(never, math.inf, rng.gamma(2.0, 1.0, (ends, ends)))] * 3
    spans = every[:stages]

    def step(bounds: tuple[int, ...]) -> float:
        own = [float(span[a, b]) for span, (a, b) in zip(spans, pairwise(bounds), strict=True)]
        rest = (microbatches - 1) * max(own) if microbatches > 1 else 0.0  # 0 times inf is no number
        return (math.fsum(own) + rest) / microbatches

    divisions = [(0, *inner, ends - 1) for inner in combinations(range(1, ends - 1), stages - 1)]
    best = min(map(step, divisions), default=math.inf)
    found = best_boundaries(spans, microbatches)
    assert (found is None) == math.isinf(best)
    if found is not None:
        assert step(found) <= best * (1 + 2e-4)
