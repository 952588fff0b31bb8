"""Splits of an iteration space, and how tensors lie under them."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from weft.plan.graph import Dim, Operator, Read, Tensor
from weft.plan.sharding import (
    PARTIAL,
    REPLICATED,
    Mesh,
    local_shape,
    operand_placements,
    result_placements,
    shards,
    splits,
)

M, N, K = 0, 1, 2


def product(m: int, n: int, k: int) -> Operator:
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
    operator = product(8, 8, 8)
    x, w = (read.tensor for read in operator.reads)
    assert (operand_placements(x, (K,)), operand_placements(w, (K,))) == ((1,), (0,))
    assert result_placements(operator.outputs[0], (K,)) == (PARTIAL,)
    # A device that has its rows alone has its rows' part of the weights' gradient.
    assert (result_placements(w, (M,)), result_placements(x, (M,))) == ((PARTIAL,), (0,))


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 24), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_parts_of_every_split_make_up_the_whole(m: int, n: int, k: int, sizes: list[int]) -> None:
    operator, mesh = product(m, n, k), Mesh(tuple(sizes))
    for split in splits(operator, mesh):
        for tensor in (*(read.tensor for read in operator.reads), *operator.outputs):
            found = result_placements(tensor, split)
            assert math.prod(local_shape(tensor.shape, found, mesh)) * shards(found, mesh) == tensor.elements
