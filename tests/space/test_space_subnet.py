"""Subnets: immutable, comparable, and with ids that do not depend on the process."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import SpaceError
from weft.space import Space, Subnet


def example() -> Space:
    space = Space()
    stem = space.integer("stem", [16, 32])
    deep = space.categorical("deep", [False, True])
    space.categorical("block.0", ["conv3", "conv5"])
    block1 = space.categorical("block.1", ["conv3", "skip"], when=deep)
    space.real("lr", 1e-4, 1.0, log=True)
    space.derive("hidden", stem * 4)
    space.derive("is_skip", block1 == "skip")
    return space


def shallow(space: Space) -> Subnet:
    return space.subnet({"block.0": "conv5"}, stem=16, deep=False, lr=0.1)


def deep(space: Space) -> Subnet:
    return space.subnet({"block.0": "conv5", "block.1": "skip"}, stem=16, deep=True, lr=0.1)


def test_a_subnet_reads_active_choices_and_derived_dimensions():
    subnet = deep(example())
    assert subnet["stem"] == 16
    assert subnet["hidden"] == 64
    assert subnet["is_skip"] is True
    assert dict(subnet.values) == {"stem": 16, "deep": True, "block.0": "conv5", "block.1": "skip", "lr": 0.1}
    assert list(subnet) == ["stem", "deep", "block.0", "block.1", "lr"]
    assert str(subnet) == "stem=16 deep=True block.0=conv5 block.1=skip lr=0.1"


def test_what_is_inactive_is_absent_and_so_is_what_derives_from_it():
    subnet = shallow(example())
    assert [name in subnet for name in ("block.1", "is_skip", "hidden")] == [False, False, True]
    assert (subnet.get("is_skip"), subnet.get("block.1", "none"), subnet.get("stem")) == (None, "none", 16)
    with pytest.raises(SpaceError, match=r"'block\.1' is inactive"):
        subnet["block.1"]
    with pytest.raises(SpaceError, match=r"unknown name 'sten'; did you mean 'stem'\?"):
        subnet["sten"]


def test_a_subnet_cannot_be_changed():
    subnet = shallow(example())
    for change in (
        lambda: setattr(subnet, "stem", 1),
        lambda: setattr(subnet, "_values", {}),
        lambda: delattr(subnet, "_values"),
        lambda: subnet.values.update(stem=32),
    ):
        with pytest.raises(AttributeError):
            change()
    with pytest.raises(TypeError):
        subnet.values["stem"] = 32


def test_json_and_pickle_keep_a_subnet():
    space = example()
    for subnet in (shallow(space), deep(space)):
        assert space.load_subnet(json.loads(json.dumps(subnet.to_json()))) == subnet
        again = pickle.loads(pickle.dumps(subnet))
        assert again == subnet
        assert again["hidden"] == 64
    one, two = shallow(example()), shallow(example())  # of equal spaces
    assert (one, hash(one), one.id) == (two, hash(two), two.id)
    more = example()
    more.categorical("more", ["x"])
    for other in (deep(example()), "stem=16", more.subnet({**one.values, "more": "x"})):
        assert one != other


@pytest.mark.parametrize(
    "data", [None, [], {}, {"space": "x", "values": 1}, {"space": "x", "values": {}, "more": 1}], ids=str
)
def test_what_is_no_subnet_of_the_space_is_not_loaded(data):
    with pytest.raises(SpaceError, match="a subnet is written"):
        example().load_subnet(data)
    with pytest.raises(SpaceError, match="is of space ffff, not of this one"):
        example().load_subnet({"space": "ffff", "values": {}})


PRINT_IDS = """
from weft.space import Space, make_stream
one, two = Space(), Space()
a = one.integer("a", [1, 2])
one.categorical("b", ["x", "y"], when=a > 1)
one.real("r", 0, 1)
one.require((a != 1) | (a == 1))
for number in range(4):
    two.integer(f"c{number}", 0, 9)
print(one.id, one.subnet(a=2, b="y", r=0.1).id)
for kind in ("iid", "fair", "spaced"):
    print(make_stream(two, kind, 3)[1234][0].id)
"""


def test_ids_are_the_same_in_a_process_that_hashes_otherwise(capsys):
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", PRINT_IDS], env=environment, capture_output=True, text=True, check=True
    )
    exec(PRINT_IDS, {})
    assert done.stdout == capsys.readouterr().out
    words = done.stdout.split()
    assert len(set(words)) == 5
    assert all(len(word) == 16 and int(word, 16) >= 0 for word in words)


@given(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0))
def test_ids_differ_exactly_where_values_do(one, two):
    space = example()
    a, b = (space.subnet({"block.0": "conv3"}, stem=16, deep=False, lr=lr) for lr in (one, two))
    assert (a.id == b.id) == (a == b) == (one == two)
