"""What was scored, sampled in bounded memory, and how often each option is in the best."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from weft.search.objectives import Constraint, Objective
from weft.serve.event_log import SummaryCache
from weft.serve.views.search_samples import SCORED, Point, Sample, ScoredSubnets, option_frequencies, ordered

ACCURACY, FLOPS = Objective("accuracy", True), Objective("flops", False)


def point(id: str, accuracy: float, flops: float = 0.0, **values: object) -> Point:
    return Point(id, {"accuracy": accuracy, "flops": flops}, values)


def test_shares_of_eleven_by_hand() -> None:
    best = [point("a", 0.9, op="conv", depth=2), point("b", 0.8, op="conv")]
    rest = [point(f"c{at}", 0.1, op="skip") for at in range(9)]
    found = option_frequencies([*best, *rest], [("op", ["skip", "conv", "pool"]), ("depth", [1, 2])])
    # A tenth of eleven, rounded up, is two; depth is switched off in all but one.
    assert found == [
        {"name": "op", "options": ["skip", "conv", "pool"], "best": [0, 1, 0], "all": [0.8181818, 0.1818182, 0]},
        {"name": "depth", "options": [1, 2], "best": [0, 0.5], "all": [0, 0.09090909]},
    ]


def test_options_that_python_takes_for_one_are_told_apart() -> None:
    found = option_frequencies([point("a", 1, flag=True), point("b", 1, flag=1)])
    assert [type(option) for option in found[0]["options"]] == [bool, int]
    assert found == [{"name": "flag", "options": [True, 1], "best": [1, 0], "all": [0.5, 0.5]}]


def test_of_no_subnets_there_are_no_shares() -> None:
    assert option_frequencies([], [("op", ["x"])]) == []


def test_of_two_objectives_the_front_comes_first() -> None:
    points = [point("small", 0.5, 1), point("beaten", 0.5, 5), point("good", 0.9, 9), point("worst", 0.4, 9)]
    assert [one.id for one in ordered(points, [ACCURACY, FLOPS])] == ["good", "small", "beaten", "worst"]
    assert [one.id for one in ordered(points, [FLOPS])] == ["small", "beaten", "good", "worst"]


def test_what_breaks_a_constraint_or_is_no_number_comes_last() -> None:
    points = [point("nan", float("nan"), 1), point("large", 0.9, 9), point("fine", 0.5, 1)]
    assert [p.id for p in ordered(points, [ACCURACY, FLOPS], [Constraint("flops", "<=", 5)])] == [
        "fine",
        "large",
        "nan",
    ]


def test_an_objective_that_nothing_was_scored_by_is_passed_over() -> None:
    points = [Point("a", {"accuracy": 0.1}), Point("b", {"accuracy": 0.2})]
    assert [one.id for one in ordered(points, [FLOPS, ACCURACY])] == ["b", "a"]
    assert ordered(points, [FLOPS]) == points


ids = st.lists(st.integers(0, 40).map(str), max_size=120)


@given(ids, st.integers(1, 20), st.randoms(use_true_random=False))
def test_a_sample_does_not_depend_on_the_order_and_is_whole_where_there_is_room(
    ids: list[str], cap: int, rng: random.Random
) -> None:
    def sampled(several: list[str]) -> set[str]:
        sample = Sample(cap)
        for one in several:
            sample.add(point(one, 0.0))
        return {one.id for one in sample.points()}

    found = sampled(ids)
    shuffled = list(ids)
    rng.shuffle(shuffled)
    assert found == sampled(shuffled)
    assert found <= set(ids)
    assert len(found) == min(cap, len(set(ids)))


def test_every_subnet_is_as_likely_to_be_kept() -> None:
    sample = Sample(500)
    for at in range(5000):
        sample.add(point(f"{at:016x}", at))
    early = sum(one.scores["accuracy"] < 2500 for one in sample.points())
    assert 190 < early < 310  # six standard deviations
    assert sample.count == 5000


def test_the_newest_scores_of_a_subnet_count() -> None:
    sample = Sample(2)
    for accuracy in (0.1, 0.2):
        sample.add(point("a", accuracy))
    assert [one.scores["accuracy"] for one in sample.points()] == [0.2]


def line(subnet: str, accuracy: float | str, context: str = "x", **more: object) -> bytes:
    told = {"subnet": subnet, "context": context, "scores": {"accuracy": accuracy}, "values": {}, **more}
    return json.dumps(told).encode()


def scores(*lines: bytes) -> ScoredSubnets:
    found = ScoredSubnets()
    for one in lines:
        found.add_line(one)
    return found


def test_costs_join_the_scores_and_values_are_kept() -> None:
    found = scores(line("a", 0.5, values={"op": "x"}, costs={"flops": 3}))
    assert found.of("x") == ([Point("a", {"accuracy": 0.5, "flops": 3}, {"op": "x"})], 1)


def test_scores_of_the_fronts_context_are_taken_and_no_others() -> None:
    found = scores(line("a", 0.5, "old"), line("b", 0.6, "new"), line("a", 0.7, "new"))
    assert [one.scores["accuracy"] for one in found.of("old")[0]] == [0.5]
    # A front that does not tell its context was scored where its members have these scores.
    assert [one.id for one in found.of(None, [Point("a", {"accuracy": 0.5})])[0]] == ["a"]
    assert [one.id for one in found.of(None, [Point("a", {"accuracy": 0.7})])[0]] == ["b", "a"]
    assert [one.id for one in found.of(None)[0]] == ["b", "a"]  # else the newest
    assert scores().of("x") == ([], 0)


def test_damaged_lines_are_counted_and_change_nothing() -> None:
    odd = [b'{"subnet": 1, "context": "x", "scores": {}}', b'{"subnet": "a"}', line("c", 0.5, values=[1])]
    bad = [b"{", b"[]", *odd, b"\xff\xfe", b"x" * 99999]
    found = scores(*bad, b"", line("a", "nan"), line("b", 0.5))
    assert found.damaged == len(bad)
    assert [one.id for one in found.of("x")[0]] == ["a", "b"]


def test_a_long_file_is_read_once_in_little_memory(tmp_path: Path) -> None:
    path, count = tmp_path / "scores.jsonl", 30_000
    with open(path, "wb") as file:
        for at in range(count):
            file.write(line(f"{at:016x}", at / count, values={"op": at % 7}, costs={"flops": at}) + b"\n")
    fold = SummaryCache(ScoredSubnets)
    tracemalloc.start()
    points, seen = fold.query(path, lambda scores: scores.of("x"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(points), seen) == (SCORED, count)
    assert peak < 16 * 2**20
    with open(path, "ab") as file:
        file.write(line("new", 2.0)[:20])
    assert fold.query(path, lambda scores: scores.of("x")[1]) == count  # torn: it waits for its end
    with open(path, "ab") as file:
        file.write(line("new", 2.0)[20:] + b"\n")
    assert fold.query(path, lambda scores: scores.of("x")[1]) == count + 1
    path.write_bytes(line("other", 1.0) + b"\n")
    assert fold.query(path, lambda scores: [one.id for one in scores.of("x")[0]]) == ["other"]
