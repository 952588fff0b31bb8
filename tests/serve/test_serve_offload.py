"""Memory over time: what is on a device, and which layers came and went, in any window and however much there is."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracefiles import EPOCH

from weft.runs import Run
from weft.serve.views.offload import POINTS, device_memory
from weft.serve.views.pipeline import document
from weft.serve.views.schedule import load_trace
from weft.trace.reader import STATES, Trace

Row = tuple[str, str, float, int, int, int, int]


def write(run: Path, *stages: list[Row], end: float = 10.0) -> Trace:
    """Stages that compute from 0 to ``end``, with these changes of their memory."""
    (run / "traces").mkdir(parents=True, exist_ok=True)
    for number, own in enumerate(stages):
        rows: list[Any] = [
            {"start": 0, "stages": len(stages), "cut": list(range(1, len(stages))), "time": 0},
            ["op", "F", 0, EPOCH, EPOCH + end, 1],
            *(["memory", layer, state, EPOCH + at, *shares] for layer, state, at, *shares in own),
        ]
        (run / "traces" / f"stage{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_trace(run)
    assert found is not None
    return found


# bytes   .....aaaaaaaabbbb      a (100 bytes) is asked for at 1 and used at 2; b (50) comes at 4 and is used at 5;
# second  0 1 2 3 4 5 6 7 8      a leaves at 6, and has left at the next event, at 8
HAND: list[Row] = [
    ("a", "arriving", 1, 0, 100, 0, 0),
    ("a", "resident", 2, 100, 0, 0, 100),
    ("b", "arriving", 4, 100, 50, 0, 0),
    ("b", "resident", 5, 150, 0, 0, 50),
    ("a", "leaving", 6, 50, 0, 100, 50),
    ("b", "resident", 8, 50, 0, 0, 50),
]


def test_layers_that_come_and_go_are_shown_as_drawn(tmp_path: Path) -> None:
    traced = write(tmp_path, [], HAND)  # a stage without layers on the host has nothing to show
    assert device_memory(traced, (0, 10), [7, 400]) == [
        {
            "stage": 1,
            "budget": 400,
            "time": [1, 2, 4, 5, 6, 8, 10],
            "resident": [0, 100, 100, 150, 50, 50, 50],
            "arriving": [100, 0, 50, 0, 0, 0, 0],
            "leaving": [0, 0, 0, 0, 100, 0, 0],
            "pinned": [0, 100, 0, 50, 50, 50, 50],
            "layers": [
                {"name": "a", "bytes": 100, "spans": [["arriving", 1, 2], ["resident", 2, 6], ["leaving", 6, 8]]},
                {"name": "b", "bytes": 50, "spans": [["arriving", 4, 5], ["resident", 5, 10]]},
            ],
            "left_out": 0,
        }
    ]


def test_a_window_begins_with_what_was_there(tmp_path: Path) -> None:
    (found,) = device_memory(write(tmp_path, HAND), (4.5, 7), [None])
    assert found["budget"] is None
    assert (found["time"], found["resident"]) == ([4.5, 5, 6, 7], [100, 150, 50, 50])
    assert found["layers"] == [
        {"name": "a", "bytes": 100, "spans": [["resident", 4.5, 6], ["leaving", 6, 7]]},
        {"name": "b", "bytes": 50, "spans": [["arriving", 4.5, 5], ["resident", 5, 7]]},
    ]


def test_the_bytes_of_layers_that_come_together_are_not_guessed(tmp_path: Path) -> None:
    rows: list[Row] = [("a", "arriving", 1, 300, 0, 0, 0), ("b", "arriving", 1.5, 300, 0, 0, 0)]
    rows += [("c", "arriving", 2, 320, 0, 0, 0)]
    (found,) = device_memory(write(tmp_path, rows), (0, 10), [None])
    assert {own["name"]: own["bytes"] for own in found["layers"]} == {"a": None, "b": None, "c": 20}


def test_what_was_there_before_the_first_operation_is_there_at_its_start(tmp_path: Path) -> None:
    rows: list[Row] = [("a", "arriving", -2, 0, 10, 0, 0), ("a", "resident", -1, 10, 0, 0, 0)]
    (found,) = device_memory(write(tmp_path, rows), (0, 10), [None])
    assert found["layers"][0]["spans"] == [["resident", 0, 10]]
    assert found["time"][0] == 0
    assert found["resident"][-1] == 10


@pytest.mark.parametrize("name", ["offload", "residency"])  # the second in older runs
def test_budgets_are_those_that_the_stages_wrote_or_else_the_configured_one(tmp_path: Path, name: str) -> None:
    run = Run.create(tmp_path, "r", manifest={"config": {name: {"budget": "1KiB"}}}).path
    write(run, HAND, HAND)
    assert [own["budget"] for own in document(run)["memory"]] == [1024, 1024]
    event = {"event": name, "time": EPOCH, "stages": [{"budget": 7}, {"budget": 9}]}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert [own["budget"] for own in document(run)["memory"]] == [7, 9]


@pytest.mark.parametrize("stages", [1, 4])
def test_of_many_changes_the_fullest_moment_is_kept(tmp_path: Path, stages: int) -> None:
    rows: list[Row] = []
    for number in range(6000):
        layer, at = f"layer{number % 300}", number / 1000
        rows.append((layer, STATES[number // 300 % 3], at, 1000 + number % 7, 0, 0, 0))
    rows[1234] = (rows[1234][0], "resident", 1.234, 99_999, 0, 0, 0)
    found = device_memory(write(tmp_path, *[rows] * stages), (0.0, 10.0), [None] * stages)
    assert sum(len(own["time"]) for own in found) <= POINTS + 3 * stages
    assert sum(len(layer["spans"]) for own in found for layer in own["layers"]) <= POINTS
    for own in found:
        assert max(own["resident"]) == 99_999
        assert own["time"] == sorted(own["time"])
        assert len(own["layers"]) + own["left_out"] == 300
    assert len(json.dumps(found)) < 250_000


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(STATES), st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=15,
    ),
    st.tuples(st.integers(0, 9), st.integers(1, 10)).filter(lambda pair: pair[0] < pair[1]),
)
def test_a_layer_is_in_one_state_at_a_time_and_within_the_window(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, str, int, int]], window: tuple[int, int]
) -> None:
    rows: list[Row] = [
        (a, b, float(at), size, 0, size % 2, 0) for a, b, at, size in sorted(changes, key=lambda x: x[2])
    ]
    (found,) = device_memory(write(tmp_path_factory.mktemp("run"), rows), (float(window[0]), float(window[1])), [None])
    for layer in found["layers"]:
        own = layer["spans"]
        assert all(window[0] <= start < end <= window[1] for _, start, end in own)
        assert all(before[2] <= after[1] for before, after in pairwise(own))
        for word, start, end in own:
            if word == "leaving":  # may be over before the next event of the layer
                continue
            for half in range(int(start * 2), int(end * 2)):
                past = [state for name, state, at, *_ in rows if name == layer["name"] and at * 2 <= half]
                assert past[-1] == word
    assert {window[1]} == {found["time"][-1]}
    assert all(window[0] <= at <= window[1] for at in found["time"])
