"""Curves in few buckets that keep their extremes, their mean and their shape; and the curves of a run."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft.runs import Run
from weft.serve.downsample import Curve
from weft.serve.fields import LARGEST, number, rounded, whole_number
from weft.serve.library import encode
from weft.serve.views import curves

POINTS = st.lists(st.tuples(st.integers(0, 2000), st.integers(-1000, 1000).map(float)), max_size=200)


def curve(points: list[tuple[int, float]], cap: int) -> Curve:
    made = Curve(cap)
    for x, y in points:
        made.add(x, y)
    return made


def test_a_short_curve_is_kept_point_by_point() -> None:
    assert curve([(0, 2.0), (1, 3.0), (5, 1.0)], 3).to_json() == {"x": [0, 1, 5], "y": [2.0, 3.0, 1.0]}


def test_a_fourth_point_where_three_fit_makes_buckets_of_two_steps() -> None:
    assert curve([(x, 0.0) for x in range(3)], 3).width == 1
    drawn = curve([(0, 2.0), (1, 4.0), (2, 3.0), (4, 9.0)], 3)
    assert drawn.width == 2
    y, low, high = [3.0, 3.0, 9.0], [2.0, 3.0, 9.0], [4.0, 3.0, 9.0]
    assert drawn.to_json() == {"x": [0.5, 2, 4], "y": y, "low": low, "high": high}


def test_a_loss_that_is_no_number_is_a_gap_and_spoils_no_neighbour() -> None:
    drawn = curve([(0, 1.0), (1, math.nan), (2, math.inf), (3, 5.0)], 4).to_json()
    assert drawn["y"] == [1.0, None, None, 5.0]
    merged = curve([(0, 1.0), (1, math.nan), (2, math.inf), (3, math.nan)], 2).to_json()
    assert (merged["y"], merged["low"], merged["high"]) == ([1.0, None], [1.0, None], [1.0, None])


@given(POINTS, st.integers(1, 20))
def test_buckets_are_few_and_hold_the_mean_and_the_extremes_of_their_points(
    points: list[tuple[int, float]], cap: int
) -> None:
    made = curve(points, cap)
    buckets = defaultdict(list)
    for x, y in points:
        buckets[x // made.width].append((x, y))
    drawn = made.to_json()
    groups = [buckets[key] for key in sorted(buckets)]
    assert len(drawn["x"]) == len(groups) <= cap
    assert drawn["x"] == [round(sum(x for x, _ in group) / len(group), 1) for group in groups]
    assert drawn["y"] == [rounded(sum(y for _, y in group) / len(group)) for group in groups]
    assert drawn.get("low", drawn["y"]) == [min(y for _, y in group) for group in groups]
    assert drawn.get("high", drawn["y"]) == [max(y for _, y in group) for group in groups]


@given(POINTS, st.integers(1, 20), st.randoms())
def test_the_order_in_which_points_come_does_not_matter(
    points: list[tuple[int, float]], cap: int, random: object
) -> None:
    other = list(points)
    random.shuffle(other)  # type: ignore[attr-defined]
    assert curve(points, cap).to_json() == curve(other, cap).to_json()


@given(POINTS, st.integers(1, 20), st.integers(1, 20))
def test_a_coarser_curve_is_the_one_that_less_room_would_have_made(
    points: list[tuple[int, float]], cap: int, less: int
) -> None:
    made = curve(points, max(cap, less))
    before = made.to_json()
    assert made.coarser(min(cap, less)).to_json() == curve(points, min(cap, less)).to_json()
    assert made.to_json() == before


def test_numbers_are_not_what_only_looks_like_them() -> None:
    assert [number(value) for value in (1, 2.5, "-inf")] == [1.0, 2.5, -math.inf]
    assert {number(value) for value in ("1e3", None, True, 10**400)} == {None}
    assert math.isnan(number("nan") or 0.0)
    assert [whole_number(value) for value in (3, -1, 2.0, True, LARGEST, "4")] == [3, None, None, None, None, None]


def series(run: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(line["of"], line["name"]): line for line in curves.document(run)["series"]}


def test_steps_and_validations_become_curves_and_words_do_not(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "conv", manifest={})
    assert not curves.present(run.path)
    run.events.append("started", at=0, steps=3)
    for step in range(3):
        run.events.append("step", step=step, loss=3.0 - step, phase="weights", mixture=[0.5, 0.5], subnets=["ab"])
    run.events.append("validation", step=2, pick="largest", subnet="ab", scores={"accuracy": 0.75})
    run.events.append("validation", step=2, scores={"accuracy": 0.5})
    run.events.close()
    assert curves.present(run.path)
    found = series(run.path)
    validations = [("validation", "accuracy"), ("validation", "accuracy (largest)")]
    progress = [("progress", "steps per second"), ("progress", "seconds")]
    assert list(found) == [("train", "loss"), *validations, *progress]
    assert found["train", "loss"] == {"name": "loss", "of": "train", "x": [0, 1, 2], "y": [3.0, 2.0, 1.0]}
    assert found["validation", "accuracy (largest)"]["x"] == [2]
    assert curves.document(run.path)["points"] == 3


def write(run: Path, steps: int, metrics: int) -> None:
    with open(run / "events.jsonl", "w") as out:
        out.write(json.dumps({"event": "started", "time": 0.0, "at": 0, "steps": steps}) + "\n")
        for step in range(steps):
            more = {f"metric{index}": step / 7 for index in range(metrics)}
            out.write(json.dumps({"event": "step", "time": step / 4, "step": step, "loss": -step, **more}) + "\n")


def test_ten_thousand_steps_are_downsampled_and_lose_no_extreme(tmp_path: Path) -> None:
    write(tmp_path, 10_000, 1)
    found = curves.document(tmp_path)
    assert (found["points"], found["damaged"]) == (10_000, 0)
    loss = series(tmp_path)["train", "loss"]
    assert 500 <= len(loss["x"]) <= 1000
    assert (min(loss["low"]), max(loss["high"])) == (-9999, 0)
    assert all(low <= y <= high for low, y, high in zip(loss["low"], loss["y"], loss["high"], strict=True))
    assert set(series(tmp_path)["progress", "steps per second"]["y"]) == {4.0}
    assert len(encode(found).body) < 500_000


def test_many_curves_share_the_room_of_one_document(tmp_path: Path) -> None:
    write(tmp_path, 1200, 40)
    found = curves.document(tmp_path)
    assert len(found["series"]) > 30
    assert len(encode(found).body) < 500_000
