from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from weft.runs import Run, list_runs


def make(root: Path, name: str, steps: int, created: str, end: str | None = None) -> Run:
    run = Run.create(root, name, manifest={"config": {"steps": 100}})
    run.update_manifest(created=created)
    with run.locked():
        for step in range(steps):
            run.events.append("step", step=step, loss=1 / (step + 1))
        if end:
            run.events.append(end)
    return run


def test_runs_are_listed_oldest_first_with_what_they_did(tmp_path: Path) -> None:
    make(tmp_path, "young", 4, "2024-01-02T00:00:00Z", "finished")
    make(tmp_path, "old", 0, "2024-01-01T00:00:00Z")
    assert list_runs(tmp_path / "none") == []
    (tmp_path / "no-run").mkdir()
    (tmp_path / "file").write_text("x")
    old, young = list_runs(tmp_path)
    assert (old.name, old.state, old.done, old.total, old.loss) == ("old", "interrupted", 0, 100, None)
    assert (young.name, young.state, young.done, young.total, young.loss) == ("young", "finished", 4, 100, 0.25)
    with Run.open(tmp_path / "old").locked():
        assert [summary.state for summary in list_runs(tmp_path)] == ["running", "finished"]
    assert (young.created, young.path, young.problem) == ("2024-01-02T00:00:00Z", tmp_path / "young", None)


def test_the_total_comes_from_events_before_the_manifest_and_the_loss_from_the_highest_step(tmp_path: Path) -> None:
    run = make(tmp_path, "r", 0, "2024-01-01T00:00:00Z")
    run.events.append("started", steps=50)
    run.events.append("step", step=6, loss=math.nan)
    run.events.append("step", step=5, loss=0.1)
    run.events.append("validation", step=99, loss=0.2)
    run.events.close()
    (summary,) = list_runs(tmp_path)
    assert (summary.done, summary.total) == (7, 50)
    assert summary.loss is not None
    assert math.isnan(summary.loss)


def test_long_events_are_read_at_their_ends_alone(tmp_path: Path) -> None:
    run = make(tmp_path, "r", 0, "2024-01-01T00:00:00Z")
    first = json.dumps({"event": "started", "steps": 9}) + "\n"
    last = json.dumps({"event": "step", "step": 7, "loss": 3}) + "\n" + json.dumps({"event": "stopped"}) + "\n"
    with open(run.events.path, "w") as file:
        file.write(first)
        file.truncate(1 << 33)  # eight sparse gibibytes: reading them all would be felt
        file.seek(0, os.SEEK_END)
        file.write("\n" + last)
    (summary,) = list_runs(tmp_path)
    assert (summary.state, summary.done, summary.total, summary.loss) == ("stopped", 8, 9, 3.0)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"name": "x"}', b'{"format": "1"}', None])
def test_a_malformed_run_is_listed_as_damaged_beside_the_good_ones(tmp_path: Path, content: bytes | None) -> None:
    make(tmp_path, "good", 1, "2024-01-01T00:00:00Z")
    make(tmp_path, "bad", 1, "2024-01-01T00:00:00Z")
    manifest = tmp_path / "bad" / "manifest.json"
    manifest.unlink() if content is None else manifest.write_bytes(content)
    bad, good = list_runs(tmp_path)
    assert (bad.name, bad.state, good.name, good.done) == ("bad", "damaged", "good", 1)
    assert bad.problem is not None
    assert "manifest.json" in bad.problem


@pytest.mark.parametrize(
    "event",
    [
        {"event": "step", "step": "x", "loss": 1},
        {"event": "step", "step": 0, "loss": []},
        {"event": "step", "step": 0, "loss": "word"},
        {"event": "step", "step": 0, "loss": 10**400},
        {"event": ["step"], "steps": {}},
    ],
)
def test_events_of_odd_types_do_no_harm(tmp_path: Path, event: dict[str, object]) -> None:
    run = Run.create(tmp_path, "r", manifest={"config": ["steps"], "steps": True})
    run.update_manifest(created=5)
    run.events.path.write_text(json.dumps(event) + "\n\x00\xff\n")
    (summary,) = list_runs(tmp_path)
    assert (summary.state, summary.total, summary.loss, summary.created) == ("interrupted", None, None, None)
