"""Switches between whole modules: shared weights, entangled options, partial channels, and what comes out plain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from elastic_law import agrees_with_the_definition, any_mixture, chain_of, check_law, draw, near, padded
from torch import Tensor, nn
from torch.nn import functional as F

from weft.elastic import Conv2d, Mixture, Module, Sequential, Switch, Zero
from weft.errors import SpaceError, SupernetError
from weft.space import Space
from weft.supernet import extract
from weft.utils.rng import torch_seeded

OPTIONS = ("none", "skip", "conv1", "conv3", "pool")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch_seeded("elastic switch"):
        yield


def make_space() -> Space:
    space = Space()
    space.categorical("op", OPTIONS)
    space.integer("width", [2, 4])
    return space


def conv(kernel: int, stride: int = 1, channels: int = 4) -> nn.Module:
    parts = nn.Conv2d(channels, channels, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(channels)
    return nn.Sequential(nn.ReLU(), *parts)


def make_switch(space: Space, stride: int = 1, partial: int | None = None, entangled: bool = False) -> Switch:
    channels = 4 if partial is None else 4 // partial
    modules: dict[object, nn.Module] = {
        "none": Zero(stride),
        "skip": nn.Identity() if stride == 1 else nn.AvgPool2d(1, stride),
        "pool": nn.MaxPool2d(3, stride, 1),
    }
    if entangled:
        kernel = 1 + 2 * (space.handle("op") == "conv3")
        inner = Conv2d(space, channels, channels, kernel, stride, bias=False)
        modules["conv1", "conv3"] = Sequential(nn.ReLU(), inner, nn.BatchNorm2d(channels))
    else:
        modules |= {"conv1": conv(1, stride, channels), "conv3": conv(3, stride, channels)}
    return Switch(space, "op", modules, partial, stride)


def subnet_of(space: Space, op: str, width: int = 4) -> object:
    return space.subnet(op=op, width=width)


@pytest.mark.parametrize("entangled", [False, True])
@pytest.mark.parametrize(("stride", "partial"), [(1, None), (2, None), (1, 2), (2, 2)])
def test_a_switch_keeps_the_law_for_every_option(stride: int, partial: int | None, entangled: bool) -> None:
    space = make_space()
    chain = chain_of(space, make_switch(space, stride, partial, entangled))
    for op in OPTIONS:
        if op == "none" and partial is None:  # gives a constant, which has no gradient
            with torch.no_grad():
                out = chain(draw(2, 4, 5, 6, dtype=torch.float32), subnet_of(space, op))
            assert torch.equal(out, torch.zeros(2, 4, -(-5 // stride), 6 // stride))
            continue
        check_law(chain, subnet_of(space, op), draw(2, 4, 5, 6))


def test_the_plain_form_of_a_switch_holds_the_chosen_module_and_no_other() -> None:
    space = make_space()
    chain = chain_of(space, make_switch(space))
    for op, kinds in (
        ("conv3", [nn.ReLU, nn.Conv2d, nn.BatchNorm2d]), ("pool", [nn.MaxPool2d]), ("skip", [nn.Identity])
    ):  # fmt: skip
        plain = extract(chain, subnet_of(space, op))
        assert [type(part) for part in plain.modules() if not list(part.children())] == kinds


@pytest.mark.parametrize("entangled", [False, True])
def test_under_a_mixture_a_switch_gives_the_sum_of_all_by_their_probabilities(entangled: bool) -> None:
    """An entangled pair counts by the sum of its probabilities, with the weight expected of the pair."""
    space = make_space()
    switch = make_switch(space, entangled=entangled)

    def literal(x: Tensor, mixture: Mixture) -> Tensor:
        probs = mixture["op"]
        out = probs[1] * x + probs[4] * F.max_pool2d(x, 3, 1, 1)
        if not entangled:
            return out + probs[2] * switch.candidates["conv1"](x) + probs[3] * switch.candidates["conv3"](x)
        relu, inner, norm = switch.candidates["conv1-conv3"]
        centre = padded(torch.ones(4, 4, 1, 1, dtype=torch.float64), inner.weight.shape)
        both = probs[2] + probs[3]
        weight = (probs[2] * centre + probs[3]) / both * inner.weight
        return out + both * norm(F.conv2d(relu(x), weight, padding=1))

    agrees_with_the_definition(switch, draw(3, 4, 5, 5), space, literal)


def test_an_entangled_pair_without_probability_counts_for_nothing_and_has_a_finite_gradient() -> None:
    space = make_space()
    switch = make_switch(space, entangled=True)
    probs = torch.tensor([0.25, 0.5, 0.0, 0.0, 0.25], requires_grad=True)
    x = draw(3, 4, 5, 5, dtype=torch.float32)
    out = switch(x, Mixture(space, {"op": probs, "width": torch.tensor([0.5, 0.5])}))
    near(out, 0.5 * x + 0.25 * F.max_pool2d(x, 3, 1, 1), 1e-6)
    out.sum().backward()
    assert probs.grad is not None
    assert probs.grad.isfinite().all()


def test_the_first_part_of_the_channels_goes_through_and_the_rest_passes_by_then_all_are_shuffled() -> None:
    space = make_space()
    switch = make_switch(space, stride=2, partial=2)
    x = draw(2, 4, 6, 6, dtype=torch.float32)
    out = switch(x, subnet_of(space, "pool"))
    through, past = F.max_pool2d(x[:, :2], 3, 2, 1), F.max_pool2d(x[:, 2:], 2, 2)
    assert torch.equal(out, torch.stack((through[:, 0], past[:, 0], through[:, 1], past[:, 1]), 1))


def test_elastic_modules_within_a_switch_are_given_the_pick() -> None:
    space = make_space()
    width = space.handle("width")
    modules = {op: Sequential(nn.Sequential(nn.ReLU()), Conv2d(space, 4, width, 3)) for op in OPTIONS}
    switch = Switch(space, space.handle("op"), modules)
    chain = chain_of(space, switch)
    for op in ("skip", "pool"):
        for size in (2, 4):
            check_law(chain, subnet_of(space, op, size), draw(2, 4, 5, 6))
    assert {name for part in chain.modules() if isinstance(part, Module) for name in part.reads} == {"op", "width"}


def test_a_module_of_one_option_that_reads_the_choice_is_told_that_option() -> None:
    space = make_space()
    kernel = 1 + 2 * (space.handle("op") == "conv3")
    modules = {op: Conv2d(space, 4, 4, kernel) for op in OPTIONS}
    switch = Switch(space, "op", modules).double()
    mixture = any_mixture(space)
    x = draw(2, 4, 4, 4)
    wanted = torch.zeros_like(x)
    for prob, op in zip(mixture["op"].unbind(), OPTIONS, strict=True):
        wanted = wanted + prob * modules[op](x, subnet_of(space, op))
    near(switch(x, mixture), wanted, 1e-12)


@pytest.mark.parametrize(
    ("choice", "modules", "message"),
    [
        ("op", {"none": Zero()}, "no module for option 'skip'"),
        ("op", {**{op: Zero() for op in OPTIONS}, "conv5": Zero()}, "has no option 'conv5'; did you mean"),
        ("op", {**{op: Zero() for op in OPTIONS}, ("conv1", "none"): Zero()}, "two modules for option 'conv1'"),
        ("opp", {}, "did you mean 'op'"),
    ],
)
def test_a_switch_that_does_not_fit_its_choice_is_refused(
    choice: str, modules: dict[object, nn.Module], message: str
) -> None:
    with pytest.raises(SupernetError, match=message):
        Switch(make_space(), choice, modules)


def test_a_switch_is_on_one_choice_whose_options_have_names_of_their_own() -> None:
    space = make_space()
    space.real("rate", 0.0, 1.0)
    choice = space.categorical("alike", ["a.b", "a_b"])
    every = {op: Zero() for op in OPTIONS}
    with pytest.raises(SupernetError, match="would both be called 'a_b'"):
        Switch(space, choice, {"a.b": nn.Identity(), "a_b": Zero()})
    with pytest.raises(SupernetError, match="one choice"):
        Switch(space, 2 * space.handle("width"), {})
    with pytest.raises(SpaceError, match="real number"):
        Switch(space, "rate", {})
    with pytest.raises(SupernetError, match="partial=0"):
        Switch(space, "op", every, partial=0)
