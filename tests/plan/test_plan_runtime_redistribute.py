"""The steps between placements, carried out on a mesh of arrays and compared with what the placements mean."""

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


def laid_out(whole: Array, placements: Placements, mesh: Mesh) -> Parts:
    """What each device holds, by the definition: the outer mesh axis cuts first, and summands add up to the whole."""
    parts = {}
    for device in devices(mesh):
        part = whole
        for axis, placement in enumerate(placements):
            if placement >= 0:
                part = np.split(part, mesh.sizes[axis], placement)[device[axis]]
            elif placement == PARTIAL:
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


@pytest.mark.parametrize(
    ("sizes", "held", "wanted", "steps"),
    [
        ((4,), (PARTIAL,), (1,), [Collective.REDUCE_SCATTER]),  # never reduced whole
        (
            (2, 2),
            (PARTIAL, REPLICATED),
            (REPLICATED, 0),
            [Collective.CUT, Collective.ALL_REDUCE],
        ),  # cut before it is sent
        ((2, 2, 2), (0, 0, REPLICATED), (0, 0, REPLICATED), []),
        ((1, 1), (PARTIAL, 0), (REPLICATED, REPLICATED), []),
        # An inner cut is made anew where an outer one goes.
        ((2, 2), (0, 0), (REPLICATED, 0), [Collective.ALL_GATHER, Collective.ALL_GATHER, Collective.CUT]),
    ],
    ids=str,
)
def test_steps_drawn_by_hand(
    sizes: tuple[int, ...], held: Placements, wanted: Placements, steps: list[Collective]
) -> None:
    assert [step.kind for step in redistribution_steps(held, wanted, Mesh(sizes))] == steps


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 3), (3, 2), (2, 1), (2, 2, 2)], ids=str)
def test_the_steps_lead_from_every_layout_to_every_other(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(sizes)
    whole = np.arange(24.0 * 24).reshape(24, 24)
    for held in product((PARTIAL, REPLICATED, 0, 1), repeat=len(sizes)):
        for wanted in product((REPLICATED, 0, 1), repeat=len(sizes)):
            parts, steps = laid_out(whole, held, mesh), redistribution_steps(held, wanted, mesh)
            assert len(steps) <= 2 * len(sizes)
            for step in steps:
                parts = after(parts, step, mesh)
            for device, expected in laid_out(whole, wanted, mesh).items():
                np.testing.assert_allclose(parts[device], expected, rtol=1e-12, err_msg=f"{held} -> {wanted}")
