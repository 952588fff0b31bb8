"""Cuts into stages, against all that there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.cutting import Load, cut
from weft.plan.graph import PARAMETER, Dim, Graph, Operator, Read, Tensor


def chain(sizes: list[int]) -> Graph:
    """A parameter and an operator in turn; the k-th operator's output has sizes[k] elements."""
    operators: list[Operator] = []
    for number, size in enumerate(sizes):
        dims = (Dim.free("n", size),)
        tensor = Tensor((size,), 4, (0,))
        operators.append(Operator(f"p{number}", PARAMETER, "", dims, (), (tensor,)))
        reads = [Read(len(operators) - 1, 0, tensor)]
        if number:
            reads.append(Read(len(operators) - 2, 0, Tensor((sizes[number - 1],), 4, (None,))))
        operators.append(Operator(f"x{number}", "elementwise", "add", dims, tuple(reads), (tensor,)))
    return Graph("chain", tuple(operators))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_no_cut_is_better(seed: int, count: int, stages: int, microbatches: int, tight: bool) -> None:
    rng = np.random.default_rng(seed)
    graph = chain([int(n) for n in rng.integers(1, 9, count)])
    loads = [
        Load(float(rng.integers(1, 9)), float(rng.integers(0, 9)), float(rng.integers(0, 9))) for _ in graph.operators
    ]
    limit = float(rng.integers(10, 80)) if tight else 1e9
    send = 0.01

    def stage_costs(bounds: tuple[int, ...]) -> tuple[list[float], list[float]]:
        seconds, memory = [], []
        for stage, (a, b) in enumerate(pairwise((0, *bounds, count))):
            own = [load for place in range(a, b) for load in (loads[2 * place], loads[2 * place + 1])]
            crossed = sum(2.0 * graph.operators[2 * end - 1].outputs[0].bytes for end in (a, b) if 0 < end < count)
            seconds.append(sum(load.seconds for load in own) + microbatches * send * crossed)
            flights = min(microbatches, stages - stage)
            memory.append(sum(load.kept + flights * load.activations for load in own))
        return seconds, memory

    every = [stage_costs(bounds) for bounds in combinations(range(1, count), stages - 1)]
    allowed = [max(seconds) for seconds, memory in every if max(memory) <= limit]
    found = cut(graph, loads, stages, microbatches, limit, send)
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert max(found.seconds) == pytest.approx(min(allowed))
    assert max(found.memory) <= limit
    assert list(found.stage) == sorted(found.stage)
    assert set(found.stage) == set(range(stages))
    bounds = tuple(found.stage[1::2].index(stage) for stage in range(1, stages))
    seconds, memory = stage_costs(bounds)
    assert found.seconds == pytest.approx(tuple(seconds))
    assert found.memory == pytest.approx(tuple(memory))


def test_a_parameter_lies_where_it_is_first_read() -> None:
    graph = chain([4, 4, 4, 4])
    found = cut(graph, [Load(1.0, 0.0, 0.0)] * len(graph), 2, 1, 1e9, 0.0)
    assert found is not None
    assert found.stage == (0, 0, 0, 0, 1, 1, 1, 1)
