"""Targets: the pull on a mixture, their text, and the likeliest subnet that meets them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.elastic import Linear, Mixture
from weft.errors import SearchError
from weft.search import discretize
from weft.search.cost_model import CostModel, build_cost_model
from weft.search.cost_table import Table, make_table
from weft.search.discretize import most_probable_subnet
from weft.search.targets import Target, parse_targets
from weft.space import Space, Subnet
from weft.supernet import Chain, Elastic
from weft.utils.rng import generator


def made(space: Space, tables: list[Table], metric: str = "parameters", constant: float = 0.0) -> CostModel:
    """Costs that are written down instead of measured."""
    options = {name: choice.options or () for name, choice in space.choices.items()}
    tables = [*tables, Table((), np.array(constant))]
    loose = CostModel(metric, space.id, options, tables, [None] * len(tables), 0.0, math.inf)
    costs = [loose.of(subnet) for subnet in space.enumerate()] if space.size() <= 1e5 else [0.0, math.inf]
    return CostModel(metric, space.id, options, tables, [None] * len(tables), min(costs), max(costs))


def product_space(choices: int, seed: int, constrained: bool = True) -> tuple[Space, list[CostModel]]:
    """A width, a depth that switches some choices off, and two costs that are sums over the choices."""
    rng = generator(seed, "space")
    space = Space()
    width, depth = space.integer("width", [1, 2, 3]), space.integer("depth", 1, 3)
    for index in range(choices):
        count = int(rng.integers(2, 5))
        space.integer(f"size{index}", 1, count, when=depth > index % 3 if index % 2 else None)
    if constrained:
        space.require(width * space.handle("size0") <= 4)
    found = []
    for metric in ("parameters", "flops"):
        tables = []
        for index in range(choices):
            price, bend = 10 + 100 * float(rng.random()), float(rng.random()) * 3

            def cost(
                values: dict[str, object], name: str = f"size{index}", price: float = price, bend: float = bend
            ) -> float:
                size = values.get(name)
                return price * int(values["width"]) * int(size) ** bend if size else 0.0  # type: ignore[call-overload, no-any-return]

            tables.append(make_table(space.rules, ["width", f"size{index}"], cost))  # type: ignore[arg-type]
        found.append(made(space, tables, metric, 50.0))
    return space, found


def random_mixture(space: Space, seed: int, sharp: float = 1.5) -> Mixture:
    rng = generator(seed, "mixture")
    rows = {
        name: torch.tensor(rng.normal(size=len(choice.options or ())) * sharp).softmax(0)
        for name, choice in space.choices.items()
    }
    return Mixture(space, rows)


def log_probability(mixture: Mixture, subnet: Subnet) -> float:
    """How likely a subnet is beside the likeliest options, a choice that is switched off being as good as settled."""
    options = {name: choice.options or () for name, choice in mixture.space.choices.items()}
    chances = {name: mixture[name] / mixture[name].max() for name in subnet.values}
    return sum(math.log(float(chances[name][options[name].index(value)])) for name, value in subnet.values.items())


def best_by_hand(mixture: Mixture, targets: list[Target], tolerance: float = 0.02) -> float | None:
    """The highest log-probability of a valid subnet within the tolerance of every target."""
    fitting = [
        log_probability(mixture, subnet)
        for subnet in mixture.space.enumerate()
        if all(abs(target.expected.of(subnet) / target.value - 1) <= tolerance for target in targets)
    ]
    return max(fitting, default=None)


def sized() -> tuple[Space, CostModel]:
    """One size, which is what a subnet costs."""
    space = Space()
    space.integer("size", [100, 200])
    return space, made(space, [make_table(space.rules, ["size"], lambda values: float(values["size"]))])


def widths() -> tuple[Space, Chain, dict[str, torch.Tensor]]:
    space = Space()
    sizes = [space.integer(f"width{i}", [2, 4, 8, 16]) for i in range(2)]
    dims = [3, *sizes, 2]
    blocks = [Elastic(space, f"block{i}", Linear(space, dims[i], dims[i + 1])) for i in range(3)]
    return space, Chain(*blocks), {"x": torch.ones(1, 3)}


# -- the pull


def test_the_penalty_grows_with_the_distance_and_vanishes_at_the_target() -> None:
    space, expected = sized()

    def at(share: float, value: float = 150.0) -> float:
        mixture = Mixture(space, {"size": torch.tensor([1 - share, share], dtype=torch.float64)})
        return Target(expected, value, weight=3.0).penalty(mixture).item()

    assert at(0.5) == 0
    assert at(0.8) == pytest.approx(3 * (math.hypot(30 / 150, 0.02) - 0.02))
    assert at(0.2) == pytest.approx(at(0.8))
    values = [at(share) for share in (0.5, 0.51, 0.6, 0.8, 1.0)]
    assert values == sorted(values)


@pytest.mark.parametrize(
    ("share", "weight", "slope"),
    [(0.05, 1.0, 0.0), (0.95, 1.0, 0.0), (0.4, 4.0, 1.0)],  # the last: a loss that wants the largest gives way
)
def test_descending_the_penalty_brings_the_expected_cost_to_the_target(
    share: float, weight: float, slope: float
) -> None:
    """Pulled by a square, a loss of fixed slope would end well above the target."""
    space, chain, batch = widths()
    expected = build_cost_model(chain, batch, "parameters")
    target = Target(expected, expected.low + share * (expected.high - expected.low), weight)
    logits = {name: torch.zeros(4, requires_grad=True) for name in space.choices}
    adam = torch.optim.Adam(logits.values(), lr=0.05 if slope else 0.1)

    def mixture() -> Mixture:
        return Mixture.unchecked(space, {name: row.softmax(0) for name, row in logits.items()})

    for _ in range(250 if slope else 150):
        adam.zero_grad()
        (target.penalty(mixture()) - slope * expected.expect(mixture()) / expected.high).backward()
        adam.step()
    assert expected.expect(mixture()).item() == pytest.approx(target.value, rel=0.03 if slope else 0.02)


# -- their text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (" parameters = 5M ", [("parameters", 5e6)]),
        ("latency=1500us", [("latency", 1.5)]),
        ("parameters=5e6, flops=1G", [("parameters", 5e6), ("flops", 1e9)]),
        (["parameters=5e6", "flops=1e9"], [("parameters", 5e6), ("flops", 1e9)]),
        ([], []),
    ],
)
def test_targets_are_read_from_text(text: str | list[str], wanted: list[tuple[str, float]]) -> None:
    targets = parse_targets(text, lambda name: CostModel(name, "space", {}, [], [], 0.0, 1e12))
    assert [(target.expected.metric, target.value) for target in targets] == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parameters<=5", "cannot read target 'parameters<=5'; write a metric, '=' and a number"),
        ("flop=5", "no target can be set for 'flop'; did you mean 'flops'"),
        ("accuracy=0.9", "no target can be set for 'accuracy'; known: flops, latency, parameters"),
        ("parameters=5ms", "unknown unit 'ms'; units of parameters: k, K, M, G, B"),
        ("flops=1.2.3", "cannot read target 'flops=1.2.3'"),
        ("flops=-3", "must be a number above 0"),
        ("flops=5,flops=6", "two targets for flops"),
        ("flops=2e12", "no architecture meets"),
        ("flops=9", r"no architecture meets flops=9 \(the reachable range is 10 to 1000\)"),
    ],
)
def test_targets_that_cannot_be_read_or_met_are_refused(text: str, message: str) -> None:
    with pytest.raises(SearchError, match=message):
        parse_targets(text, lambda name: CostModel(name, "space", {}, [], [], 10.0, 1000.0))


# -- the pick


def test_without_targets_the_likeliest_valid_subnet_is_picked() -> None:
    space = Space()
    a, b = space.integer("a", [1, 2]), space.integer("b", [1, 2])
    space.require(a + b < 4)
    mixture = Mixture(space, {"a": torch.tensor([0.3, 0.7]), "b": torch.tensor([0.4, 0.6])})
    # The two likeliest options together are forbidden; .7 * .4 is more than .3 * .6.
    assert most_probable_subnet(mixture) == space.subnet(a=2, b=1)


def test_a_deeper_subnet_is_not_less_likely_for_the_choices_that_it_has_more() -> None:
    space = Space()
    depth = space.integer("depth", [1, 2])
    for index in range(3):
        space.integer(f"x{index}", [0, 1, 2], when=depth > 1)
    mixture = Mixture.uniform(space)
    mixture = Mixture(space, {**{n: mixture[n] for n in mixture.names}, "depth": torch.tensor([0.4, 0.6])})
    # As a plain product, .4 alone would be more than .6 * (1/3)^3.
    assert most_probable_subnet(mixture) == space.subnet(depth=2, x0=0, x1=0, x2=0)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 1), st.sampled_from([0.02, 0.1]), st.booleans())
def test_the_pick_is_the_best_of_all(seed: int, share: float, tolerance: float, two: bool) -> None:
    space, costs = product_space(4, seed % 20)
    mixture = random_mixture(space, seed)
    every = list(space.enumerate())
    wanted = every[int(share * (len(every) - 1))]
    targets = [Target(cost, cost.of(wanted) * 1.01) for cost in (costs if two else costs[:1])]
    picked = most_probable_subnet(mixture, targets, tolerance)
    assert all(abs(t.expected.of(picked) / t.value - 1) <= tolerance for t in targets)
    assert log_probability(mixture, picked) == pytest.approx(best_by_hand(mixture, targets, tolerance))
    assert log_probability(mixture, most_probable_subnet(mixture)) == pytest.approx(best_by_hand(mixture, []))


@pytest.mark.parametrize("goals", [0, 1, 2])
def test_the_search_of_large_spaces_finds_the_best_of_small_ones(goals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discretize, "EXACT", 0)
    for seed in range(6):
        space, costs = product_space(5, seed)
        mixture = random_mixture(space, seed)
        wanted = space.sample(generator(seed, "wanted"))
        targets = [Target(cost, cost.of(wanted) * 1.005) for cost in costs[:goals]]
        picked = most_probable_subnet(mixture, targets, 0.01)
        assert all(abs(t.expected.of(picked) / t.value - 1) <= 0.01 for t in targets)
        assert log_probability(mixture, picked) == pytest.approx(best_by_hand(mixture, targets, 0.01))


def test_a_space_with_more_subnets_than_can_be_counted_is_searched() -> None:
    space, costs = product_space(40, 1)
    mixture = random_mixture(space, 1)
    drawn = [space.sample(generator(index, "drawn")) for index in range(2)]
    free = log_probability(mixture, most_probable_subnet(mixture))
    for wanted in drawn:
        targets = [Target(cost, cost.of(wanted)) for cost in costs]
        picked = most_probable_subnet(mixture, targets)
        assert all(abs(t.expected.of(picked) / t.value - 1) <= 0.02 for t in targets)
        assert free >= log_probability(mixture, picked) > log_probability(mixture, wanted) + 10
        assert most_probable_subnet(mixture, targets) == picked


def test_without_targets_large_spaces_are_settled_exactly() -> None:
    space, _ = product_space(60, 2, constrained=False)
    mixture = random_mixture(space, 2)
    best = {name: space.choices[name].options[int(mixture[name].argmax())] for name in space.choices}
    assert dict(most_probable_subnet(mixture).values) == best
    assert log_probability(mixture, most_probable_subnet(mixture)) == 0.0


def test_constraints_over_very_many_choices_hold_in_the_pick() -> None:
    space = Space()
    sizes = [space.integer(f"size{i}", 1, 4) for i in range(12)]
    space.require(sum(sizes[1:], sizes[0]) <= 24)
    expected = made(space, [make_table(space.rules, [n], lambda v, n=n: 7.0 * int(v[n]) ** 2) for n in space.choices])  # type: ignore[misc]
    mixture = Mixture(space, {name: torch.tensor([0.1, 0.2, 0.3, 0.4]) for name in space.choices})
    for targets in ([], [Target(expected, 7.0 * 50)]):
        picked = most_probable_subnet(mixture, targets)
        assert sum(int(value) for value in picked.values.values()) <= 24
        assert all(abs(t.expected.of(picked) / t.value - 1) <= 0.02 for t in targets)


def test_the_nearest_is_named_where_no_subnet_meets_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    space, expected = sized()
    for exact in (discretize.EXACT, 0):
        monkeypatch.setattr(discretize, "EXACT", exact)
        with pytest.raises(SearchError, match="within 2% of parameters=170; the nearest has parameters=200"):
            most_probable_subnet(Mixture.uniform(space), [Target(expected, 170.0)])
        assert most_probable_subnet(Mixture.uniform(space), [Target(expected, 170.0)], tolerance=0.2)["size"] == 200


def test_an_option_without_any_probability_is_taken_where_the_target_needs_it() -> None:
    space, expected = sized()
    mixture = Mixture(space, {"size": torch.tensor([1.0, 0.0])})
    assert most_probable_subnet(mixture)["size"] == 100
    for value in (200.0, 203.0):  # what is out of the range by less than the tolerance can be met
        assert most_probable_subnet(mixture, [Target(expected, value)])["size"] == 200


def test_targets_of_another_space_are_refused() -> None:
    first, costs = product_space(3, 0)
    other, _ = product_space(4, 0)
    with pytest.raises(SearchError, match="measured on another space"):
        most_probable_subnet(random_mixture(other, 0), [Target(costs[0], costs[0].of(first.first()))])
    with pytest.raises(SearchError, match="has no choices"):
        most_probable_subnet(Mixture.unchecked(Space(), {}))
