"""The solver's parts keep their promises: classes, blocks, orders, bounds, beams and local changes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.plan.solver import Problem
from weft.plan.solver import elimination as blocks
from weft.plan.solver.branch_and_bound import restricted
from weft.plan.solver.close_gap import beam_search, branch_on_vertex
from weft.plan.solver.compression import PartitionCache, compress
from weft.plan.solver.dual_bound import DualBound
from weft.plan.solver.elimination import Network, eliminate, elimination_work, share_equal
from weft.plan.solver.lagrangian import BoundedSolution, Minimizer, costs_at, lagrangian
from weft.plan.solver.local_search import crossover, crossover_by_price, local_search, neighbours
from weft.utils import rng


def costs_of_all(problem: Problem) -> dict[tuple[int, ...], float]:
    picks = itertools.product(*[range(len(costs)) for costs in problem.unary])
    return {assignment: problem.cost(assignment) for assignment in picks}


def graph(seed: int, count: int = 6, size: int = 3, weigh: bool = False) -> Problem:
    draw = rng.generator("parts", seed)
    pairs = {(i, j): draw.normal(size=(size, size)) for j in range(count) for i in range(j) if draw.random() < 0.5}
    weights = tuple(draw.integers(0, 9, size).astype(float) for _ in range(count)) if weigh else None
    limit = sum(float(0.6 * w.min() + 0.4 * w.max()) for w in weights) if weights else math.inf
    return Problem(tuple(draw.normal(size=size) for _ in range(count)), pairs, weights, limit)


def test_rows_and_columns_that_are_equal_are_one_class_each():
    table = np.array([[1.0, 2.0, 1.0], [3.0, 4.0, 3.0], [1.0, 2.0, 1.0]])
    small, rows, columns = PartitionCache().compress(table)
    assert rows.labels == (0, 1, 0)
    assert columns.labels == (0, 1, 0)
    assert small.tolist() == [[1.0, 2.0], [3.0, 4.0]]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20))
def test_a_join_tells_apart_exactly_what_either_does_and_is_the_same_object_from_both_sides(labels):
    classes = PartitionCache()
    one, other = classes.part([a for a, _ in labels]), classes.part([b for _, b in labels])
    joined = classes.join(one, other)
    assert joined is classes.join(other, one)
    for i, j in itertools.product(range(len(labels)), repeat=2):
        assert (joined.labels[i] == joined.labels[j]) == (labels[i] == labels[j])
    costs = np.arange(len(labels), dtype=float)[::-1].copy()
    assert joined.least(costs).tolist() == [min(costs[joined.index == c]) for c in range(joined.count)]
    assert [joined.labels.index(c) for c in range(joined.count)] == joined.first.tolist()


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


def test_an_order_never_makes_a_table_above_what_is_allowed_and_says_what_is_left():
    draw = rng.generator("order")
    pairs = {(i, j): draw.random((4, 4)) for j in range(6) for i in range(j)}
    network = Network(6, compress(pairs), 4**3)
    assert network.order.entries <= 4**3
    assert not network.fits
    assert {step.vertex for step in network.order.steps} | set(network.order.left) == set(range(6))
    assert Network(6, compress(pairs), 4**5).fits


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


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_a_dual_bound_only_rises_never_passes_the_optimum_and_keeps_every_optimal_configuration(seed: int):
    problem = graph(seed)
    costs = costs_of_all(problem)
    best = min(costs.values())
    dual = DualBound(problem.unary, compress(problem.pairs))
    before = -math.inf
    for sweep in range(12):
        assignment = dual.sweep(sweep % 2 == 0, best + 1e-9)
        assert before - 1e-9 <= dual.bound <= best + 1e-9
        assert costs[tuple(assignment)] >= best
        before = dual.bound
    for assignment, cost in costs.items():
        if cost <= best + 1e-12:
            assert all(alive[k] for alive, k in zip(dual.alive, assignment, strict=True))


def test_on_a_tree_two_sweeps_prove_the_optimum():
    draw = rng.generator("tree")
    problem = Problem(
        tuple(draw.random(4) for _ in range(7)), {((j - 1) // 2, j): draw.random((4, 4)) for j in range(1, 7)}
    )
    dual = DualBound(problem.unary, compress(problem.pairs))
    dual.sweep(True, math.inf)
    assignment = dual.sweep(False, math.inf)
    best = min(costs_of_all(problem).values())
    assert math.isclose(dual.bound, best, rel_tol=1e-12)
    assert math.isclose(problem.cost(dual.sweep(True, math.inf)), best, rel_tol=1e-12)
    assert len(assignment) == 7


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 1000]), st.sampled_from([0.0, 0.1, 1.0]))
def test_a_beam_finds_the_optimum_or_says_below_which_excess_it_dropped_some(seed: int, rows: int, price: float):
    problem = graph(seed, weigh=True)
    allowed = {
        assignment: cost
        for assignment, cost in costs_of_all(problem).items()
        if problem.weight(assignment) <= problem.limit
    }
    best = min(allowed.values())
    network = Network(6, compress(problem.pairs), 1 << 20)
    done = eliminate(network, costs_at(problem, price))
    bound = done.value - price * problem.limit
    found = beam_search(done, problem.weights, problem.limit, price, best - bound + 5.0, rows)
    cost = math.inf
    if found.assignment is not None:
        assert problem.weight(found.assignment) <= problem.limit
        cost = problem.cost(found.assignment)
    assert cost >= best - 1e-9
    assert min(cost, bound + found.dropped) <= best + 1e-9
    if rows == 1000:
        assert found.dropped == math.inf
        assert math.isclose(cost, best, rel_tol=1e-9, abs_tol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_local_changes_keep_the_limit_and_never_cost_more(seed: int):
    problem = graph(seed, weigh=True)
    light = [int(weights.argmin()) for weights in problem.weights]
    better = local_search(problem, light, neighbours(problem), rounds=100)
    assert problem.weight(better) <= problem.limit
    assert problem.cost(better) <= problem.cost(light) + 1e-12
    for vertex, choice in itertools.product(range(6), range(3)):
        other = [*better[:vertex], choice, *better[vertex + 1 :]]
        assert problem.weight(other) > problem.limit or problem.cost(other) >= problem.cost(better) - 1e-9


def test_two_picks_are_spliced_at_the_best_layer_with_what_each_layer_reads():
    # 0 and 1 are read by 2 and 4 alone; the picks meet best between 3 and 4, where the edge does not mind.
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


def test_a_choice_that_decides_for_all_layers_is_bounded_case_by_case():
    # All layers follow vertex 0: cheap and heavy, or dear and light. Any price says half of each; there is no half.
    follow = np.array([[0.0, math.inf], [math.inf, 0.0]])
    layers = 12
    problem = Problem(
        (np.zeros(2), *[np.array([0.0, 1.0])] * layers),
        {(0, layer): follow for layer in range(1, layers + 1)},
        (np.zeros(2), *[np.array([2.0, 0.0])] * layers),
        limit=12.0,
    )

    def minimum(part: Problem) -> Minimizer:
        network = Network(len(part.unary), compress(part.pairs), 1 << 20)

        def least(costs: list[np.ndarray]) -> BoundedSolution:
            done = eliminate(network, costs)
            return BoundedSolution(done.assignment(), done.value, done.value, 0.0, done)

        return least

    def lightest(part: Problem) -> list[int]:
        assignment = [len(costs) - 1 for costs in part.unary]
        if part.weight(assignment) > part.limit or math.isinf(part.cost(assignment)):
            raise PlanError("heavy")
        return assignment

    found = lagrangian(problem, minimum(problem), lightest(problem))
    assert (found.cost, found.bound) == (12.0, 6.0)
    found = branch_on_vertex(problem, found, minimum, lightest, 0.0, math.inf)
    assert (found.cost, found.bound) == (12.0, 12.0)


def test_a_narrowed_problem_costs_what_the_whole_one_does():
    problem = graph(3, weigh=True)
    kept = [np.array([0, 2])] * 6
    small = restricted(problem, kept)
    for assignment in itertools.product(range(2), repeat=6):
        whole = [int(index[k]) for index, k in zip(kept, assignment, strict=True)]
        assert small.cost(assignment) == problem.cost(whole)
        assert small.weight(assignment) == problem.weight(whole)
