"""The optimum is that of brute force, assignments cost what is said, bounds hold; also of large and equal tables."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.plan.solver import OverLimit, Problem, solve
from weft.plan.solver import elimination as blocks
from weft.plan.solver.compression import compress
from weft.plan.solver.elimination import Network, elimination_work, share_equal
from weft.plan.solver.lagrangian import crossover
from weft.utils import rng

KINDS = ("path", "tree", "cycle", "dense", "sparse", "layers")


def near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def brute(problem: Problem) -> tuple[float, float]:
    """The least cost within the limit, inf where there is none, and the least weight of any assignment."""
    every = list(itertools.product(*[range(len(costs)) for costs in problem.unary]))
    best = min((problem.cost(each) for each in every if problem.weight(each) <= problem.limit), default=math.inf)
    return best, min(map(problem.weight, every))


def edges(kind: str, count: int, draw: np.random.Generator) -> set[tuple[int, int]]:
    path = {(i, i + 1) for i in range(count - 1)}
    every = {(i, j) for j in range(count) for i in range(j)}
    return {
        "path": path,
        "tree": {(int(draw.integers(i)), i) for i in range(1, count)},
        "cycle": path | ({(0, count - 1)} if count > 2 else set()),
        "dense": every,
        "sparse": {edge for edge in every if draw.random() < 0.3},  # often in several parts
        "layers": {(i, j) for i, j in every if j - i <= 2 or i == 0},  # residuals, and a first vertex that all read
    }[kind]


def problem_of(kind: str, count: int, draw: np.random.Generator, weigh: bool) -> Problem:
    sizes = draw.integers(1, 5, count)
    shared = {}

    def table(*shape: int) -> np.ndarray:
        # Small integers make ties, repeated rows and columns make classes, equal shapes may repeat a table.
        if shape in shared and draw.random() < 0.3:
            return shared[shape]
        costs = draw.integers(-3, 4, shape).astype(float) if draw.random() < 0.5 else draw.normal(size=shape) * 10
        if len(shape) == 2 and draw.random() < 0.5:
            costs = costs[draw.integers(0, shape[0], shape[0])][:, draw.integers(0, shape[1], shape[1])]
        shared[shape] = costs
        return costs

    unary = tuple(table(int(size)) for size in sizes)
    pairs = {(i, j): table(int(sizes[i]), int(sizes[j])) for i, j in edges(kind, count, draw)}
    if not weigh:
        return Problem(unary, pairs)
    weights = tuple(
        draw.integers(0, 6, size).astype(float) if draw.random() < 0.7 else draw.random(size) * 5 for size in sizes
    )
    low, high = (math.fsum(float(end(w)) for w in weights) for end in (np.min, np.max))
    return Problem(unary, pairs, weights, low + (high - low) * float(draw.random()) - 0.1 * (draw.random() < 0.2))


def agrees(problem: Problem, entries: int) -> None:
    best, least = brute(problem)
    if math.isinf(best):
        with pytest.raises(OverLimit) as refused:
            solve(problem, entries=entries, tolerance=0.0)
        assert near(refused.value.least, least)
        return
    found = solve(problem, entries=entries, tolerance=0.0)
    assert near(problem.cost(found.assignment), found.cost)
    assert near(found.cost, best)
    assert found.bound <= best + 1e-9 * max(1.0, abs(best))
    assert near(found.bound, best)
    assert near(problem.weight(found.assignment), found.weight)
    assert found.weight <= problem.limit
    assert found.entries <= entries  # no table is above what is allowed


def test_a_limit_is_kept_at_the_least_cost_or_refused_with_the_least_weight():
    problem = Problem((np.array([0.0, 5.0]),) * 3, {}, (np.array([4.0, 1.0]),) * 3, limit=9.0)
    found = solve(problem)
    assert (found.cost, found.weight, found.optimal) == (5.0, 9.0, True)
    with pytest.raises(OverLimit, match=r"limit of 2: the least weight is 3, 1 more") as refused:
        solve(replace(problem, limit=2.0))
    assert (refused.value.least, refused.value.limit) == (3.0, 2.0)


def test_a_choice_that_decides_for_all_layers_is_bounded_case_by_case():
    # All layers follow vertex 0: cheap and heavy, or expensive and light. A price says half of each; there is no half.
    follow = np.array([[0.0, 99.0], [99.0, 0.0]])
    layers = 12
    unary = (np.zeros(2), *[np.array([0.0, 1.0])] * layers)
    weights = (np.zeros(2), *[np.array([2.0, 0.0])] * layers)
    found = solve(Problem(unary, {(0, layer): follow for layer in range(1, layers + 1)}, weights, 12.0), tolerance=0.0)
    assert (found.cost, found.bound, found.weight) == (12.0, 12.0, 0.0)


@pytest.mark.parametrize("entries", [1 << 20, 6, 1], ids=["eliminated", "some", "branched"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_optimum_is_that_of_brute_force(kind: str, entries: int):
    for number in range(24):
        draw = rng.generator("solve", kind, number)
        count = int(draw.integers(0, 7))
        agrees(problem_of(kind, count, draw, weigh=number % 2 == 0), entries)


@pytest.mark.parametrize("gap", [0.02, 0.4])
@pytest.mark.parametrize("kind", KINDS)
def test_an_assignment_is_within_the_gap_that_is_asked_for_and_its_bound_never_above_the_optimum(kind: str, gap: float):
    for number in range(12):
        draw = rng.generator("within", kind, number)
        problem = problem_of(kind, int(draw.integers(2, 7)), draw, weigh=True)
        best, _ = brute(problem)
        if math.isinf(best):
            continue
        for entries in (1, 6):
            found = solve(problem, entries=entries, tolerance=gap)
            assert found.weight <= problem.limit
            assert found.bound <= best + 1e-9 * max(1.0, abs(best))
            assert found.cost >= best - 1e-9 * max(1.0, abs(best))
            assert found.cost - found.bound <= (gap + 1e-9) * abs(found.cost) + 1e-9


def test_layers_that_all_read_one_tensor_are_within_a_hundredth_though_they_are_too_entangled_to_eliminate():
    draw = rng.generator("hub")
    sizes = [24, 24, *[12] * 10]  # two tensors that every layer reads, each with its own wish of how they lie
    unary = tuple(draw.gamma(2.0, 1.0, size) for size in sizes)
    chain = {(i, i + 1): draw.gamma(2.0, 1.0, (12, 12)) for i in range(2, len(sizes) - 1)}
    hubs = {(hub, i): draw.gamma(2.0, 0.3, (24, 12)) for hub in (0, 1) for i in range(2, len(sizes))}
    weights = tuple(draw.gamma(2.0, 1.0, size) for size in sizes)
    free = Problem(unary, {**chain, **hubs}, weights)
    heavy, light = free.weight(solve(free).assignment), math.fsum(float(own.min()) for own in weights)
    found = solve(Problem(unary, free.pairs, weights, light + 0.3 * (heavy - light)), entries=1 << 10)
    assert found.method == "bounds, weights priced"
    assert found.gap <= 0.01
    assert found.weight <= light + 0.3 * (heavy - light)


def test_a_long_chain_of_equal_layers_is_the_power_of_one_layer():
    draw = rng.generator("chain")
    table, costs = draw.random((7, 7)), draw.random(7)
    count = 300
    best = costs
    for _ in range(count - 1):
        best = (best[:, None] + table).min(axis=0) + costs
    found = solve(Problem((costs,) * count, {(i, i + 1): table for i in range(count - 1)}))
    assert near(found.cost, float(best.min()))
    assert found.optimal


def test_a_vertex_that_all_layers_read_costs_as_many_entries_as_it_has_classes_not_configurations():
    draw = rng.generator("shared")
    kinds = draw.integers(0, 3, 200)  # 200 configurations of the shared vertex, three ways in which its tensor lies
    read, table = draw.random((3, 5))[kinds], draw.random((5, 5))
    pairs = {(0, layer): read for layer in range(1, 31)} | {(layer, layer + 1): table for layer in range(1, 30)}
    found = solve(Problem((draw.random(200), *[draw.random(5) for _ in range(30)]), pairs))
    assert found.optimal
    assert found.entries <= 3 * 5 * 5


@pytest.mark.parametrize(
    ("unary", "pairs"),
    [((np.array([0.0, math.nan]),), {}), ((np.zeros(2),) * 2, {(0, 1): np.full((2, 2), math.inf)})],
)
def test_a_cost_that_is_not_finite_is_refused(unary, pairs):
    with pytest.raises(PlanError, match="not a finite number"):
        solve(Problem(unary, pairs))


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
