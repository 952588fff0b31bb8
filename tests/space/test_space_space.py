"""Spaces: what they refuse, what they count, and where moves over them lead."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter as Tally

import pytest
from expression_trees import built, computed, nested
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.errors import SpaceError
from weft.space import Expr, Space, counting
from weft.utils.rng import generator

# A space as plain data, so that the oracle below shares nothing with the code under test: names with their options,
# condition and derived expression as trees over the names before them.


def trees(names: list[str]) -> st.SearchStrategy:
    leaves = st.sampled_from(names) | st.integers(0, 3) if names else st.integers(0, 3)
    return nested(leaves, ("!=", "&", "*", "+", "<", "==", "|"), max_leaves=4)


@st.composite
def plans(draw) -> tuple[list, list]:
    names, entries = [], []
    for number in range(draw(st.integers(1, 6))):
        name = f"n{number}"
        if names and draw(st.integers(0, 4)) == 0:
            entries.append((name, None, draw(trees(names))))
        else:
            options = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True))
            entries.append((name, options, draw(st.none() | trees(names)) if names else None))
        names.append(name)
    return entries, draw(st.lists(trees(names), max_size=2))


def build(plan) -> Space:
    entries, required = plan
    space = Space()
    for name, options, tree in entries:
        if options is None:
            space.derive(name, built(tree))
        else:
            space.categorical(name, options, when=None if tree is None else built(tree))
    for tree in required:
        space.require(built(tree))
    return space


def oracle(plan) -> list[dict]:
    """All valid assignments of choices by going through every combination of options and 'inactive'."""
    entries, required = plan
    free = [(name, options) for name, options, _ in entries if options is not None]
    found = []
    for combination in itertools.product(*[[*options, None] for _, options in free]):
        values = {name: value for (name, _), value in zip(free, combination, strict=True) if value is not None}
        everything = {}
        for name, options, tree in entries:
            if options is None:
                everything[name] = computed(tree, everything)
            else:
                active = tree is None or bool(computed(tree, everything))
                if active != (name in values):
                    break
                everything[name] = values.get(name)
        else:
            if all(computed(tree, everything) in (None, True) or computed(tree, everything) for tree in required):
                found.append(values)
    return found


def test_a_space_by_hand():
    space = Space()
    depth = space.integer("depth", 1, 2)
    space.categorical("first", ["a", "b"])
    second = space.categorical("second", ["a", "b"], when=depth == 2)
    space.require(second != "b", "b is for the first block")
    assert space.size() == 4
    assert [str(subnet) for subnet in space.enumerate()] == [
        "depth=1 first=a",
        "depth=1 first=b",
        "depth=2 first=a second=a",
        "depth=2 first=b second=a",
    ]
    assert str(space.first()) == "depth=1 first=a"
    assert str(space.last()) == "depth=2 first=b second=a"
    assert [str(n) for n in space.neighbours(space.first())] == ["depth=2 first=a second=a", "depth=1 first=b"]
    assert list(space.choices) == ["depth", "first", "second"]
    assert list(space.conditions) == ["second"]


def test_a_subnet_is_checked_when_it_is_made():
    space = Space()
    depth = space.integer("depth", 1, 2)
    width = space.integer("width", [16, 32], when=depth == 2)
    space.derive("cost", depth * width)
    space.require(space.handle("cost") <= 32, "too wide")
    for values, message in [
        ({}, "choice 'depth' has no value; options: 1, 2"),
        ({"depht": 1}, "unknown choice 'depht'; did you mean 'depth'?"),
        ({"depth": 3}, "choice 'depth': 3 is not an option; options: 1, 2"),
        ({"depth": True}, "True is not an option"),
        ({"depth": 2}, "choice 'width' has no value"),
        ({"depth": 1, "width": 16}, "choice 'width' is inactive here, since 'depth == 2' is false; leave it out"),
        ({"depth": 1, "cost": 3}, r"'cost' is derived from 'depth \* width'; leave it out"),
        ({"depth": 2, "width": 16, "cost": 3}, r"'cost' is derived from 'depth \* width'; leave it out"),
        ({"depth": 2, "width": 32}, r"the constraint 'cost <= 32' \(too wide\) does not hold with cost=64"),
    ]:
        with pytest.raises(SpaceError, match=message):
            space.subnet(values)
    with pytest.raises(SpaceError, match="'depth' is given twice"):
        space.subnet({"depth": 1}, depth=1)
    assert dict(space.subnet(depth=2, width=16).values) == {"depth": 2, "width": 16}
    assert space.subnet(depth=2, width=16, cost=32) == space.subnet(depth=2, width=16)
    ids = {space.id}
    space.derive("half", width / 2)
    ids.add(space.id)
    space.require(depth < 3)
    assert len({*ids, space.id}) == 3  # every addition changes the id


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: s.categorical("a", ["y"]), "the name 'a' is taken"),
        (lambda s: s.derive("a", Expr.of(1)), "the name 'a' is taken"),
        (lambda s: s.categorical("", ["y"]), "'' is no name"),
        (lambda s: s.categorical("b\n", ["y"]), "is no name"),
        (lambda s: s.categorical("b", "xy"), "a list or tuple, not a str"),
        (lambda s: s.categorical("b", {"x", "y"}), "a list or tuple, not a set"),
        (lambda s: s.integer("b", 3, 2), "low <= high"),
        (lambda s: s.integer("b", 3), "low <= high"),
        (lambda s: s.integer("b", 1, 2, 0), "step >= 1"),
        (lambda s: s.integer("b", [1, 2], 3), "either a list of values, or low"),
        (lambda s: s.integer("b", 0, 10**9), "use a step, or a real choice"),
        (lambda s: s.categorical("b", ["y"], when=Expr.variable("b") == "y"), "the condition of 'b' reads 'b'"),
        (lambda s: s.categorical("b", ["y"], when=Expr.variable("c") == "y"), "reads 'c', which is not defined before"),
        (lambda s: s.derive("b", Expr.variable("c") + 1), "the derived 'b' reads 'c'"),
        (lambda s: s.require(Expr.variable("aa") == "x"), "a constraint reads 'aa', .*; did you mean 'a'?"),
        (lambda s: s.require(True), "already a plain bool"),
        (lambda s: s.handle("b"), "unknown name 'b'"),
    ],
)
def test_what_a_space_cannot_hold_is_refused_and_leaves_it_as_it_was(make, message):
    space = Space()
    space.categorical("a", ["x", "y"])
    before = space.to_json()
    with pytest.raises(SpaceError, match=message):
        make(space)
    assert space.to_json() == before


def test_a_condition_that_reads_something_inactive_is_false_even_under_not():
    space = Space()
    a = space.categorical("a", [0, 1])
    b = space.categorical("b", [0, 1], when=a == 1)
    space.categorical("c", ["x", "y"], when=~(b == 1))
    assert [dict(subnet.values) for subnet in space.enumerate()] == [
        {"a": 0},
        {"a": 1, "b": 0, "c": "x"},
        {"a": 1, "b": 0, "c": "y"},
        {"a": 1, "b": 1},
    ]


@pytest.mark.parametrize("use", [lambda space: space.sample(generator(0)), Space.enumerate, Space.first, Space.last])
def test_an_empty_space_says_which_constraint_empties_it(use):
    space = Space()
    space.require(space.integer("a", 1, 3) > 5, "large enough")
    assert space.size() == 0
    with pytest.raises(SpaceError, match=r"no subnet satisfies 'a > 5' \(large enough\)"):
        use(space)
    with pytest.raises(SpaceError, match="it has no choices"):
        use(Space())
    assert dict(Space().subnet().values) == {}


def test_choices_tied_through_depth_chains_of_conditions_and_bounded_sums_are_counted_at_once():
    space = Space()
    depth = space.integer("depth", [10, 12, 14])
    for block in range(14):
        space.categorical(f"b{block}", list(range(9)), when=depth > block)
    assert space.size() == 9**10 + 9**12 + 9**14
    with pytest.raises(SpaceError, match="holds 23,162,708,775,843 subnets, more than the limit of 100,000"):
        space.enumerate()
    chain = Space()
    last = chain.categorical("x0", ["go", "on", "stop"])
    for number in range(1, 60):
        last = chain.categorical(f"x{number}", ["go", "on", "stop"], when=last != "stop")
    assert chain.size() == sum(2**number for number in range(60)) + 2**60
    bounded = Space()
    bounded.require(sum((bounded.integer(f"x{number}", 0, 1) for number in range(60)), Expr.of(0)) == 7)
    assert bounded.size() == math.comb(60, 7)


def test_a_count_that_would_not_end_is_given_up_with_the_reason(monkeypatch):
    monkeypatch.setattr(counting, "MAX_CASES", 1000)
    space = Space()
    parts = [space.integer(f"x{number}", 0, 9) for number in range(12)]
    space.require(sum((part * 31**at for at, part in enumerate(parts)), Expr.of(0)) % 97 == 1, "hash")
    with pytest.raises(SpaceError, match=r"more than 1,000 cases; .*\(hash\) ties 12 choices together"):
        space.size()
    assert space.contains(space.sample(generator(0)))


def test_real_choices_make_a_space_endless_where_they_can_be_active():
    space = Space()
    tuned = space.categorical("tuned", [False, True])
    rate = space.real("rate", 0.1, 1.0, when=tuned)
    space.categorical("fast", [1, 2, 3], when=rate > 0.5)
    assert space.size() == math.inf
    with pytest.raises(SpaceError, match="endless"):
        space.enumerate()
    space.require(rate >= 0.2)
    assert space.last()["rate"] == 1.0
    assert all(subnet.get("rate", 1.0) >= 0.2 for subnet in (space.sample(generator(i)) for i in range(50)))
    space.require(~tuned)
    assert space.size() == 1


def test_a_sample_is_found_where_few_exist_and_all_of_them_are_equally_likely():
    space = Space()
    parts = [space.integer(f"x{number}", 0, 9) for number in range(8)]
    space.require(sum(parts[1:], parts[0]) == 1)
    drawn = Tally(space.sample(generator("rare", number)).id for number in range(240))
    assert len(drawn) == 8
    assert sum((count - 30) ** 2 / 30 for count in drawn.values()) < 24.3  # 99.9 % with 7 degrees of freedom


def test_subnets_of_another_space_are_refused():
    space, other = Space(), Space()
    space.categorical("a", [1, 2])
    other.categorical("a", [1, 2, 3])
    subnet = other.subnet(a=1)
    assert other.contains(subnet)
    assert not space.contains(subnet)
    space.categorical("b", [1])  # every addition makes it another space
    for wrong in (subnet, Space.from_json(other.to_json()).subnet(a=1)):
        for use in (
            lambda wrong=wrong: space.check(wrong),
            lambda wrong=wrong: space.neighbours(wrong),
            lambda wrong=wrong: space.mutate(wrong, generator(0)),
            lambda wrong=wrong: space.crossover(space.first(), wrong, generator(0)),
        ):
            with pytest.raises(SpaceError, match="not of this one"):
                use()
    with pytest.raises(SpaceError, match="is no subnet"):
        space.check({"a": 1})


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(format=2),
        lambda d: d.update(more=1),
        lambda d: d["names"].append(3),
        lambda d: d["names"].append({"name": "c"}),
        lambda d: d["names"][0].update(kind="other"),
        lambda d: d["names"][0].update(extra=1),
        lambda d: d["names"][0].pop("options"),
        lambda d: d["names"].append({"name": "c", "kind": "integers", "values": [1], "ordered": 1, "when": None}),
        lambda d: d["names"].append({"name": "c", "kind": "floats", "low": True, "high": 2, "log": False}),
        lambda d: d["names"].reverse(),
        lambda d: d["names"].append(d["names"][0]),
        lambda d: d["require"].append({"expr": [["name", "zz"]], "message": ""}),
    ],
)
def test_malformed_json_is_no_space(change):
    space = Space()
    a = space.categorical("a", [1, 2])
    space.categorical("b", [1, 2], when=a == 1)
    data = json.loads(json.dumps(space.to_json()))
    change(data)
    with pytest.raises(SpaceError):
        Space.from_json(data)


laws = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@laws
@given(plans())
def test_size_and_enumeration_agree_with_going_through_everything(plan):
    space, expected = build(plan), oracle(plan)
    if all(options is None for _, options, _ in plan[0]):
        return
    assert space.size() == len(expected)
    if not expected:
        with pytest.raises(SpaceError, match="empty"):
            space.enumerate()
        with pytest.raises(SpaceError, match="empty"):
            space.sample(generator(0))
        return
    subnets = list(space.enumerate())
    assert sorted(map(repr, (dict(s.values) for s in subnets))) == sorted(map(repr, expected))
    assert space.first() == subnets[0]
    assert space.last() == subnets[-1]
    places = {name: options for name, options, _ in plan[0] if options is not None}
    keys = [[places[n].index(s[n]) if n in s.values else -1 for n in places] for s in subnets]
    assert keys == sorted(keys)


@laws
@given(plans(), st.integers(0, 2**32))
def test_moves_stay_in_the_space(plan, seed):
    space, expected = build(plan), oracle(plan)
    if not expected:
        return
    rng = generator(seed)
    parent, other = space.sample(rng), space.sample(rng)

    def check(subnet):
        assert dict(subnet.values) in expected
        assert space.subnet(subnet.values) == subnet

    check(parent)
    for probability in (None, 0.0, 0.5, 1.0):
        child = space.mutate(parent, rng, probability)
        check(child)
        assert (child != parent) == (len(expected) > 1)
    child = space.crossover(parent, other, rng)
    check(child)
    for name, value in child.values.items():  # from one of the parents, if one has it
        assert value in {p.values[name] for p in (parent, other) if name in p.values} or name not in {*parent, *other}
    near = space.neighbours(parent)
    assert len(set(near)) == len(near)
    assert parent not in near
    for subnet in near:
        check(subnet)
        assert any(parent.values[name] != subnet.values.get(name) for name in parent.values)


@laws
@given(plans(), st.integers(0, 2**32))
def test_json_keeps_a_space_and_its_subnets(plan, seed):
    space = build(plan)
    again = Space.from_json(json.loads(json.dumps(space.to_json())))
    assert again.id == space.id
    assert again.to_json() == space.to_json()
    if space.choices and space.size():
        subnet = space.sample(generator(seed))
        loaded = again.load_subnet(json.loads(json.dumps(subnet.to_json())))
        assert loaded == subnet
        assert loaded.id == subnet.id
        for name, options, tree in plan[0]:
            if options is None:
                assert loaded.get(name) == computed(tree, {n: loaded.get(n) for n, _, _ in plan[0]})


@laws
@given(plans(), st.integers(0, 2**32))
def test_neighbours_are_all_valid_subnets_that_differ_in_one_choice_of_an_unconditional_space(plan, seed):
    entries, required = plan
    entries = [(name, options, None if options is not None else tree) for name, options, tree in entries]
    expected = oracle((entries, required))
    if not expected:
        return
    space = build((entries, required))
    parent = space.sample(generator(seed))
    near = [v for v in expected if sum(v[name] != parent[name] for name in v) == 1]
    assert sorted(map(repr, (dict(s.values) for s in space.neighbours(parent)))) == sorted(map(repr, near))


def test_a_mutation_without_luck_still_changes_one_choice():
    space = Space()
    for number in range(6):
        space.integer(f"x{number}", 0, 9)
    parent = space.first()
    for seed in range(50):
        child = space.mutate(parent, generator(seed), probability=0.0)
        assert sum(child[name] != parent[name] for name in parent) == 1
        everything = space.mutate(parent, generator(seed), probability=1.0)
        assert all(everything[name] != parent[name] for name in parent)
    with pytest.raises(SpaceError, match="between 0 and 1"):
        space.mutate(parent, generator(0), probability=2.0)


def test_a_mutation_reaches_a_subnet_that_no_single_change_reaches_and_else_stays_near():
    space = Space()
    parts = [space.integer(f"x{number}", 0, 9) for number in range(5)]
    for left, right in itertools.pairwise(parts):
        space.require(left == right)
    space.require((parts[0] == 0) | (parts[0] == 9))
    assert space.mutate(space.first(), generator(0)) == space.last()
    wide = Space()
    x = wide.integer("x", 0, 999)
    wide.require((x <= 1) | (x == 500))
    children = Tally(wide.mutate(wide.first(), generator(seed))["x"] for seed in range(30))
    assert children[1] + children[500] == 30
    assert children[1] > 20  # luck finds either within 64 tries in one case of eight, else the neighbour is taken
