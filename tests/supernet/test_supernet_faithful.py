"""The law of mixtures, tried out on a user's own blocks: a certain mixture is the subnet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from small_supernets import layered
from torch import Tensor, nn

import weft
from weft import elastic
from weft.elastic import Mixture
from weft.errors import SupernetError
from weft.supernet import Chain
from weft.supernet.mixed_chain import find_mixture_mismatch


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


def test_under_nested_conditions_every_certain_mixture_is_its_subnet_and_chances_multiply() -> None:
    chain, x = weft.initialise(nested, 0), torch.randn(3, 6)
    for subnet in chain.space.enumerate():
        torch.testing.assert_close(chain(x, Mixture.one_hot(subnet, chain.space)), chain(x, subnet))
    condition = chain.blocks[1].condition
    chances = {"outer": [0.25, 0.75], "inner": [0.4, 0.6], "choice": [0.5, 0.5], "optional": [1.0]}
    mixture = Mixture(chain.space, {name: torch.tensor(row) for name, row in chances.items()})
    assert condition.probability(mixture).item() == pytest.approx(0.75 * 0.4)


def test_what_candidates_of_a_choice_give_must_have_one_shape_to_be_mixed() -> None:
    space = weft.Space()
    chain = weft.Chain(weft.Choice(space, "a", {"one": nn.Linear(4, 1), "five": nn.Linear(4, 5)}))
    with pytest.raises(SupernetError, match=r"candidates give the same shapes: 'a\.five' gives"):
        chain(torch.zeros(2, 4), Mixture.uniform(space))


@pytest.mark.parametrize("made", [True, False])
def test_an_elastic_module_outside_of_an_elastic_block_is_refused(made: bool) -> None:
    space = weft.Space()
    width = space.integer("width", [2, 4])
    layer: Callable[[], nn.Module] = partial(elastic.Linear, space, 4, width)
    with pytest.raises(SupernetError, match=r"layer 'a.one' is elastic \(Linear\) and needs the pick"):
        weft.initialise(weft.Chain(weft.Choice(space, "a", {"one": layer() if made else layer, "two": nn.Identity})))


def test_a_switch_refuses_options_that_would_share_a_name() -> None:
    space = weft.Space()
    choice = space.categorical("op", ["a.b", "a_b"])
    with pytest.raises(SupernetError, match="two modules of the switch on 'op' would both be called 'a_b'"):
        elastic.Switch(space, choice, {"a.b": nn.Identity(), "a_b": elastic.Zero()})


def test_a_size_of_too_many_combinations_is_refused_at_once() -> None:
    space = weft.Space()
    total = sum((space.integer(f"w{i}", [1, 2, 3]) for i in range(40)), start=weft.space.Expr.of(0))
    with pytest.raises(SupernetError, match="combinations of options, more than 4,096"):
        elastic.Linear(space, 4, total)
