"""Slices for a backward that comes later: made from the weight as it is then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import weft
from weft import elastic


def layers(space: weft.Space) -> dict[str, tuple[elastic.Leaf, Tensor]]:
    width = space.integer("width", [4, 8])
    return {
        "linear": (elastic.Linear(space, width, width), torch.randn(3, 4)),
        "grid": (elastic.Grid(space, (width,), (2, width)), torch.randn(3, 4)),
        "conv": (elastic.Conv2d(space, width, width, 3), torch.randn(2, 4, 5, 5)),
    }


@pytest.mark.parametrize("kind", ["linear", "grid", "conv"])
def test_the_backward_of_a_slice_sees_what_the_weight_holds_by_then(kind: str) -> None:
    space = weft.Space()
    layer, x = layers(space)[kind]
    small = space.first()

    def gradient(change: Callable[[], object]) -> Tensor:
        given = x.clone().requires_grad_()
        out = layer(given, small)
        change()
        (found,) = torch.autograd.grad(out, [given], torch.ones_like(out))
        return found

    before = gradient(lambda: None)
    assert torch.equal(gradient(lambda: None), before)
    assert torch.equal(gradient(lambda: layer.weight.data.mul_(2.0)), 2 * before)
