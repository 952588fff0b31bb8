"""What it costs to lay a tensor out differently."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.hardware import collectives
from weft.hardware.machine import DeviceSpec, Link, Machine
from weft.plan.redistribution import Redistribution, meshes
from weft.plan.sharding import PARTIAL, REPLICATED, Mesh, Placements

SIZE = 1 << 20
DEVICE = DeviceSpec({"float32": 1e13}, ((1e6, 0.1), (1e9, 0.8)), 1e12, 1e10, 5e-6)
MACHINE = Machine("test", DEVICE, (Link("node", 4, 1e11, 2e-6), Link("net", None, 1e10, 1e-5)))


def one(mesh: Mesh, source: Placements, target: Placements) -> float:
    return float(Redistribution(mesh, MACHINE).table(SIZE, [source], [target])[0, 0])


def test_each_step_is_its_collective() -> None:
    link = MACHINE.axis_link((4,), 0)
    cases = {
        (0, 0): 0.0,
        (REPLICATED, REPLICATED): 0.0,
        (REPLICATED, 0): 0.0,
        (0, REPLICATED): float(collectives.all_gather(SIZE, 4, *link)),
        (PARTIAL, REPLICATED): float(collectives.all_reduce(SIZE, 4, *link)),
        (PARTIAL, 1): float(collectives.reduce_scatter(SIZE, 4, *link)),
        (0, 1): float(collectives.all_to_all(SIZE / 4, 4, *link)),
    }
    for (source, target), seconds in cases.items():
        assert one(Mesh((4,)), (source,), (target,)) == pytest.approx(seconds)


def test_a_tensor_is_cut_before_it_travels() -> None:
    """Partial along the outer axis and to be cut along the inner one: only the cut part is summed."""
    link = MACHINE.axis_link((2, 4), 0)
    cut = one(Mesh((2, 4)), (PARTIAL, REPLICATED), (REPLICATED, 0))
    assert cut == pytest.approx(float(collectives.all_reduce(SIZE / 4, 2, *link)))


def test_parts_within_parts_are_gathered_when_the_outer_cut_goes() -> None:
    mesh = Mesh((2, 2))
    inner, outer = MACHINE.axis_link((2, 2), 1), MACHINE.axis_link((2, 2), 0)
    gathered = float(collectives.all_gather(SIZE / 2, 2, *inner)) + float(collectives.all_gather(SIZE, 2, *outer))
    assert one(mesh, (0, 0), (REPLICATED, 0)) == pytest.approx(gathered)
    assert one(mesh, (0, 1), (REPLICATED, 1)) == pytest.approx(float(collectives.all_gather(SIZE / 2, 2, *outer)))


def test_a_table_has_the_cost_of_each_pair() -> None:
    mesh = Mesh((2, 3))
    sources = list(product((PARTIAL, REPLICATED, 0, 1), repeat=2))
    targets = list(product((REPLICATED, 0, 1), repeat=2))
    table = Redistribution(mesh, MACHINE).table(SIZE, sources, targets)
    for row, source in enumerate(sources):
        for column, target in enumerate(targets):
            assert table[row, column] == one(mesh, source, target) >= 0
            assert table[row, column] == 0 or source not in (target, (REPLICATED, REPLICATED))


@given(st.integers(1, 200), st.integers(1, 3))
def test_meshes_are_all_the_grids_of_so_many_devices(devices: int, axes: int) -> None:
    found = [mesh.sizes for mesh in meshes(devices, axes)]
    every = {
        sizes
        for count in range(1, axes + 1)
        for sizes in product([d for d in range(2, devices + 1) if devices % d == 0], repeat=count)
        if np.prod(sizes) == devices
    } or {(1,)}
    assert len(found) == len(set(found))
    assert set(found) == every
