"""The mixture of a gradient search over its steps."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.serve.overview import is_gradient_search
from weft.serve.views.search_samples import STEPS, MixtureHistory, probabilities

CHOICES = [{"name": "a", "options": ["x", "y"]}, {"name": "b", "options": [1, 2, 3]}]


def step(at: int, *mixture: object) -> dict[str, Any]:
    return {"event": "step", "step": at, "loss": 1.0, "mixture": list(mixture)}


def started(choices: object = CHOICES) -> dict[str, Any]:
    return {"event": "started", "choices": choices}


def written(run: Path, *events: object) -> Path:
    lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in events]
    (run / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return run


def test_each_option_has_its_line_over_the_steps(tmp_path: Path) -> None:
    run = written(tmp_path, started(), step(0, 0.4, 0.6, 0.1, 0.2, 0.7), step(1, 0.3, 0.7, 0.2, 0.2, 0.6))
    assert probabilities(run) == {
        "steps": [0, 1],
        "choices": [
            {"name": "a", "options": ["x", "y"], "values": [[0.4, 0.3], [0.6, 0.7]]},
            {"name": "b", "options": [1, 2, 3], "values": [[0.1, 0.2], [0.2, 0.2], [0.7, 0.6]]},
        ],
    }


def test_a_run_without_a_mixture_has_none(tmp_path: Path) -> None:
    assert probabilities(tmp_path) is None
    assert probabilities(written(tmp_path, started(), {"event": "step", "step": 0, "loss": 1.0})) is None
    unnamed = written(tmp_path, step(0, 0.4, 0.6))
    assert probabilities(unnamed) is None  # nobody knows what the numbers stand for
    assert not is_gradient_search({})
    assert not is_gradient_search({"train_config": {"architecture_search": None}})
    assert is_gradient_search({"train_config": {"architecture_search": {"every": 2}}})
    assert not is_gradient_search({"law": {"bilevel": None}})  # as manifests of format 1 have it
    assert is_gradient_search({"law": {"bilevel": {"every": 2}}})


def test_damaged_events_are_passed_over(tmp_path: Path) -> None:
    good = step(3, 0.4, 0.6, 0.1, 0.2, 0.7)
    bad: list[object] = [
        step(0, 0.4, 0.6),
        step(1, "nan", 0.6, 0.1, 0.2, 0.7),
        step(2, {}, 0, 0, 0, 0),
        step(2, [1], 0, 0, 0, 0),
        {**good, "step": "x"},
        {**good, "mixture": 3},
        {**good, "event": "other"},
        started("x"),
        started([{"name": 3}, 4]),
        b'{"event": "step", "step": 4, "mixture": [0.1',
    ]
    found = probabilities(written(tmp_path, started(), good, *bad))
    assert found is not None
    assert found["steps"] == [3]


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3))
def test_there_are_at_most_five_hundred_steps_and_they_come_to_the_mean(steps: int, stride: int) -> None:
    history = MixtureHistory()
    history.add_line(json.dumps(started([{"name": "a", "options": ["x", "y"]}])).encode())
    for at in range(0, steps, stride):
        history.add_line(json.dumps(step(at, at / steps, 1 - at / steps)).encode())
    found = history.to_json()
    assert found is not None
    assert len(found["steps"]) <= STEPS
    assert found["steps"] == sorted(set(found["steps"]))
    first, second = found["choices"][0]["values"]
    assert all(a + b == pytest.approx(1.0, abs=2e-4) for a, b in zip(first, second, strict=True))
    # A line stays one where it is averaged, but for its ends.
    inside = range(len(first) // 20, len(first) - len(first) // 20)
    assert all(first[i] == pytest.approx(found["steps"][i] / steps, abs=0.02) for i in inside)


def test_many_options_are_told_at_fewer_steps() -> None:
    history = MixtureHistory()
    history.add_line(json.dumps(started([{"name": "a", "options": list(range(3456))}])).encode())
    for at in range(200):
        history.add_line(json.dumps(step(at, *[0.001] * 3456)).encode())
    found = history.to_json()
    assert found is not None
    assert len(json.dumps(found)) < 400_000


def test_a_long_file_is_read_in_little_memory(tmp_path: Path) -> None:
    path, count = tmp_path / "events.jsonl", 60_000
    with open(path, "wb") as file:
        file.write(json.dumps(started()).encode() + b"\n")
        for at in range(count):
            file.write(json.dumps(step(at, 0.25, 0.75, 0.1, 0.2, 0.7)).encode() + b"\n")
    tracemalloc.start()
    found = probabilities(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None
    assert 200 < len(found["steps"]) <= STEPS
    assert found["steps"][-1] > 0.99 * count
    assert found["choices"][0]["values"][1] == [0.75] * len(found["steps"])
    assert peak < 8 * 2**20
