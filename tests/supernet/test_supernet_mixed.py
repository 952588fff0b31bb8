"""A chain under a mixture: one-hot is the pick, the pick is the plain module, and the rest is the expectation."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from elastic_law import random_mixture as any_mixture
from small_supernets import blended, layered
from torch import Tensor, nn

import weft
from weft import elastic
from weft.elastic import Mixture
from weft.errors import SupernetError
from weft.search.gradient.methods import Darts
from weft.supernet import Chain
from weft.supernet.mixed_chain import find_mixture_mismatch, make_mixed_chain, mixed_factory

CHAINS = {"layered": (layered, (5, 8, 8)), "blended": (blended, (5, 6))}


@pytest.mark.parametrize("kind", CHAINS)
def test_a_one_hot_mixture_is_the_pick_and_the_pick_is_the_plain_module(kind: str) -> None:
    make, shape = CHAINS[kind]
    chain = weft.initialise(make(), 3)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weights = dict(chain.named_parameters())
    for subnet in chain.space.enumerate():
        chain.zero_grad()
        picked = chain(x, subnet)
        picked.square().sum().backward()
        by_pick = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in weights.items()}
        plain = weft.extract(chain, subnet)
        out = plain(x)
        assert torch.equal(out, picked)
        out.square().sum().backward()
        left = {name: gradient.clone() for name, gradient in by_pick.items()}
        for name, p in plain.named_parameters():
            own = left[name.replace("op_", "op.")]  # an extracted part cannot have a dot in its name
            corner = tuple(slice(size) for size in p.shape)
            assert torch.equal(own[corner], p.grad), name
            own[corner] = 0.0
        assert not any(bool(rest.any()) for rest in left.values())  # nothing beyond what the subnet uses
        chain.zero_grad()
        mixed = chain(x, elastic.Mixture.one_hot(subnet, chain.space))
        mixed.square().sum().backward()
        torch.testing.assert_close(mixed, picked, rtol=1e-5, atol=1e-6)
        for name, p in weights.items():
            found = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(found, by_pick[name], rtol=1e-5, atol=1e-4)


def test_every_parameter_has_a_gradient_in_every_step_so_that_data_parallelism_waits_for_none() -> None:
    chain = weft.initialise(layered, 1)
    start = any_mixture(chain.space, 3)
    alphas = {name: nn.Parameter(start[name].detach().log()) for name in start.names}
    mixture = elastic.Mixture.unchecked(chain.space, {name: alpha.softmax(0) for name, alpha in alphas.items()})
    nn.functional.cross_entropy(chain(torch.randn(8, 8, 8), mixture), torch.arange(8)).backward()
    assert [name for name, p in (*chain.named_parameters(), *alphas.items()) if p.grad is None] == []


def test_a_chain_of_linear_blocks_under_a_mixture_is_the_product_of_their_expectations() -> None:
    chain = weft.initialise(blended(), 0).double()
    mixture = any_mixture(chain.space, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64)
    found = chain(x, mixture)
    y = chain.module("stem")(x)
    p = mixture["op"]
    y = p[0] * chain.module("op.wide")(y) + p[1] * y + p[2] * torch.tanh(y)
    q = mixture["extra"]
    y = q[0] * y + q[1] * chain.module("extra")(y)
    inner, outer = chain.module("in"), chain.module("out")
    w = mixture["width"]
    reach = torch.stack([torch.ones((), dtype=torch.float64)] * 4 + [w[1]] * 2)
    y = nn.functional.linear(y, inner.weight * reach[:, None], inner.bias * reach)
    y = nn.functional.linear(y, outer.weight * reach, outer.bias)
    torch.testing.assert_close(found, y, rtol=1e-12, atol=1e-12)


def test_the_mixed_chain_gives_what_the_chain_gives_under_the_mixture_that_it_holds() -> None:
    mixed = weft.initialise(pickle.loads(pickle.dumps(mixed_factory(layered, Darts()))), 5)
    weights = {name: p.clone() for name, p in mixed.state_dict().items() if not name.startswith("arch-")}
    with torch.no_grad():
        for layer in mixed.held:
            mixed.module(layer).alpha.copy_(torch.randn(len(mixed.module(layer).alpha)))
    plain = weft.initialise(layered, 5)
    assert weights.keys() == plain.state_dict().keys()
    assert all(torch.equal(weights[name], p) for name, p in plain.state_dict().items())
    x = torch.randn(3, 8, 8)
    out, p = mixed(x, mixed.space.first())
    torch.testing.assert_close(out, plain(x, mixed.mixture()))
    assert torch.equal(p, torch.cat([mixed.mixture()[name] for name in mixed.order]))


def test_the_parameters_of_a_choice_live_before_the_first_block_that_reads_it() -> None:
    mixed = make_mixed_chain(layered, Darts())
    assert mixed.held == {
        "arch-stem": ("width",),
        "arch-block0": ("depth", "ratio0"),
        "arch-block1": ("ratio1",),
        "arch-block2": ("ratio2",),
    }
    blocks = [block.name for block in mixed.blocks]
    assert blocks.index("arch-block1") == blocks.index("block1") - 1
    assert mixed.order == ("width", "depth", "ratio0", "ratio1", "ratio2")


def test_a_choice_that_only_a_users_own_code_reads_is_there_from_the_start() -> None:
    class Own(elastic.Module):
        def forward(self, x: torch.Tensor, pick: elastic.Pick) -> torch.Tensor:
            return x * (pick["gain"][1] if isinstance(pick, elastic.Mixture) else float(pick["gain"]))

    space = weft.Space()
    space.integer("gain", [0, 1])
    chain = weft.Chain(weft.Shared(nn.Identity(), "stem"), weft.Elastic(space, "own", Own()))
    mixed = weft.initialise(make_mixed_chain(chain, Darts()))
    assert mixed.held == {"arch-stem": ("gain",)}
    assert torch.equal(mixed(torch.ones(2), space.first())[0], torch.full((2,), 0.5))


class Joined(elastic.Module):
    """Puts features of two sizes side by side, so that the second ones lie elsewhere in every subnet."""

    def __init__(self, space: weft.Space, first: weft.space.Expr, second: weft.space.Expr) -> None:
        super().__init__()
        self.first, self.second = elastic.Linear(space, 6, first), elastic.Linear(space, 6, second)
        self.last = elastic.Linear(space, first + second, 4)

    def forward(self, x: Tensor, pick: elastic.Pick) -> Tensor:
        return self.last(torch.cat((self.first(x, pick), self.second(x, pick)), -1), pick)


def joined() -> Chain:
    space = weft.Space()
    first, second = space.integer("first", [2, 4]), space.integer("second", [3, 5])
    return weft.Chain(
        weft.Shared(lambda: nn.Linear(6, 6), "stem"), weft.Elastic(space, "join", partial(Joined, space, first, second))
    )


def nested() -> Chain:
    """Blocks under conditions on choices that have conditions themselves."""
    space = weft.Space()
    outer = space.categorical("outer", ["off", "on"])
    inner = space.integer("inner", [1, 2], when=outer == "on")
    return weft.Chain(
        weft.Shared(lambda: nn.Linear(6, 6), "stem"),
        weft.Elastic(space, "mlp", partial(elastic.MLP, space, 6, 8), when=inner == 1),
        weft.Choice(space, "choice", {"linear": lambda: nn.Linear(6, 6), "skip": nn.Identity}, when=inner == 2),
        weft.Optional(space, "optional", lambda: nn.Linear(6, 6), when=inner == 1),
        weft.Elastic(space, "none", partial(elastic.MLP, space, 6, 4), when=~(inner == 1)),
        weft.Shared(lambda: nn.Linear(6, 3), "head"),
    )


def test_a_block_that_joins_features_of_varying_number_is_named() -> None:
    found = find_mixture_mismatch(weft.initialise(joined, 0), {"x": torch.randn(2, 6)})
    assert found is not None
    block, subnet, off = found
    assert block == "join"
    assert subnet.values["first"] == 2
    assert off > 0.1


@pytest.mark.parametrize("make", [nested, layered])
def test_chains_of_elastic_layers_keep_the_law(make: Callable[[], Chain]) -> None:
    chain = weft.initialise(make, 0)
    before = chain.training
    assert find_mixture_mismatch(chain, {"x": torch.randn(2, 64 if make is layered else 6)}, subnets=12) is None
    assert chain.training == before


def test_under_nested_conditions_every_certain_mixture_is_its_subnet_and_probabilities_multiply() -> None:
    chain, x = weft.initialise(nested, 0), torch.randn(3, 6)
    for subnet in chain.space.enumerate():
        torch.testing.assert_close(chain(x, Mixture.one_hot(subnet, chain.space)), chain(x, subnet))
    condition = chain.blocks[1].condition
    probs = {"outer": [0.25, 0.75], "inner": [0.4, 0.6], "choice": [0.5, 0.5], "optional": [1.0]}
    mixture = Mixture(chain.space, {name: torch.tensor(row) for name, row in probs.items()})
    assert condition.probability(mixture).item() == pytest.approx(0.75 * 0.4)


def test_what_cannot_be_mixed_is_refused_by_name() -> None:
    space = weft.Space()
    depth = space.integer("depth", [1, 2])
    stem = weft.Shared(lambda: nn.Linear(4, 4), "stem")
    odd = weft.Elastic(space, "odd", partial(elastic.Linear, space, 4, 5), when=depth > 1)
    with pytest.raises(SupernetError, match="'odd' can be skipped"):
        weft.initialise(weft.Chain(stem, odd))(torch.randn(2, 4), Mixture.uniform(space))
    space = weft.Space()
    chain = weft.Chain(weft.Choice(space, "a", {"one": nn.Linear(4, 1), "five": nn.Linear(4, 5)}))
    with pytest.raises(SupernetError, match=r"candidates give the same shapes: 'a\.five' gives"):
        chain(torch.zeros(2, 4), Mixture.uniform(space))
    for probabilities, message in (
        ({"a": torch.tensor([0.5, 0.6])}, r"'a' are 0\.5, 0\.6 and come to 1\.1"),
        ({"a": torch.tensor([1.0])}, "2 options"),
        ({}, "no probabilities for choice 'a'"),
    ):
        with pytest.raises(SupernetError, match=message):
            Mixture(space, probabilities)
    layer: Callable[[], nn.Module] = partial(elastic.Linear, space, 4, space.integer("width", [2, 4]))
    for name, candidate in (("built", layer()), ("lazy", layer)):
        with pytest.raises(SupernetError, match=rf"layer '{name}.one' is elastic \(Linear\) and needs the pick"):
            weft.initialise(weft.Chain(weft.Choice(space, name, {"one": candidate, "two": nn.Identity})))
