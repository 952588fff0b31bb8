"""The curves of a run: what its steps and validations measured, small enough for a chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.runs import Run
from weft.serve.library import encode
from weft.serve.views import curves


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
    assert list(found) == [
        ("train", "loss"),
        ("validation", "accuracy"),
        ("validation", "accuracy (largest)"),
        ("progress", "steps per second"),
        ("progress", "seconds"),
    ]
    assert found["train", "loss"] == {"name": "loss", "of": "train", "x": [0, 1, 2], "y": [3.0, 2.0, 1.0]}
    assert found["validation", "accuracy (largest)"]["x"] == [2]
    assert curves.document(run.path)["points"] == 3


def write(run: Path, steps: int, metrics: int) -> None:
    with open(run / "events.jsonl", "w") as out:
        out.write(json.dumps({"event": "started", "time": 0.0, "at": 0, "steps": steps}) + "\n")
        for step in range(steps):
            more = {f"metric{index}": step / 7 for index in range(metrics)}
            out.write(json.dumps({"event": "step", "time": step / 4, "step": step, "loss": -step, **more}) + "\n")


def test_ten_thousand_steps_are_thinned_and_lose_no_extreme(tmp_path: Path) -> None:
    write(tmp_path, 10_000, 1)
    found = curves.document(tmp_path)
    assert (found["points"], found["damaged"]) == (10_000, 0)
    loss = series(tmp_path)["train", "loss"]
    assert 500 <= len(loss["x"]) <= 1000
    assert len(loss["x"]) == len(loss["y"]) == len(loss["low"]) == len(loss["high"])
    assert (min(loss["low"]), max(loss["high"])) == (-9999, 0)
    assert all(low <= y <= high for low, y, high in zip(loss["low"], loss["y"], loss["high"], strict=True))
    assert set(series(tmp_path)["progress", "steps per second"]["y"]) == {4.0}
    assert len(encode(found).body) < 500_000


def test_many_curves_share_the_room_of_one_document(tmp_path: Path) -> None:
    write(tmp_path, 2500, 40)
    found = curves.document(tmp_path)
    assert len(found["series"]) > 30
    assert len(encode(found).body) < 500_000
