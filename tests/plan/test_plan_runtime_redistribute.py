"""The steps between layouts, carried out on a mesh of arrays and compared with what the layouts mean."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from weft.plan.runtime.redistribute import Collective, CollectiveStep, redistribution_steps
from weft.plan.sharding import PARTIAL, REPLICATED, Mesh, Placements

Array = NDArray[np.float64]
Parts = dict[tuple[int, ...], Array]


def devices(mesh: Mesh) -> list[tuple[int, ...]]:
    return list(product(*(range(size) for size in mesh.sizes)))


def laid_out(whole: Array, laid: Placements, mesh: Mesh) -> Parts:
    """What each device holds, by the definition: the outer mesh axis cuts first, and summands add up to the whole."""
    parts = {}
    for device in devices(mesh):
        part = whole
        for axis, place in enumerate(laid):
            if place >= 0:
                part = np.split(part, mesh.sizes[axis], place)[device[axis]]
            elif place == PARTIAL:
                count = mesh.sizes[axis]
                part = part * (device[axis] + 1) * 2 / (count * (count + 1))
        parts[device] = part
    return parts


def after(parts: Mapping[tuple[int, ...], Array], step: CollectiveStep, mesh: Mesh) -> Parts:
    """What each device holds after a collective among the devices along one mesh axis."""
    out = {}
    for device, held in parts.items():
        group = [
            parts[(*device[: step.axis], other, *device[step.axis + 1 :])] for other in range(mesh.sizes[step.axis])
        ]
        own = device[step.axis]
        if step.kind is Collective.CUT:
            out[device] = np.split(held, len(group), step.new)[own]
        elif step.kind is Collective.ALL_REDUCE:
            out[device] = np.sum(group, axis=0)
        elif step.kind is Collective.REDUCE_SCATTER:
            out[device] = np.split(np.sum(group, axis=0), len(group), step.new)[own]
        elif step.kind is Collective.ALL_GATHER:
            out[device] = np.concatenate(group, step.old)
        else:
            out[device] = np.concatenate([np.split(other, len(group), step.new)[own] for other in group], step.old)
    return out


def test_a_partial_tensor_that_is_wanted_cut_is_scattered_and_never_reduced_whole() -> None:
    assert redistribution_steps((PARTIAL,), (1,), Mesh((4,))) == (
        CollectiveStep(Collective.REDUCE_SCATTER, 0, PARTIAL, 1),
    )


def test_a_whole_tensor_is_cut_before_summands_are_added() -> None:
    steps = redistribution_steps((PARTIAL, REPLICATED), (REPLICATED, 0), Mesh((2, 2)))
    assert [step.kind for step in steps] == [Collective.CUT, Collective.ALL_REDUCE]


def test_a_tensor_that_lies_as_wanted_is_not_moved() -> None:
    assert redistribution_steps((0, 0, REPLICATED), (0, 0, REPLICATED), Mesh((2, 2, 2))) == ()


def test_a_mesh_axis_of_one_device_moves_nothing() -> None:
    assert redistribution_steps((PARTIAL, 0), (REPLICATED, REPLICATED), Mesh((1, 1))) == ()


def test_an_inner_cut_is_made_anew_where_an_outer_one_goes() -> None:
    assert [step.kind for step in redistribution_steps((0, 0), (REPLICATED, 0), Mesh((2, 2)))] == [
        Collective.ALL_GATHER,
        Collective.ALL_GATHER,
        Collective.CUT,
    ]


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 3), (3, 2), (2, 1), (2, 2, 2)], ids=str)
def test_the_moves_lead_from_every_layout_to_every_other(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(sizes)
    whole = np.arange(24.0 * 24).reshape(24, 24)
    for held in product((PARTIAL, REPLICATED, 0, 1), repeat=len(sizes)):
        for wanted in product((REPLICATED, 0, 1), repeat=len(sizes)):
            parts = laid_out(whole, held, mesh)
            for step in redistribution_steps(held, wanted, mesh):
                parts = after(parts, step, mesh)
            for device, expected in laid_out(whole, wanted, mesh).items():
                np.testing.assert_allclose(parts[device], expected, rtol=1e-12, err_msg=f"{held} -> {wanted}")


def test_no_passage_takes_more_moves_than_two_for_each_mesh_axis() -> None:
    for held in product((PARTIAL, REPLICATED, 0, 1), repeat=3):
        for wanted in product((REPLICATED, 0, 1), repeat=3):
            assert len(redistribution_steps(held, wanted, Mesh((2, 2, 2)))) <= 6
