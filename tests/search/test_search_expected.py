"""Expected costs, against extracted subnets and against the expectation over all of them."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from elastic_law import any_mixture, random_mixture, refusing_values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from weft.elastic import Linear, Mixture, Module, Switch, Zero
from weft.elastic import Sequential as Row
from weft.errors import SearchError
from weft.search import cost_measure
from weft.search.cost import flops, parameters
from weft.search.cost_model import CostModel, build_cost_model, plain_inputs
from weft.space import Expr, Space, Subnet
from weft.supernet import Chain, Choice, Elastic, LazyLayer, Optional, Shared, extract
from weft.utils.rng import generator
from weft.zoo import digits_mlp

Batch = dict[str, Tensor]


class Feed(Module):
    """A residual feed-forward of an elastic width and hidden size, with a weight of its own and a plain module."""

    def __init__(self, space: Space, width: Expr | int, hidden: Expr | int) -> None:
        super().__init__()
        self.up, self.down = Linear(space, width, hidden), Linear(space, hidden, width)
        self.act, self.scale = nn.GELU(), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, pick: Any) -> Tensor:
        return x + self.scale * self.down(self.act(self.up(x, pick=pick)), pick=pick)


class Attend(Module):
    """Attention whose products follow the number of heads, which it never reads itself."""

    def __init__(self, space: Space, width: Expr | int, heads: Expr) -> None:
        super().__init__()
        self.into, self.out = Linear(space, width, 3 * 4 * heads), Linear(space, 4 * heads, width)

    def forward(self, x: Tensor, pick: Any) -> Tensor:
        q, k, v = self.into(x, pick=pick).unflatten(-1, (3, -1, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2), pick=pick)


class Crop(Module):
    """Keeps the first tokens."""

    reads = ("tokens",)

    def forward(self, x: Tensor, pick: Any) -> Tensor:
        return x[:, : pick["tokens"]]


class Fitting(nn.Module):
    """A product that fits any width, so that it can be a candidate among elastic layers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size + 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.transpose(0, 1) @ x @ x.new_ones(x.shape[1], len(self.weight))).sum()


class Valued(nn.Module):
    """Looks at the values of a tensor, so that shapes alone will not do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(x.sum()) < 1e9 else x


class Deep(Module):
    """Modules in modules: switches in a switch, and what they hold read choices of their own."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        size = space.handle("size")
        inner = Switch(space, "inner", {"a": Feed(space, 4, size), "b": nn.Linear(4, 4), "c": Zero()})
        self.outer = Switch(space, "outer", {"on": Row(inner, Feed(space, 4, 2 * size)), "off": nn.Identity()})

    def forward(self, x: Tensor, pick: Any) -> Tensor:
        out: Tensor = self.outer(x, pick=pick)
        return out


class Asking(Module):
    """Asks the pick in every way that there is."""

    reads = ("deep", "extra", "half")

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=bool(index % 2)) for index in range(5))
        self.space = space

    def forward(self, x: Tensor, pick: Any) -> Tensor:
        if pick.get("deep") == 2:
            x = self.layers[0](x)
        if "extra" in pick and pick.values["extra"] == 3:
            x = self.layers[1](x)
        if {"deep", "extra"} <= pick.values.keys():
            x = self.layers[2](x)
        if pick["twice"] == 4:  # a derived dimension
            x = self.layers[3](x)
        return self.layers[4](x)


class Twofold(Module):
    """One module and one weight in two places."""

    reads = ("other",)

    def __init__(self, space: Space) -> None:
        super().__init__()
        shared = Linear(space, 4, 4)
        self.first, self.second = Row(shared, nn.ReLU()), Switch(space, "case", {0: shared, 1: Zero(), 2: Row(shared)})
        self.scaled = Row(Scaled(4), Scaled(4))
        self.scaled[1].scale = self.scaled[0].scale

    def forward(self, x: Tensor, pick: Any) -> Tensor:
        x = self.first(x, pick=pick) + self.second(x, pick=pick)
        x = self.first(x, pick=pick)
        return self.scaled(x, pick=pick) if pick["other"] else x


class Scaled(Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, pick: Any) -> Tensor:
        return x * self.scale


class Row6(Module):
    """Six layers of elastic widths, with a weight of its own: too many combinations to be measured as one."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        dims = [4, *(space.integer(f"w{index}", [2, 3, 5]) for index in range(6))]
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(Linear(space, *pair) for pair in itertools.pairwise(dims))

    def forward(self, x: Tensor, pick: Any) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x, pick=pick)
        return x


class Write(Module):
    """Passes the pick to the next block behind the back of everybody."""

    reads = ("case",)

    def __init__(self, note: list[int]) -> None:
        super().__init__()
        self.note = note

    def forward(self, x: Tensor, pick: Any) -> Tensor:
        self.note[0] = pick["case"]
        return x + 1


class Read(Module):
    def __init__(self, note: list[int]) -> None:
        super().__init__()
        self.note = note
        self.each = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor, pick: Any) -> Tensor:
        for layer in self.each[: self.note[0] + 1]:
            x = layer(x)
        return x


def tower(layers: int = 2) -> tuple[Chain, Batch]:
    space = Space()
    width, depth = space.integer("width", [4, 8]), space.integer("depth", 1, layers)
    blocks = []
    for index in range(layers):
        when = None if index == 0 else depth > index
        heads = space.integer(f"heads{index}", [1, 2], when=when)
        ratio = space.categorical(f"ratio{index}", [1, 1.5, 2], when=when)
        block = Row(Attend(space, width, heads), Feed(space, width, ratio * width))
        blocks.append(Elastic(space, f"block{index}", block, when=when))
    stem, head = Elastic(space, "stem", Linear(space, 3, width)), Elastic(space, "head", Linear(space, width, 2))
    return Chain(stem, *blocks, head), {"x": torch.ones(2, 5, 3)}


def nested() -> tuple[Chain, Batch]:
    """Conditions on conditions, and a width that only some subnets have."""
    space = Space()
    outer = space.integer("outer", [0, 1, 2])
    inner = space.integer("inner", [0, 1], when=outer > 0)
    size = space.integer("size", [2, 3, 5], when=inner > 0)
    block = Elastic(space, "block", Feed(space, 4, size), when=inner > 0)
    return Chain(Shared(nn.Linear(4, 4), "stem"), block), {"x": torch.ones(1, 4)}


def cropped() -> tuple[Chain, Batch]:
    """What the layers after the crop take follows a choice that none of them reads."""
    space = Space()
    space.integer("tokens", [1, 3, 4])
    hidden = space.integer("hidden", [2, 6])
    return Chain(
        Elastic(space, "crop", Crop()), Elastic(space, "feed", Feed(space, 4, hidden)), Shared(nn.Linear(4, 2), "head")
    ), {"x": torch.ones(2, 7, 4)}


def valued() -> tuple[Chain, Batch]:
    space = Space()
    hidden = space.integer("hidden", [2, 6])
    return Chain(Elastic(space, "feed", Feed(space, 4, hidden)), Shared(Valued(), "head")), {"x": torch.ones(2, 4)}


def constrained() -> tuple[Chain, Batch]:
    space = Space()
    width, hidden = space.integer("width", [2, 4, 8]), space.integer("hidden", [2, 4, 8])
    extra = space.integer("extra", [1, 2, 3])
    space.require(hidden >= width)
    space.require((extra < 3) | (hidden < 8))
    blocks = [Elastic(space, "stem", Linear(space, 3, width)), Elastic(space, "feed", Feed(space, width, hidden))]
    return Chain(*blocks, Elastic(space, "side", Linear(space, width, 4 * extra))), {"x": torch.ones(1, 3)}


def sided() -> tuple[Chain, Batch]:
    """Two tensors travel, and a third one comes from the side."""

    class Split(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x, y

    class Joined(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Linear(space, 4, hidden)

        def forward(self, x: Tensor, y: Tensor, bias: Tensor, pick: Any) -> Tensor:
            return self.layer(x @ y + bias, pick=pick)

    space = Space()
    hidden = space.integer("hidden", [2, 6])
    chain = Chain(
        Shared(Split(), "split"), Elastic(space, "joined", Joined(), extra_inputs=["bias"]), inputs=["x", "y"]
    )
    return chain, {"x": torch.ones(3, 4), "y": torch.ones(4, 4), "bias": torch.ones(3, 4)}


def deep() -> tuple[Chain, Batch]:
    space = Space()
    outer = space.categorical("outer", ["off", "on"])
    space.categorical("inner", ["a", "b", "c"], when=outer == "on")
    space.integer("size", [2, 3, 5], when=outer == "on")
    return Chain(Elastic(space, "deep", Deep(space)), Shared(nn.Linear(4, 2), "head")), {"x": torch.ones(2, 4)}


def twofold() -> tuple[Chain, Batch]:
    space = Space()
    space.integer("case", [0, 1, 2])
    space.integer("other", [0, 1, 3])
    return Chain(Elastic(space, "layer", Twofold(space))), {"x": torch.ones(2, 4)}


def row() -> tuple[Chain, Batch]:
    """What a part within gives decides what the next block takes."""
    space = Space()
    layer = Row6(space)
    return Chain(Elastic(space, "layer", layer), Elastic(space, "head", Linear(space, space.handle("w5"), 2))), {
        "x": torch.ones(2, 4)
    }


def asking() -> tuple[Chain, Batch]:
    space = Space()
    deep = space.integer("deep", [0, 1, 2])
    space.integer("extra", [3, 4], when=deep > 0)
    half = space.integer("half", [1, 2])
    space.derive("twice", 2 * half)
    return Chain(Elastic(space, "layer", Asking(space))), {"x": torch.ones(2, 4)}


def tied() -> tuple[Chain, Batch]:
    space = Space()
    choice = Choice(space, "a", {"x": nn.Linear(4, 4), "y": nn.Identity()})
    ends = Shared(nn.Linear(4, 4), "first"), Shared(nn.Linear(4, 4), "last")
    return Chain(ends[0], choice, ends[1], tie=[("first.weight", "last.weight")]), {"x": torch.ones(2, 4)}


CHAINS: list[Callable[[], tuple[Chain, Batch]]] = [
    tower, nested, cropped, valued, constrained, sided, deep, asking, tied, twofold, row
]  # fmt: skip


def true_cost(chain: Chain, subnet: Subnet, batch: Batch, metric: str) -> int:
    plain = extract(chain, subnet, batch)
    return parameters(plain) if metric == "parameters" else flops(plain, plain_inputs(chain, subnet, batch))


def probability(mixture: Mixture, subnet: Subnet) -> float:
    options = {name: choice.options or () for name, choice in mixture.space.choices.items()}
    return math.prod(float(mixture[name].detach()[options[name].index(value)]) for name, value in subnet.values.items())


def brute_force(expected: CostModel, mixture: Mixture) -> float:
    """Over all valid subnets, each as likely as its active choices are together."""
    every = list(mixture.space.enumerate())
    chances = [probability(mixture, subnet) for subnet in every]
    return sum(p * expected.of(s) for p, s in zip(chances, every, strict=True)) / sum(chances)


def test_a_width_of_which_both_layers_read_the_size_by_hand() -> None:
    space = Space()
    width = space.integer("width", [2, 5])
    chain = Chain(Elastic(space, "stem", Linear(space, 3, width)), Elastic(space, "head", Linear(space, width, 2)))
    counted = build_cost_model(chain, {"x": torch.ones(7, 3)}, "parameters")
    by_hand = {2: (3 + 1) * 2 + (2 + 1) * 2, 5: (3 + 1) * 5 + (5 + 1) * 2}
    assert {w: counted.of(space.subnet(width=w)) for w in (2, 5)} == by_hand
    mixture = Mixture(space, {"width": torch.tensor([0.25, 0.75])})
    assert counted.expect(mixture).item() == 0.25 * by_hand[2] + 0.75 * by_hand[5]
    assert counted.expect(mixture).dtype == torch.float32
    assert counted.expect(mixture).shape == ()
    assert (counted.low, counted.high, counted.metric) == (14, 32, "parameters")
    products = build_cost_model(chain, {"x": torch.ones(7, 3)}, "flops")
    assert products.of(space.subnet(width=5)) == 2 * 7 * (3 * 5 + 5 * 2)


@pytest.mark.parametrize("metric", ["flops", "latency"])
def test_a_pick_passed_by_position_is_no_input_of_what_is_measured(metric: str) -> None:
    class Biased(Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = Linear(space, 4, hidden), Linear(space, hidden, 4)

        def forward(self, x: Tensor, pick: Any, bias: Tensor) -> Tensor:
            return x @ x.T @ self.down(self.up(x, pick), pick) + bias

    class Calling(Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.biased = Linear(space, 4, hidden), Biased()

        def forward(self, x: Tensor, pick: Any) -> Tensor:
            return self.biased(x, pick, x) + self.up(x, pick).sum()

    space = Space()
    hidden = space.integer("hidden", [2, 6])
    chain = Chain(Elastic(space, "layer", Calling()))
    expected = build_cost_model(chain, {"x": torch.ones(3, 4)}, metric, repeats=1)
    assert expected.low > 0
    if metric == "flops":
        costs = [2 * 3 * (3 * 4 * size + 2 * 3 * 4) for size in (2, 6)]  # three products with the weights, two of x
        assert [expected.of(space.subnet(hidden=size)) for size in (2, 6)] == costs


@pytest.mark.parametrize("make", CHAINS)
@pytest.mark.parametrize("metric", ["parameters", "flops"])
def test_costs_are_those_of_the_extracted_subnets_and_expectations_those_over_all(
    make: Callable[[], tuple[Chain, Batch]], metric: str
) -> None:
    chain, batch = make()
    expected = build_cost_model(chain, batch, metric)
    every = list(chain.space.enumerate())
    rng = generator(0, "some")
    some = every if len(every) <= 12 else [every[int(i)] for i in rng.choice(len(every), 12, replace=False)]
    for subnet in some:
        assert expected.of(subnet) == true_cost(chain, subnet, batch, metric), str(subnet)
        one_hot = expected.expect(Mixture.one_hot(subnet, chain.space))
        assert one_hot.item() == pytest.approx(expected.of(subnet), rel=1e-6)
    for seed in range(2):
        mixture = any_mixture(chain.space, seed)
        assert expected.expect(mixture).item() == pytest.approx(brute_force(expected, mixture), rel=1e-12)
    costs = [expected.of(subnet) for subnet in every]
    assert (expected.low, expected.high) == (min(costs), max(costs))


def test_measuring_leaves_the_chain_as_it_was() -> None:
    chain, batch = tower(1)
    before = {name: tensor.clone() for name, tensor in chain.state_dict().items()}
    chain.train()
    unbuilt = digits_mlp(blocks=1)
    for metric in ("parameters", "flops", "latency"):
        build_cost_model(chain, batch, metric, repeats=1)
        build_cost_model(unbuilt, {"x": torch.ones(1, 1, 8, 8)}, metric, repeats=1)
    assert all(module.training and not module._forward_pre_hooks for module in chain.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in chain.state_dict().items())
    assert all(isinstance(unbuilt.module(name), LazyLayer) for name in unbuilt.layers)


def test_the_gradient_is_that_of_the_expectation() -> None:
    for make in (nested, constrained):
        chain, batch = make()
        expected = build_cost_model(chain, batch, "flops")
        space = chain.space
        rng = generator(1, "logits")
        logits = [
            torch.tensor(rng.normal(size=len(c.options or ())), requires_grad=True) for c in space.choices.values()
        ]

        def cost(*rows: Tensor, space: Space = space, expected: CostModel = expected) -> Tensor:
            chances = {name: row.softmax(0) for name, row in zip(space.choices, rows, strict=True)}
            return expected.expect(Mixture.unchecked(space, chances)) / expected.high

        assert torch.autograd.gradcheck(cost, logits, eps=1e-6, atol=1e-8)


def test_it_travels_as_tables_alone() -> None:
    chain, batch = constrained()
    expected = build_cost_model(chain, batch, "parameters")
    mixture = any_mixture(chain.space, 5)
    expected.expect(mixture)
    written = pickle.dumps(expected)
    assert b"weft.space" not in written
    assert b"weft.supernet" not in written
    again: CostModel = pickle.loads(written)
    assert torch.equal(again.expect(mixture), expected.expect(mixture))
    assert [again.of(s) for s in chain.space.enumerate()] == [expected.of(s) for s in chain.space.enumerate()]


@pytest.mark.parametrize("make", [nested, constrained])
def test_an_expectation_copies_nothing_and_looks_at_no_value_the_second_time(
    make: Callable[[], tuple[Chain, Batch]],
) -> None:
    chain, batch = make()
    expected = build_cost_model(chain, batch, "parameters")
    mixture, again = random_mixture(chain.space), random_mixture(chain.space, 2)
    refused = refusing_values("_to_copy", "copy_", "lift_fresh")
    assert expected.expect(mixture) > 0
    with refused:
        expected.expect(again)


@pytest.mark.parametrize("make", [tower, row])  # a row is taken part by part
def test_a_latency_is_a_sum_of_tables_too(make: Callable[[], tuple[Chain, Batch]]) -> None:
    chain, batch = make()
    expected = build_cost_model(chain, batch, "latency", repeats=1)
    costs = [expected.of(subnet) for subnet in chain.space.enumerate()]
    assert 0 < expected.low <= expected.high
    assert (expected.low, expected.high) == pytest.approx((min(costs), max(costs)))
    mixture = any_mixture(chain.space)
    assert expected.expect(mixture).item() == pytest.approx(brute_force(expected, mixture), rel=1e-9)
    assert make is tower or max(len(table.names) for table in expected.tables) == 2


def test_a_chain_without_choices_costs_what_it_costs() -> None:
    chain = Chain(Shared(nn.Linear(3, 4), "only"))
    expected = build_cost_model(chain, {"x": torch.ones(1, 3)}, "parameters")
    assert expected.of(chain.space.subnet()) == expected.low == expected.high == 16
    assert expected.expect(Mixture.unchecked(chain.space, {})).item() == 16


def test_a_constraint_that_ties_too_many_choices_leaves_bounds() -> None:
    space = Space()
    sizes = [space.integer(f"size{i}", 1, 4) for i in range(8)]  # 4^8 combinations, more than a table may have
    space.require(sum(sizes[1:], sizes[0]) <= 20)
    chain = Chain(*(Elastic(space, f"block{i}", Feed(space, 2, size)) for i, size in enumerate(sizes)))
    batch = {"x": torch.ones(1, 2)}
    expected = build_cost_model(chain, batch, "parameters")
    rng = generator(0, "subnets")
    for _ in range(8):
        subnet = space.sample(rng)
        assert expected.of(subnet) == true_cost(chain, subnet, batch, "parameters")
        assert expected.low <= expected.of(subnet) <= expected.high
    assert expected.low == expected.of(space.first())


def test_what_cannot_be_expected_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, batch = tower(1)
    with pytest.raises(SearchError, match="no metric 'flop' can be expected; did you mean 'flops'"):
        build_cost_model(chain, batch, "flop")
    other, _ = tower(2)
    with pytest.raises(SearchError, match="is of space"):
        build_cost_model(chain, batch, "parameters").of(other.space.first())
    monkeypatch.setattr(cost_measure, "LIMIT", 5)
    with pytest.raises(SearchError, match=r"depend on width, .*combinations, more than 5. Let it depend on fewer"):
        build_cost_model(chain, batch, "parameters")


@pytest.mark.parametrize("missing", ["extra", "half"])
def test_a_module_that_asks_the_pick_for_what_it_does_not_declare_is_refused(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(Asking, "reads", tuple(name for name in Asking.reads if name != missing))
    with pytest.raises(SearchError, match="`reads`"):
        build_cost_model(*asking(), "parameters")


def test_blocks_whose_costs_follow_from_more_than_their_reads_are_refused() -> None:
    space, note = Space(), [0]
    space.integer("case", [0, 1, 2])
    chain = Chain(Elastic(space, "write", Write(note)), Elastic(space, "read", Read(note)))
    for metric in ("parameters", "flops"):
        with pytest.raises(SearchError, match="`reads`"):
            build_cost_model(chain, {"x": torch.ones(2, 4)}, metric)


@st.composite
def random_chains(draw: st.DrawFn) -> tuple[Chain, Batch]:
    space = Space()
    handles = [
        space.integer(f"n{i}", draw(st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True))) for i in range(2)
    ]
    blocks: list[Any] = [Elastic(space, "stem", Linear(space, 2, handles[0]))]
    for index in range(draw(st.integers(1, 3))):
        when = None
        if draw(st.booleans()):
            when = draw(st.sampled_from(handles)) > draw(st.integers(0, 4))
        kind = draw(st.sampled_from(["feed", "choice", "own", "optional"]))
        if kind == "optional":
            blocks.append(Optional(space, f"block{index}", Fitting(2), when=when))
            continue
        if kind == "choice":
            labels = {f"c{n}": nn.Sequential(Fitting(n)) for n in range(draw(st.integers(1, 3)))}
            blocks.append(Choice(space, f"block{index}", labels, when=when))
            continue
        hidden = draw(st.sampled_from(handles)) * draw(st.integers(1, 2))
        if kind == "own":
            hidden = hidden + space.integer(f"h{index}", [1, 2, 4], when=when)
        blocks.append(Elastic(space, f"block{index}", Feed(space, handles[0], hidden), when=when))
    if draw(st.booleans()):
        space.require(handles[0] * handles[1] < draw(st.integers(4, 36)))
    return Chain(*blocks), {"x": torch.ones(2, 2)}


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(random_chains(), st.integers(0, 1000))
def test_any_chain_is_the_sum_of_its_tables(made: tuple[Chain, Batch], seed: int) -> None:
    chain, batch = made
    if not chain.space.size():
        return
    every = list(chain.space.enumerate())
    for metric in ("parameters", "flops"):
        expected = build_cost_model(chain, batch, metric)
        rng = generator(seed, "pick")
        for index in rng.choice(len(every), min(len(every), 6), replace=False):
            assert expected.of(every[int(index)]) == true_cost(chain, every[int(index)], batch, metric)
        mixture = any_mixture(chain.space, seed)
        assert expected.expect(mixture).item() == pytest.approx(brute_force(expected, mixture), rel=1e-12)
        costs = np.array([expected.of(subnet) for subnet in every])
        assert (expected.low, expected.high) == (costs.min(), costs.max())
