"""Fronts: who is on them, who is best within limits, and how they are kept."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from weft.errors import SearchError, WeftError
from weft.search.front import Front, Scored
from weft.search.objectives import dominates, parse_constraints, parse_objectives
from weft.space import Space, Subnet

GOALS = parse_objectives("accuracy", "flops")


def make_space() -> Space:
    space = Space()
    space.categorical("a", ["x", "y", "z"])
    space.categorical("b", [1, 2, 3, 4])
    return space


SPACE = make_space()
SUBNETS = list(SPACE.enumerate())


def scored(*rows: tuple[float, float], **more: float) -> list[Scored]:
    return [Scored(s, {"accuracy": a, "flops": f, **more}) for s, (a, f) in zip(SUBNETS, rows, strict=False)]


def values(front: Front) -> list[tuple[float, float]]:
    return [(one.scores["accuracy"], one.scores["flops"]) for one in front]


def test_equal_scores_stay_side_by_side_and_a_subnet_counts_once() -> None:
    rows = scored((0.5, 1), (0.5, 1), (0.4, 1))
    again = Scored(SUBNETS[0], {"accuracy": 0.99, "flops": 0.0})
    front = Front([*rows, again, rows[1]], GOALS)
    assert {one.subnet for one in front} == set(SUBNETS[:2])
    assert [one.subnet.id for one in front] == sorted(one.subnet.id for one in front)


grid = st.one_of(st.integers(0, 4).map(float), st.just(math.nan))
many = st.lists(st.tuples(grid, grid), max_size=len(SUBNETS))


@settings(deadline=None)
@given(many, st.lists(st.sampled_from(["flops<=3", "accuracy>1", "flops>0"]), max_size=2))
def test_members_are_feasible_and_undominated_and_all_others_are_not(
    rows: list[tuple[float, float]], rules: list[str]
) -> None:
    everyone = scored(*rows)
    limits = parse_constraints(rules)
    fine = [
        one
        for one in everyone
        if not any(math.isnan(v) for v in one.scores.values()) and all(r.violation(one.scores) == 0 for r in limits)
    ]
    best = [one for one in fine if not any(dominates(other.scores, one.scores, GOALS) for other in fine)]
    front = Front(everyone, GOALS, rules)
    assert {one.subnet for one in front} == {one.subnet for one in best}
    assert len(front) == len(best)
    assert not any(dominates(a.scores, b.scores, GOALS) for a in front for b in front)
    assert [one.subnet for one in Front(everyone[::-1], GOALS, rules)] == [one.subnet for one in front]
    assert [one.subnet for one in Front(front, GOALS, rules)] == [one.subnet for one in front]


def test_best_is_by_the_first_objective_within_limits() -> None:
    front = Front(scored((0.5, 1), (0.9, 9), (0.7, 3), latency=2.0), GOALS)
    assert front.best().subnet == SUBNETS[1]
    assert front.best(flops=5).subnet == SUBNETS[2]
    assert front.best(flops=3).subnet == SUBNETS[2]  # a limit that is met exactly is met
    assert front.best(maximize="flops", accuracy=0.6).subnet == SUBNETS[1]
    assert front.best(latency=2.0).subnet == SUBNETS[1]
    assert Front(front, parse_objectives(minimize=["flops", "accuracy"])).best().subnet == SUBNETS[0]


def test_a_limit_on_a_maximized_metric_or_one_constrained_from_below_is_a_lower_bound() -> None:
    both = ({"accuracy": 0.9, "flops": 9.0, "speed": 1.0}, {"accuracy": 0.7, "flops": 3.0, "speed": 5.0})
    rows = [Scored(subnet, scores) for subnet, scores in zip(SUBNETS, both, strict=False)]
    assert Front(rows, parse_objectives(minimize="flops", maximize=())).best().subnet == SUBNETS[1]
    assert Front(rows, parse_objectives("accuracy", "flops")).best(maximize="speed", accuracy=0.8).subnet == SUBNETS[0]
    assert Front(rows, GOALS).best(speed=2).subnet == SUBNETS[0]
    assert Front(rows, GOALS, ["speed>=0.5"]).best(speed=2).subnet == SUBNETS[1]


def test_limits_that_nobody_meets_are_answered_with_what_can_be_reached() -> None:
    front = Front(scored((0.5, 1), (0.9, 9), (0.7, 3)), GOALS)
    with pytest.raises(SearchError, match=r"flops <= 0\.5; the front reaches flops from 1 to 9"):
        front.best(flops=0.5)
    with pytest.raises(SearchError, match=r"flops from 1 to 9; accuracy from 0\.5 to 0\.9"):
        front.best(flops=2, accuracy=0.8)
    with pytest.raises(SearchError, match="did you mean 'flops'"):
        front.best(flop=2)
    with pytest.raises(SearchError, match="empty"):
        Front([], GOALS).best(flops=2)


def test_a_pick_is_extracted_by_the_bound_function_and_refused_without_one() -> None:
    def extract(subnet: Subnet) -> str:
        return f"module of {subnet.id}"

    rows = scored((0.5, 1), (0.9, 9))
    assert Front(rows, GOALS, extract=extract).best(flops=2).extract() == f"module of {SUBNETS[0].id}"
    with pytest.raises(SearchError, match=f"{SUBNETS[1].id}.*no supernet"):
        Front(rows, GOALS).best().extract()


def test_a_missing_metric_and_a_missing_objective_are_refused() -> None:
    with pytest.raises(SearchError, match="'flops'"):
        Front([Scored(SUBNETS[0], {"accuracy": 1.0})], GOALS)
    with pytest.raises(SearchError, match="'size'"):
        Front(scored((1, 1)), GOALS, ["size<=4"])
    with pytest.raises(SearchError, match="objective"):
        Front(scored((1, 1)), ())


def test_a_front_survives_being_saved_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = scored((0.1 + 0.2, 1), (0.9, 9), size=math.inf)
    front = Front(rows, GOALS, ["flops<=1e7"])
    front.save(tmp_path / "new", lambda subnet: [{"block": "a", "choice": subnet["a"], "flops": 3}], context="c")
    saved = json.loads((tmp_path / "new" / "front.json").read_text())
    layers = [[{"block": "a", "choice": one.subnet["a"], "flops": 3}] for one in front]
    assert [member["layers"] for member in saved["members"]] == layers
    assert (saved["context"], saved["format"]) == ("c", 1)
    read = Front.from_json(SPACE, saved)
    assert list(read) == list(front)
    assert (read.objectives, read.constraints) == (front.objectives, front.constraints)
    with open(tmp_path / "new" / "front.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["subnet"] for row in table] == [one.subnet.id for one in front]
    assert [float(row["accuracy"]) for row in table] == [0.9, 0.1 + 0.2]
    assert [(row["a"], int(row["b"])) for row in table] == [(one.subnet["a"], one.subnet["b"]) for one in front]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["front.csv", "front.json"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "change",
    [
        {"format": 99},
        {"members": [{"id": "0" * 16, "subnet": SUBNETS[0].to_json(), "scores": {"accuracy": 1, "flops": 1}}]},
        {
            "members": [
                {"id": SUBNETS[0].id, "subnet": SUBNETS[0].to_json(), "scores": {"accuracy": "much", "flops": 1}}
            ]
        },
        {"members": [{"id": SUBNETS[0].id}]},
        {"objectives": None},
        {"constraints": ["flops"]},
    ],
)
def test_damaged_fronts_are_refused_with_an_error_of_ours(change: dict[str, object]) -> None:
    with pytest.raises(WeftError):
        Front.from_json(SPACE, {**Front(scored((1, 1)), GOALS).to_json(), **change})


def test_the_table_has_a_row_for_each_member_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    front = Front(scored((0.5, 1), (0.9, 9), latency=2.5), GOALS)
    table = front.table()
    assert capsys.readouterr().out == ""
    assert [column.header for column in table.columns] == ["subnet", "accuracy (max)", "flops (min)", "latency"]
    page = io.StringIO()
    Console(width=120, file=page).print(front)
    text = page.getvalue()
    assert SUBNETS[0].id in text
    assert text.index("0.9") < text.index("0.5 ")


def test_a_metric_that_is_nan_or_missing_meets_no_limit_and_is_never_the_most() -> None:
    rows = scored((0.5, 1), (0.9, 9))
    rows += [Scored(SUBNETS[2], {"accuracy": 0.95, "flops": 20.0, "latency": math.nan})]
    rows += [Scored(SUBNETS[3], {"accuracy": 0.6, "flops": 2.0, "latency": 7.0})]
    front = Front(rows, GOALS)
    assert front.best(latency=8).subnet == SUBNETS[3]
    assert front.best(maximize="latency").subnet == SUBNETS[3]
