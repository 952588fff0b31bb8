"""Streams: pure functions of seed and step, and clear about what they cannot do."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import re
from collections import Counter as Tally
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import SpaceError, StreamError
from weft.space import Fair, Fixed, FromFile, Iid, Sandwich, Shrinking, Space, Spaced, make_stream
from weft.space.permutation_streams import bits_per_step
from weft.utils.rng import generator


def blocks(*counts: int) -> Space:
    space = Space()
    for number, count in enumerate(counts):
        space.integer(f"b{number}", 0, count - 1)
    return space


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_iid_draws_each_step_from_a_generator_of_its_own():
    space = blocks(4, 4)
    stream = make_stream(space, "iid", 7)
    assert stream[5] == (space.sample(generator(7, "iid", 5)),)
    assert len({stream[i] for i in range(100)}) == 16
    assert stream.bits == 4
    assert stream.microbatches is None


def test_fair_uses_every_option_once_a_round():
    stream = make_stream(blocks(3, 5), "fair", 0)
    steps = [stream[i][0] for i in range(150)]
    for name, count in (("b0", 3), ("b1", 5)):
        for start in range(0, 150, count):
            assert sorted(step[name] for step in steps[start : start + count]) == list(range(count))
    assert len({tuple(step["b1"] for step in steps[at : at + 5]) for at in range(0, 150, 5)}) > 15
    assert stream.bits == pytest.approx(math.log2(6) / 3 + math.log2(120) / 5)


def test_fair_choices_are_independent_of_each_other():
    stream = make_stream(blocks(4, 4), "fair", 3)
    pairs = Tally((stream[i][0]["b0"], stream[i][0]["b1"]) for i in range(1600))
    assert len(pairs) == 16
    assert sum((count - 100) ** 2 / 100 for count in pairs.values()) < 37.7  # 99.9 % with 15 degrees of freedom


def test_the_default_spacing_is_three_quarters_of_the_smallest_choice_unless_that_leaves_too_little_freedom():
    spacings = {(9, 20, 1): 6, (8, 12, 1): 6, (4, 4, 4, 4): 3, (2, 2, 2, 2): 1, (4,): 2}
    assert {counts: make_stream(blocks(*counts), "spaced").spacing for counts in spacings} == spacings
    steps = [subnet for (subnet,) in itertools.islice(make_stream(blocks(8, 12, 1), "spaced", 1), 3000)]
    assert len(set(steps)) > 90  # of 96
    pairs = zip(steps, steps[6:], strict=False)
    assert any(one["b0"] == other["b0"] for one, other in pairs)  # no further apart than they must be


@pytest.mark.parametrize(
    ("counts", "spacing", "message"),
    [
        ((4, 9), 5, "spacing 5 is impossible: the smallest choice has 4 options; at most 4 here"),
        ((6, 6), 6, "spacing 6 leaves 0.00 bits of freedom a step over all choices, less than 1; at most 5 here"),
        ((4,), 4, "leaves 0.00 bits .* at most 2 here"),
        ((6, 6), 0, "a spacing is an integer from 1 to 5, got 0"),
        ((6, 6), 2.5, "a spacing is an integer from 1 to 5, got 2.5"),
        ((2,), 1, "this space has 0.50 at spacing 1; use 'fair' or 'iid'"),
        ((1, 1), None, "a choice with two options or more"),
    ],
)
def test_a_spacing_that_cannot_be_or_leaves_no_freedom_is_refused_with_the_largest_allowed(counts, spacing, message):
    with pytest.raises(StreamError, match=message) as refused:
        Spaced(blocks(*counts), spacing)
    if most := re.search(r"at most (\d+)", str(refused.value)):
        assert Spaced(blocks(*counts), int(most[1])).bits >= 1


@pytest.mark.parametrize("kind", ["fair", "spaced"])
def test_permutations_need_finite_and_unconstrained_choices(kind):
    real, bound = Space(), blocks(4, 4)
    real.real("rate", 0.0, 1.0)
    bound.require(bound.handle("b0") != bound.handle("b1"), "differ")
    for space, message in (
        (real, "'rate' is real; use 'iid'"),
        (bound, r"cannot keep the constraint 'b0 != b1' \(differ\)"),
        (Space(), "at least one choice"),
    ):
        with pytest.raises(StreamError, match=message):
            make_stream(space, kind)
    assert make_stream(bound, "iid")[0][0]["b0"] != make_stream(bound, "iid")[0][0]["b1"]


@pytest.mark.parametrize("kind", ["iid", "fair", "spaced"])
def test_inactive_choices_are_dropped_and_every_subnet_is_valid(kind):
    space = Space()
    depth = space.integer("depth", [1, 2, 3])
    for number in range(3):
        space.categorical(f"b{number}", ["x", "y", "z", "w"], when=depth > number)
    stream = make_stream(space, kind, 5)
    for step in range(200):
        (subnet,) = stream[step]
        assert space.subnet(subnet.values) == subnet
    assert {len(stream[step][0].values) for step in range(50)} == {2, 3, 4}


def test_dropping_does_not_shift_the_permutations_of_a_choice():
    always, sometimes = Space(), Space()
    always.integer("depth", [1, 2])
    always.integer("b", 0, 5)
    depth = sometimes.integer("depth", [1, 2])
    sometimes.integer("b", 0, 5, when=depth == 2)
    for kind in ("fair", "spaced:1"):
        full, dropped = make_stream(always, kind, 1), make_stream(sometimes, kind, 1)
        for step in range(100):
            assert dropped[step][0].get("b", full[step][0]["b"]) == full[step][0]["b"]


def test_a_sandwich_holds_the_largest_the_smallest_and_random_subnets():
    space = blocks(4, 4)
    stream = make_stream(space, "sandwich:2", 3)
    assert stream.microbatches == 4
    assert stream.bits == 8
    for step in range(20):
        largest, smallest, *others = stream[step]
        assert (largest, smallest) == (space.last(), space.first())
        assert len(others) == 2
    assert len({stream[step][2:] for step in range(50)}) > 40
    chosen = make_stream(space, "sandwich", largest=space.first(), smallest=space.last(), r=0)
    assert chosen[9] == (space.first(), space.last())
    with pytest.raises(StreamError, match="r >= 0"):
        Sandwich(space, -1)
    with pytest.raises(SpaceError, match="not of this one"):
        Sandwich(space, 1, largest=blocks(3).first())


def test_a_file_gives_the_steps_that_are_written_in_it(tmp_path):
    space = blocks(3, 3)
    a, b = space.first(), space.last()
    path = write(tmp_path / "steps.jsonl", a.to_json(), [a.to_json(), b.to_json()], [b.to_json()])
    for stream in (make_stream(space, path), make_stream(space, str(path)), make_stream(space, f"file:{path}")):
        assert list(stream) == [(a,), (a, b), (b,)]
        assert stream.length == 3
        assert stream.microbatches == 2
        with pytest.raises(StreamError, match="step 3 is beyond the end of the file stream, which has 3 steps"):
            stream[3]
    assert FromFile(space, write(tmp_path / "single.jsonl", a.to_json())).microbatches is None


SPACE = blocks(3, 3)
GOOD = SPACE.first().to_json()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, {"space": SPACE.id, "values": {"b0": 9, "b1": 0}}], "line 2 of .*: choice 'b0': 9 is not an option"),
        ([GOOD, GOOD, {"space": "x", "values": {}}], "line 3 of .* is of space x"),
        ([[]], "line 1 of .* holds no subnet"),
        ([GOOD, 3], "line 2 of .*: a subnet is written"),
        ([GOOD, [GOOD] * 2, [GOOD] * 3], "line 3 of .* has 3 micro-batches, lines before it 2"),
        ([], "is empty"),
        (b"\xff\n", "line 1 of .* is not JSON"),
        (None, "cannot read the stream"),
    ],
)
def test_a_mistake_in_a_file_names_its_line(tmp_path, lines, message):
    path = tmp_path / "steps.jsonl"
    if isinstance(lines, bytes):
        path.write_bytes(lines)
    elif lines is not None:
        write(path, *lines)
    with pytest.raises(StreamError, match=message):
        FromFile(SPACE, path)


def test_a_file_that_has_changed_is_not_the_stream_that_was_written_down(tmp_path):
    as_json = FromFile(SPACE, write(tmp_path / "steps.jsonl", GOOD)).to_json()
    write(tmp_path / "steps.jsonl", SPACE.last().to_json())
    with pytest.raises(StreamError, match="is not what it was"):
        make_stream(SPACE, as_json)


@pytest.mark.parametrize("index", [-1, 1.0, "0", None, True, slice(0, 2)])
def test_steps_and_seeds_are_integers(index):
    stream = make_stream(blocks(3), "iid")
    assert stream[np.int64(12)] == stream[12]
    with pytest.raises(StreamError, match="a step is an integer"):
        stream[index]
    if index != -1:
        with pytest.raises(StreamError, match="a seed is an integer"):
            make_stream(blocks(3), "iid", index)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("spacd", {}, "unknown stream 'spacd'; did you mean 'spaced'?"),
        ("spaced:x", {}, "needs an integer after the colon"),
        ("spaced:", {}, "needs an integer after the colon"),
        ("iid:3", {}, "the iid stream takes no argument, got '3'"),
        ("spaced", {"spaceing": 3}, "has no option 'spaceing'; did you mean 'spacing'?"),
        ("fixed", {}, "the fixed stream needs its subnet"),
        ("file", {}, "the file stream needs its path"),
        (3, {}, "a stream is a name, a subnet, a path or a stream"),
        ({"stream": "iid", "space": "x"}, {}, "the stream is of space x"),
        ({"seed": 1}, {}, "unknown stream 'None'"),
    ],
)
def test_what_makes_no_stream_is_refused(spec, options, message):
    with pytest.raises(StreamError, match=message):
        make_stream(blocks(5, 5), spec, **options)


def test_a_stream_or_a_subnet_passes_through_the_factory_if_it_is_of_the_space():
    space = blocks(5, 5)
    stream = make_stream(space, "spaced:3")
    assert make_stream(space, stream) is stream
    fixed = make_stream(space, space.last())
    assert fixed[0] == fixed[10**9] == (space.last(),)
    assert fixed.bits == 0
    assert make_stream(Space(), Space().subnet())[3] == (Space().subnet(),)
    with pytest.raises(StreamError, match="takes no options"):
        make_stream(space, stream, spacing=2)
    with pytest.raises(StreamError, match="not of this one"):
        make_stream(blocks(4), stream)
    space.integer("more", 0, 3)
    with pytest.raises(StreamError, match="not of this one"):
        make_stream(space, stream)


def kinds(space: Space, tmp_path: Path) -> list:
    path = write(tmp_path / "s.jsonl", *[space.sample(generator(i)).to_json() for i in range(300)])
    return [
        Iid(space, 4),
        Fair(space, 4),
        Spaced(space, 3, 4),
        Sandwich(space, 2, 4),
        Shrinking(space, 200, "b1,b0", seed=4),
        Fixed(space, space.last(), 4),
        FromFile(space, path, 4),
    ]


def test_a_stream_is_made_again_from_its_json_or_its_pickle(tmp_path):
    space = blocks(5, 7)
    for stream in kinds(space, tmp_path):
        again = make_stream(space, json.loads(json.dumps(stream.to_json())))
        assert type(again) is type(stream)
        assert again.to_json() == stream.to_json()
        pickled = pickle.loads(pickle.dumps(stream))
        for step in range(100):
            assert again[step] == stream[step] == pickled[step]
        assert f"{stream.name}: " in stream.describe()
        for step in range(1000 if stream.length is None else 0):
            assert stream[step]
        assert len(pickle.dumps(stream)) < 50_000  # a long run remembers a few rounds only


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["iid", "fair", "spaced", "spaced:2", "sandwich:1"]),
    st.lists(st.integers(3, 9), min_size=2, max_size=5),
    st.integers(0, 2**40),
    st.lists(st.integers(0, 10**7), min_size=1, max_size=6),
)
def test_a_step_depends_on_seed_and_number_alone(kind, counts, seed, steps):
    stream = make_stream(blocks(*counts), kind, seed)
    for step in [*steps, *steps[::-1]]:
        assert stream[step] == make_stream(blocks(*counts), kind, seed)[step]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=5), st.integers(0, 2**40), st.integers(0, 10**5), st.data())
def test_a_spaced_stream_keeps_its_word_or_is_refused(counts, seed, start, data):
    spacing = data.draw(st.none() | st.integers(1, 10))
    space = blocks(*counts)
    freedom = sum(bits_per_step(count, spacing or 1) for count in counts if (spacing or 1) <= count)
    if freedom < 1 or (spacing or 1) > min(counts):
        with pytest.raises(StreamError, match=r"is impossible|bits? of freedom"):
            Spaced(space, spacing, seed)
        return
    stream = Spaced(space, spacing, seed)
    assert stream.bits >= 1
    steps = [stream[start + step][0] for step in range(120)]
    for name in space.choices:
        for at in range(len(steps) - stream.spacing + 1):
            window = [subnet[name] for subnet in steps[at : at + stream.spacing]]
            assert len(set(window)) == stream.spacing
