"""Other weights in place of a module's own, in the forward and in a backward that recomputes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.engine.inplace_weights import ParameterSwap
from weft.engine.reference import SequentialReference
from weft.space import Space
from weft.supernet import Chain, Choice, Shared, initialise


class Recomputed(nn.Module):
    """The same layer, its activations kept or recomputed in the backward."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        return out


def build(recompute: bool) -> Chain:
    space = Space()
    blocks = [Choice(space, f"b{i}", {"only": lambda: Recomputed(recompute)}) for i in range(3)]
    return Chain(Shared(lambda: nn.Linear(4, 4), "stem"), *blocks)


def test_a_module_computes_with_what_it_is_bound_to_and_has_its_own_again_afterwards() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight  # tied: both places must follow
    own = module[0].weight
    binding = ParameterSwap(module, [own])
    with binding.to([2 * torch.eye(2)]):
        assert torch.equal(module(torch.ones(1, 2)), torch.full((1, 2), 4.0))
    assert module[0].weight is own
    assert module[1].weight is own
    with pytest.raises(ZeroDivisionError), binding.to([torch.eye(2)]):
        raise ZeroDivisionError
    assert module[0].weight is own


@pytest.mark.parametrize("consistency", ["exact", "delayed(3)", "lagged(2)"])
def test_a_layer_that_is_recomputed_in_its_backward_sees_the_version_of_its_forward(
    make: Callable[..., SequentialReference], consistency: str
) -> None:
    found = []
    for recompute in (False, True):
        chain = initialise(lambda recompute=recompute: build(recompute), seed=2)
        subnet = chain.space.first()
        sequential = make(chain, [subnet] * 10, consistency=consistency, loss=lambda out, batch: out.square().mean())
        for i in range(10):
            sequential.step(i, {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(i))})
        found.append(chain.state_dict())
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name
