"""Chains: what a subnet uses, what travels from block to block, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.errors import SpaceError, SupernetError
from weft.space import Space
from weft.supernet import Chain, Choice, Optional, Shared, initialise

WIDTH = 3


class Times(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


class Fork(nn.Module):
    """One tensor in, two out."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + 1


class Join(nn.Module):
    def forward(self, a: Tensor, b: Tensor, scale: Tensor | None = None) -> Tensor:
        return a * b if scale is None else a * b * scale


def three() -> Chain:
    space = Space()
    return Chain(
        Shared(Times(2.0), "stem"),
        Choice(space, "first", {"two": Times(2.0), "three": Times(3.0), "skip": nn.Identity()}),
        Choice(space, "second", {"five": Times(5.0), "seven": Times(7.0)}),
    )


def test_a_chain_runs_the_subnet_it_is_given_and_holds_no_active_one() -> None:
    chain, factor = three(), {"two": 2, "three": 3, "skip": 1, "five": 5, "seven": 7}
    for subnet in [*chain.space.enumerate()] * 2:
        wanted = 2 * factor[subnet["first"]] * factor[subnet["second"]]
        assert chain(torch.ones(1), subnet).item() == wanted


def test_a_route_names_the_layers_in_chain_order() -> None:
    chain = three()
    subnet = chain.space.subnet(first="three", second="five")
    assert [layer.name for layer in chain.route(subnet)] == ["stem", "first.three", "second.five"]
    assert [layer.block for layer in chain.route(subnet)] == [0, 1, 2]
    assert list(chain.layers) == ["stem", "first.two", "first.three", "first.skip", "second.five", "second.seven"]
    assert [layer.shared for layer in chain.layers.values()] == [True, *[False] * 5]
    assert chain(torch.ones(1), three().space.subnet(first="two", second="five")).item() == 20  # of an equal space
    other = Space()
    other.categorical("first", ["two", "three", "skip"])
    for wrong in (other.first(), {"first": "two", "second": "five"}):
        with pytest.raises(SpaceError):
            chain(torch.ones(1), wrong)


def test_a_tuple_travels_and_side_inputs_come_by_name() -> None:
    space = Space()
    chain = Chain(
        Shared(Fork(), "fork"),
        Choice(space, "join", {"plain": Join(), "other": Join()}, extra_inputs=["scale"]),
        inputs="x",
    )
    batch = {"scale": torch.tensor(10.0), "x": torch.tensor([1.0, 2.0])}
    assert chain(batch, space.first()).tolist() == [20.0, 60.0]
    with pytest.raises(SupernetError, match="extra input 'scale'"):
        chain({"x": batch["x"]}, space.first())
    with pytest.raises(SupernetError, match="takes x, but the batch has scale"):
        chain({"scale": batch["scale"]}, space.first())


def test_several_inputs_enter_as_a_tuple_and_a_tuple_may_come_out() -> None:
    chain = Chain(Shared(Join(), "join"), Shared(Fork(), "fork"), inputs=("b", "a"))
    out = chain({"a": torch.tensor(2.0), "b": torch.tensor(3.0)}, chain.space.subnet())
    assert [part.item() for part in out] == [6.0, 7.0]
    assert [part.item() for part in chain((torch.tensor(2.0), torch.tensor(5.0)), chain.space.subnet())] == [10.0, 11.0]
    unnamed = three()
    assert unnamed({"image": torch.ones(1), "label": torch.zeros(1)}, unnamed.space.first()).item() == 20
    with pytest.raises(SupernetError, match="nothing"):
        unnamed({}, unnamed.space.first())


def test_depth_switches_blocks_off_by_a_condition() -> None:
    space = Space()
    depth = space.integer("depth", 1, 3)
    blocks = [Optional(space, f"block{i}", Times(2.0), when=depth > i) for i in range(2)]
    last = Choice(space, "last", {"a": Times(3.0), "b": Times(5.0)}, when=depth >= 3)
    chain = Chain(*blocks, last, Optional(space, "extra", Times(7.0)))
    assert space.size() == (2 + 2) * 2
    results = {
        2: {"depth": 1, "block0": True, "extra": False},
        4: {"depth": 2, "block0": True, "block1": True, "extra": False},
        20 * 7: {"depth": 3, "block0": True, "block1": True, "last": "b", "extra": True},
    }
    for result, values in results.items():
        assert chain(torch.ones(1), space.subnet(values)).item() == result
    assert chain.smallest() == space.subnet(results[2])
    assert chain.largest() == space.subnet({**results[140], "last": "a"})
    assert [layer.name for layer in chain.route(chain.smallest())] == ["block0"]


def test_largest_and_smallest_are_valid_where_choices_depend_on_one_another() -> None:
    """The candidate with the most parameters would switch a block off, or break a constraint."""
    space = Space()
    big = Choice(space, "b", {"big": nn.Linear(9, 9), "small": nn.Linear(2, 2), "middle": nn.Linear(5, 5)})
    tail = Choice(space, "tail", {"x": nn.Identity(), "y": nn.Identity()}, when=space.handle("b") == "small")
    other = Choice(space, "other", {"big": nn.Linear(9, 9), "small": nn.Linear(2, 2)})
    space.require((space.handle("b") == "small") | (space.handle("other") == "small"), "one big layer at most")
    chain = Chain(big, tail, other)
    for subnet in (chain.largest(), chain.smallest()):
        assert chain.space.contains(subnet)
        assert subnet in set(space.enumerate())

    def parameters(subnet: Any) -> int:
        return sum(p.numel() for layer in chain.route(subnet) for p in chain.module(layer).parameters())

    assert parameters(chain.largest()) == max(map(parameters, space.enumerate()))
    assert parameters(chain.smallest()) == min(map(parameters, space.enumerate()))


# -- what is refused


def test_a_weight_or_a_statistic_in_two_layers_is_refused_and_allowed_within_one() -> None:
    shared, norm, relu = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False), nn.ReLU()
    with pytest.raises(SupernetError, match=r"'a' and 'z' share the weight '0.weight'"):
        Chain(Shared(shared, "a"), Shared(nn.Sequential(shared), "z"))
    with pytest.raises(SupernetError, match=r"'b.p' and 'b.q' share"):
        Chain(Choice(Space(), "b", {"p": shared, "q": shared}))
    with pytest.raises(SupernetError, match="share the weight"):
        initialise(lambda: Chain(*(Shared(lambda: nn.Sequential(shared), name) for name in "az")))
    with pytest.raises(SupernetError, match=r"'a' and 'z' share"):
        Chain(Shared(norm, "a"), Shared(norm, "z"))
    Chain(Shared(nn.Sequential(shared, shared), "both"), Shared(relu, "a"), Shared(relu, "z"))


class Returns(nn.Module):
    def __init__(self, value: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value(x)


IDENTITY: dict[str, nn.Module] = {"x": nn.Identity()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chain(), "at least one block"),
        (lambda: Choice(Space(), "b", {}), "no candidates"),
        (lambda: Shared(nn.Identity(), "a", side=["x"]), "side= was renamed to extra_inputs="),  # type: ignore[call-arg]
        (lambda: Chain(Choice(Space(), "b", {"x": 3})), "'b.x' must be an nn.Module or a function"),
        (lambda: Chain(Shared(nn.Identity(), "a"), Shared(nn.Identity(), "a")), "two blocks are named 'a'"),
        (lambda: Chain(*(Choice(Space(), name, IDENTITY) for name in "ab")), "different spaces"),
        *((partial(Shared, nn.Identity(), name), "cannot be a name") for name in ("", "3x", "a.b", "ä", 3, "a#")),
        (lambda: Choice(Space(), "b", {"a/b": nn.Identity()}), "cannot be a name"),
        *(
            (lambda name=name: Chain(Shared(nn.Identity(), name)), f"attribute '{name}' already exists")
            for name in ("forward", "training", "layers", "space", "blocks", "inputs", "_routes", "_modules")
        ),
        (lambda: Chain(Choice(Space(), "b", {"parameters": nn.Identity()})), "attribute 'parameters' already exists"),
    ],
)
def test_blocks_that_make_no_chain_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SupernetError, match=message):
        make()


@pytest.mark.parametrize(
    "value", [lambda x: None, lambda x: {"x": x}, lambda x: (), lambda x: (x, None), lambda x: 3.0, lambda x: [x, [x]]]
)
def test_what_cannot_travel_along_a_chain_is_refused(value: Callable[[Tensor], Any]) -> None:
    space = Space()
    chain = Chain(Choice(space, "b", {"bad": Returns(value)}), Shared(nn.Identity(), "end"))
    with pytest.raises(SupernetError, match=r"'b.bad' gave .* cannot pass on"):
        chain(torch.ones(1), space.first())
    assert len(Chain(Shared(Returns(lambda x: [x, x]), "two"))(torch.ones(1), Space().subnet())) == 2
