"""How tensors lie under splits, and what it costs to lay them out differently."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.hardware.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from weft.hardware.machine import DeviceSpec, Link, Machine
from weft.plan.graph import Dim, Operator, Read, Tensor
from weft.plan.redistribution import Redistribution
from weft.plan.sharding import (
    PARTIAL,
    REPLICATED,
    Mesh,
    Placements,
    local_shape,
    operand_placements,
    result_placements,
    shards,
    splits,
)

SIZE = 1 << 20
DEVICE = DeviceSpec({"float32": 1e13}, ((1e6, 0.1), (1e9, 0.8)), 1e12, 1e10, 5e-6)
MACHINE = Machine("test", DEVICE, (Link("node", 4, 1e11, 2e-6), Link("net", None, 1e10, 1e-5)))


def one(mesh: Mesh, source: Placements, target: Placements) -> float:
    return float(Redistribution(mesh, MACHINE).table(SIZE, [source], [target])[0, 0])


def link(axis: int, *sizes: int) -> tuple[float, float]:
    return MACHINE.axis_link(sizes, axis)


INNER = all_gather(SIZE / 2, 2, *link(1, 2, 2))


@pytest.mark.parametrize(
    ("sizes", "source", "target", "seconds"),
    [
        ((4,), (0,), (0,), 0.0),
        ((4,), (REPLICATED,), (REPLICATED,), 0.0),
        ((4,), (REPLICATED,), (0,), 0.0),
        ((4,), (0,), (REPLICATED,), all_gather(SIZE, 4, *link(0, 4))),
        ((4,), (PARTIAL,), (REPLICATED,), all_reduce(SIZE, 4, *link(0, 4))),
        ((4,), (PARTIAL,), (1,), reduce_scatter(SIZE, 4, *link(0, 4))),
        ((4,), (0,), (1,), all_to_all(SIZE / 4, 4, *link(0, 4))),
        # It is cut before it travels: only the cut part is summed.
        ((2, 4), (PARTIAL, REPLICATED), (REPLICATED, 0), all_reduce(SIZE / 4, 2, *link(0, 2, 4))),
        # Parts within parts are gathered when the outer cut goes; parts along another axis are not.
        ((2, 2), (0, 0), (REPLICATED, 0), INNER + all_gather(SIZE, 2, *link(0, 2, 2))),
        ((2, 2), (0, 1), (REPLICATED, 1), all_gather(SIZE / 2, 2, *link(0, 2, 2))),
    ],
)
def test_each_step_is_its_collective(
    sizes: tuple[int, ...], source: Placements, target: Placements, seconds: float
) -> None:
    assert one(Mesh(sizes), source, target) == pytest.approx(float(seconds))


def test_a_table_has_the_cost_of_each_pair() -> None:
    mesh = Mesh((2, 3))
    sources = list(product((PARTIAL, REPLICATED, 0, 1), repeat=2))
    targets = list(product((REPLICATED, 0, 1), repeat=2))
    table = Redistribution(mesh, MACHINE).table(SIZE, sources, targets)
    for row, source in enumerate(sources):
        for column, target in enumerate(targets):
            assert table[row, column] == one(mesh, source, target) >= 0
            assert table[row, column] == 0 or source not in (target, (REPLICATED, REPLICATED))


M, N, K = 0, 1, 2


def matmul(m: int, n: int, k: int) -> Operator:
    dims = (Dim.free("m", m), Dim.free("n", n), Dim.free("k", k))
    x, w = Tensor((m, k), 4, (M, K)), Tensor((k, n), 4, (K, N))
    return Operator(
        "mm", "matmul", "mm", dims, (Read(0, 0, x), Read(1, 0, w)), (Tensor((m, n), 4, (M, N)),), 2.0 * m * n * k
    )


def test_only_equal_parts_are_splits() -> None:
    operator = Operator("x", "view", "view", (Dim("h", 768, 12), Dim.whole("d", 64)), (), ())
    assert set(splits(operator, Mesh((8,)))) == {(REPLICATED,)}
    assert set(splits(operator, Mesh((2, 6)))) == {(-1, -1), (-1, 0), (0, -1), (0, 0)}
    assert set(splits(operator, Mesh((4, 4)))) == {(-1, -1), (-1, 0), (0, -1)}
    assert list(splits(operator, Mesh((1,)))) == [(REPLICATED,)]


def test_a_product_that_is_split_by_its_sums_gives_partial_sums() -> None:
    operator = matmul(8, 8, 8)
    x, w = (read.tensor for read in operator.reads)
    assert (operand_placements(x, (K,)), operand_placements(w, (K,))) == ((1,), (0,))
    assert result_placements(operator.outputs[0], (K,)) == (PARTIAL,)
    # A device that has its rows alone has its rows' part of the weights' gradient.
    assert (result_placements(w, (M,)), result_placements(x, (M,))) == ((PARTIAL,), (0,))


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 24), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_parts_of_every_split_make_up_the_whole(m: int, n: int, k: int, sizes: list[int]) -> None:
    operator, mesh = matmul(m, n, k), Mesh(tuple(sizes))
    for split in splits(operator, mesh):
        for tensor in (*(read.tensor for read in operator.reads), *operator.outputs):
            found = result_placements(tensor, split)
            assert math.prod(local_shape(tensor.shape, found, mesh)) * shards(found, mesh) == tensor.elements


ALL: list[Callable[..., Any]] = [all_reduce, reduce_scatter, all_to_all]
SIZES, GROUPS = st.floats(0, 1e12), st.integers(1, 2000)
LINKS = st.tuples(st.floats(1e6, 1e12), st.floats(0, 1e-3))


@pytest.mark.parametrize(
    ("collective", "size", "devices", "seconds"),
    [
        # A long message goes round the ring. 8 GB at 1 GB/s: seven steps of an eighth each for half of an all-reduce.
        (reduce_scatter, 8e9, 8, 7 + 0.07),
        (all_gather, 8e9, 8, 7 + 0.07),
        (all_reduce, 8e9, 8, 14 + 0.14),
        (all_to_all, 8e9, 8, 7 + 0.07),
        # A short one climbs the tree. Sixteen devices: four rounds up and four down beat thirty steps.
        (all_reduce, 1, 16, 8 * 0.01),
        (reduce_scatter, 1, 16, 8 * 0.01),
        (all_to_all, 1, 16, 4 * 0.01),
        (all_reduce, 1, 9, 8 * 0.01),  # no power of two: rounded up
    ],
)
def test_a_message_goes_round_the_ring_or_up_the_tree(
    collective: Callable[..., Any], size: float, devices: int, seconds: float
) -> None:
    assert collective(size, devices, 1e9, 0.01) == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize("collective", ALL)
def test_one_device_or_nothing_to_send_costs_nothing(collective: Callable[..., Any]) -> None:
    assert collective([1e9, 0.0, 0.0], [1, 8, 1], 1e9, 0.01).tolist() == [0.0, 0.0, 0.0]
    assert collective(1e9, 1, math.inf, 0.0) == 0.0


@pytest.mark.parametrize("collective", ALL)
@given(SIZES, SIZES, GROUPS, LINKS)
def test_more_bytes_never_cost_less(
    collective: Callable[..., Any], a: float, b: float, q: int, link: tuple[float, float]
) -> None:
    small, large = collective(sorted((a, b)), q, *link)
    assert small <= large


@pytest.mark.parametrize("collective", ALL)
@given(st.floats(1, 1e12), st.integers(2, 2000), LINKS)
def test_no_collective_beats_what_a_device_must_send(
    collective: Callable[..., Any], size: float, q: int, link: tuple[float, float]
) -> None:
    least = {all_reduce: 2 * (q - 1) / q, all_to_all: 0.5}.get(collective, (q - 1) / q)
    assert collective(size, q, *link) >= least * size / link[0] * (1 - 1e-12)
