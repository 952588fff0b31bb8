"""What small problems cannot show of the solver: large tables, equal layers, and how assignments are joined."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.solver import Problem
from weft.plan.solver import elimination as blocks
from weft.plan.solver.compression import compress
from weft.plan.solver.elimination import Network, eliminate, elimination_work, share_equal
from weft.plan.solver.local_search import crossover, crossover_by_price
from weft.utils import rng


def test_equal_tables_are_compressed_once_and_others_apart():
    table = rng.generator("equal").random((40, 40))
    other = table.copy()
    other[39, 39] += 1.0  # where no sample is taken
    edges = compress({(0, 1): table, (1, 2): table.copy(), (2, 3): other})
    assert edges.tables[0] is edges.tables[1]
    assert edges.tables[2] is not edges.tables[0]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 7), min_size=1, max_size=4), st.sampled_from([1, 4, 16, 64]))
def test_the_least_of_a_sum_in_blocks_is_the_least_of_the_sum(seed: int, shape: list[int], block: int):
    draw = rng.generator("blocks", seed)
    shape = [int(draw.integers(1, 9)), *shape]
    terms = []
    for _ in range(int(draw.integers(1, 5))):
        terms.append(draw.random([n if axis == 0 or draw.random() < 0.6 else 1 for axis, n in enumerate(shape)]))
    for axis in range(1, len(shape)):  # every axis is in some term
        terms.append(draw.random([n if at in (0, axis) else 1 for at, n in enumerate(shape)]))
    whole = sum(terms[1:], terms[0]).min(axis=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", block)
        found = blocks.min_sum(list(terms), tuple(shape))
    assert found.shape == whole.shape
    np.testing.assert_allclose(found, whole, rtol=1e-12)


def test_in_a_ring_of_equal_layers_only_as_many_steps_are_computed_as_it_takes_to_double_up():
    draw = rng.generator("once")
    table, costs = draw.random((5, 5)), draw.random(5)
    for count in (64, 128):
        pairs = {(i, i + 1): table for i in range(count - 1)} | {(0, count - 1): table.T}
        network = Network(count, compress(pairs), 1 << 20)
        assert elimination_work(network, share_equal([costs.copy() for _ in range(count)])) <= 3 * 5**3 * math.log2(
            count
        )
        assert (
            elimination_work(network, [costs.copy() for _ in range(count)]) == network.order.work > (count - 4) * 5**3
        )


def test_two_assignments_are_joined_at_the_best_layer_with_what_each_layer_reads():
    # 0 and 1 are read by 2 and 4 alone; the assignments meet best between 3 and 4, where the edge does not mind.
    edges = {(0, 2): 5.0, (1, 4): 5.0, (2, 3): 5.0, (3, 4): 0.0, (4, 5): 5.0}
    pairs = {edge: cost * (1 - np.eye(2)) for edge, cost in edges.items()}
    weights = (np.array([2.0, 0.0]),) * 6
    problem = Problem((np.array([0.0, 1.0]),) * 6, pairs, weights, limit=7.0)
    assert crossover(problem, [1] * 6, [0] * 6) in ([0, 1, 0, 0, 1, 1], [1, 0, 1, 1, 0, 0])
    assert crossover(replace(problem, limit=11.0), [1] * 6, [0] * 6) in ([0, 1, 0, 0, 1, 1], [1, 0, 1, 1, 0, 0])
    assert crossover(replace(problem, limit=12.0), [1] * 6, [0] * 6) == [0] * 6
    pairs[3, 4] = np.array([[0.0, math.inf], [math.inf, 0.0]])
    assert crossover(Problem(problem.unary, pairs, weights, limit=1.0), [1] * 6, [0] * 6) == [1] * 6


def test_layers_that_all_change_at_one_price_are_changed_one_after_the_other_until_the_limit_is_kept():
    # A heavy way costs 0 and weighs 3, a light one costs 1 and weighs 0; to change between layers costs 2.
    change = 2.0 * (1 - np.eye(2))
    layers = 20
    problem = Problem(
        (np.array([0.0, 1.0]),) * layers,
        {(i, i + 1): change for i in range(layers - 1)},
        (np.array([3.0, 0.0]),) * layers,
        limit=30.0,
    )
    network = Network(layers, compress(problem.pairs), 1 << 20)
    assignment = crossover_by_price(
        problem, lambda costs: eliminate(network, costs).assignment(), 1 / 3, [1] * layers, lambda cost: False
    )
    assert problem.cost(assignment) == 12.0
    assert problem.weight(assignment) == 30.0
