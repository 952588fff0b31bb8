"""The small spaces for 8 x 8 images: every candidate learns, in every block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from weft.space import Subnet
from weft.supernet import Chain, extract, initialise
from weft.zoo import digits_conv, digits_mlp


def covering(chain: Chain) -> list[Subnet]:
    """Subnets that between them use every candidate of every block."""
    choices = chain.space.choices
    most = max(len(choice.options or ()) for choice in choices.values())
    return [
        chain.space.subnet(
            {name: choice.options[k % len(choice.options)] for name, choice in choices.items() if choice.options}
        )
        for k in range(most)
    ]


@pytest.mark.parametrize(("build", "size"), [(digits_conv, 4**6), (digits_mlp, 4**4)])
def test_every_candidate_runs_forward_and_backward(build: Callable[[], Chain], size: int) -> None:
    chain = initialise(build)
    assert chain.space.size() == size
    chain.train()
    used = set()
    for subnet in covering(chain):
        chain.zero_grad()
        out = chain(torch.randn(4, 1, 8, 8), subnet)
        assert out.shape == (4, 10)
        torch.nn.functional.cross_entropy(out, torch.arange(4)).backward()
        route = {layer.name for layer in chain.route(subnet)}
        used |= route
        for name in chain.layers:
            for parameter in chain.module(name).parameters():
                assert (parameter.grad is not None) == (name in route)
                assert parameter.grad is None or torch.isfinite(parameter.grad).all()
    assert used == set(chain.layers)


@pytest.mark.parametrize("build", [digits_conv, digits_mlp])
def test_subnets_come_out_with_the_same_bits(build: Callable[[], Chain]) -> None:
    chain = initialise(build).eval()
    x = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        for subnet in covering(chain):
            model = extract(chain, subnet)
            assert torch.equal(model(x), chain(x, subnet))
            homes = {type(part).__module__ for part in model.modules()}
            assert all(home.startswith("torch.") or home == "weft.zoo.convolutions" for home in homes)
