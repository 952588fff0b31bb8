"""Search methods: what they ask, and that they find more than chance does."""

from __future__ import annotations

import math

import pytest

from weft.errors import SearchError
from weft.search.front import Scored
from weft.search.loop import run_search
from weft.search.methods import METHODS, NSGA2, Evolution, Method, make_method
from weft.search.objectives import Objective, parse_constraints, parse_objectives
from weft.space import Space, Subnet
from weft.utils import rng

OPTIONS = ["a", "b", "c", "d"]
ONE = parse_objectives("good")
TWO = parse_objectives("good", "cost")


def make_space(blocks: int = 8, options: int = 4) -> Space:
    space = Space()
    for i in range(blocks):
        space.categorical(f"block{i}", OPTIONS[:options])
    return space


def score(subnet: Subnet) -> dict[str, float]:
    """Later options are better with falling gains and dearer; the weight of a block grows with its place."""
    levels = [OPTIONS.index(str(value)) for value in subnet.values.values()]
    weights = range(1, len(levels) + 1)
    return {
        "good": sum(w * math.sqrt(level) for w, level in zip(weights, levels, strict=True)),
        "cost": float(sum(w * level for w, level in zip(reversed(weights), levels, strict=True))),
    }


def answer(subnets: list[Subnet]) -> list[Scored]:
    return [Scored(subnet, score(subnet)) for subnet in subnets]


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_asks_the_same_and_another_seed_something_else(name: str) -> None:
    def asked(seed: int) -> list[Subnet]:
        method = make_method(name, make_space(), TWO, (), seed)
        found: list[Subnet] = []
        for _ in range(6):
            batch = method.ask()
            found += batch
            method.tell(answer(batch))
        return found

    assert asked(3) == asked(3)
    assert asked(3) != asked(4)


@pytest.mark.parametrize("name", METHODS)
def test_no_subnet_is_asked_twice_and_a_small_space_is_asked_to_its_last_one(name: str) -> None:
    space = make_space(blocks=3, options=3)
    method = make_method(name, space, TWO)
    assert isinstance(method, Method)
    found: list[Subnet] = []
    while batch := method.ask():
        found += batch
        method.tell(answer(batch))
    assert len(found) == len(set(found)) == 27
    assert set(found) == set(space.enumerate())


@pytest.mark.parametrize("name", ["evolution", "nsga2"])
@pytest.mark.parametrize("goals", [ONE, TWO], ids=["one objective", "two"])
def test_a_method_finds_more_than_random_with_every_seed(name: str, goals: tuple[Objective, ...]) -> None:
    def volume(method: str, seed: int) -> float:
        result = run_search(make_space(), score, method, goals, budget=200, seed=seed)
        if goals == ONE:
            return result.front.best().scores["good"]
        area, ceiling = 0.0, 109.0  # what the front dominates, strip below strip, up to good = 0 and cost = 109
        for member in result.front:
            area += member.scores["good"] * (ceiling - member.scores["cost"])
            ceiling = member.scores["cost"]
        return area

    seeds = range(3)
    assert min(volume(name, s) for s in seeds) > max(volume("random", s) for s in seeds)


@pytest.mark.parametrize("name", METHODS)
def test_methods_bear_nan_infinities_ties_and_subnets_that_were_not_scored(name: str) -> None:
    space = make_space()
    method = make_method(name, space, TWO, parse_constraints("cost<=20"))
    odd = [{"good": math.nan, "cost": 1.0}, {"good": math.inf, "cost": 1.0}, {"good": 1.0, "cost": 1.0}, {"cost": 30.0}]
    found = 0
    for turn in range(8):
        batch = method.ask()
        found += len(batch)
        told = [Scored(subnet, odd[(i + turn) % 4]) for i, subnet in enumerate(batch)]
        method.tell(told[: len(told) - turn % 2])
    assert found > 32


def test_evolution_breeds_from_the_best_of_its_tournament_and_forgets_the_oldest() -> None:
    space = make_space()
    method = Evolution(space, ONE, seed=0, population=4, sample=4)
    first = method.ask()
    assert len(first) == 4
    method.tell([Scored(subnet, {"good": float(-i)}) for i, subnet in enumerate(first)])
    for _ in range(4):  # the oldest is the best until it leaves
        (child,) = method.ask()
        assert sum(child[name] != first[0][name] for name in child) == 1 or first[0] not in alive(method)
        method.tell([Scored(child, {"good": -10.0})])
    assert not set(first) & set(alive(method))


def alive(method: Evolution) -> list[Subnet]:
    return [one.subnet for one, _ in method._alive]


def test_an_infeasible_child_joins_evolution_only_while_nobody_is_feasible() -> None:
    method = Evolution(make_space(), ONE, parse_constraints("cost<=5"), population=2, sample=2)
    for expected_feasible, cost in [(0, 9.0), (0, 8.0), (0, 7.0), (1, 5.0), (1, 7.0), (2, 4.0)]:
        batch = method.ask()
        method.tell([Scored(batch[0], {"good": 1.0, "cost": cost})])
        assert sum(violation == 0 for _, violation in method._alive) == expected_feasible


@pytest.mark.parametrize(
    ("rules", "rows", "kept"),
    [
        # The ends stay, the dominated one goes; of the middle, (2, 2) has the least room between its neighbours.
        ((), [(1, 1), (2, 2), (2.1, 2.1), (5, 5), (9, 9), (0.5, 9)], [0, 2, 3, 4]),
        (("cost<=5",), [(9, 50), (8, 6), (1, 5), (9, 7)], [1, 2]),
    ],
)
def test_nsga2_keeps_the_feasible_then_the_least_violating_then_the_front_and_of_the_rest_the_least_crowded(
    rules: tuple[str, ...], rows: list[tuple[float, float]], kept: list[int]
) -> None:
    method = NSGA2(make_space(), TWO, parse_constraints(rules), population=len(kept))
    subnets = [make_space().sample(rng.generator(i)) for i in range(len(rows))]
    method.tell([Scored(s, {"good": g, "cost": c}) for s, (g, c) in zip(subnets, rows, strict=True)])
    assert {one.subnet for one in method._alive} == {subnets[place] for place in kept}


def test_children_of_nsga2_without_mutation_are_made_of_their_parents() -> None:
    space = make_space()
    method = NSGA2(space, ONE, population=2, crossover=1.0, mutation=0.0)
    a, b = space.first(), space.last()
    method.tell(answer([a, b]))
    for _ in range(5):
        for child in method.ask():
            assert all(child[name] in (a[name], b[name]) for name in child)


def test_every_asked_subnet_is_valid_in_a_space_with_conditions() -> None:
    space = Space()
    depth = space.categorical("depth", [1, 2, 3])
    for i in range(1, 4):
        space.categorical(f"op{i}", OPTIONS, when=depth >= i)
    result = run_search(space, lambda s: {"good": float(len(s.values))}, "nsga2", ONE, budget=60, seed=1)
    assert all(len(one.subnet.values) == 1 + int(one.subnet["depth"]) for one in result.scored)
    assert result.front.best().scores["good"] == 4


def test_a_space_of_real_choices_is_never_exhausted() -> None:
    space = Space()
    space.real("lr", 0.0, 1.0)
    result = run_search(space, lambda s: {"good": -abs(float(s["lr"]) - 0.3)}, "nsga2", ONE, budget=100, seed=0)
    assert len(result.scored) == 100


def test_unknown_methods_and_impossible_settings_are_refused() -> None:
    space = make_space()
    with pytest.raises(SearchError, match="did you mean 'evolution'"):
        make_method("evolutoin", space, ONE)
    with pytest.raises(SearchError, match="9 of 8"):
        Evolution(space, ONE, population=8, sample=9)
    with pytest.raises(SearchError, match="population >= 2"):
        NSGA2(space, ONE, population=1)
