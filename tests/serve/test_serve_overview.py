"""The list of runs: every one has its line, whatever state its files are in, and nothing outside is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from weft.runs import Run
from weft.runs.run import hold
from weft.serve.library import Library, NotFound
from weft.serve.overview import LARGE, flatten

CONFIG = {"data": "digits", "train": {"steps": 4, "stages": 2, "metrics": ["accuracy"]}, "limits": {}}


def made(
    root: Path, name: str, losses: tuple[float, ...] = (3.0, 2.0), end: str | None = "finished", **ends: Any
) -> Run:
    run = Run.create(root, name, manifest={"config": CONFIG, "device": "cpu", "law": {"seed": 0}})
    with run.locked():
        run.events.append("started", at=0, steps=4)
        run.events.append("pipeline", utilisation=[0.5, 0.25], in_flight=[1, 1])
        for step, loss in enumerate(losses):
            run.events.append("step", step=step, loss=loss, accuracy=step / 4, rate=1.0, subnets=["ab"])
        if end:
            run.events.append(end, **ends)
    return run


def listed(root: Path) -> dict[str, dict[str, Any]]:
    found = read(Library.under(root), "runs")
    assert set(found) == {"root", "runs", "plans"}
    return {line["name"]: line for line in found["runs"]}


def read(library: Library, *address: str, **query: str) -> Any:
    return json.loads(library.get(address, query).body, parse_constant=pytest.fail)


def test_a_finished_run_has_one_line(tmp_path: Path) -> None:
    made(tmp_path, "conv", fingerprint="ab" * 32, steps=4)
    line = listed(tmp_path)["conv"]
    assert line.pop("created").endswith("Z")
    assert 0 <= line.pop("seconds") < 60
    assert line.pop("revision") > 0
    assert line == {
        "name": "conv",
        "kind": "train",
        "state": "finished",
        "device": "cpu",
        "done": 2,
        "steps": 4,
        "seconds_left": None,
        "loss": 2.5,
        "metrics": {"accuracy": 0.125},
        "fingerprint": "ab" * 32,
        "same": [],
        "stages": 2,
        "damaged": 0,
        "reason": None,
        "views": ["curves", "pipeline", "config"],
    }


def test_runs_with_the_same_fingerprint_name_each_other(tmp_path: Path) -> None:
    assert listed(tmp_path / "nowhere") == {}
    for name, fingerprint in (("a", "11"), ("b", "22"), ("c", "11"), ("d", None)):
        made(tmp_path, name, end="finished", fingerprint=fingerprint)
    made(tmp_path, "e", end="stopped")
    lines = listed(tmp_path)
    assert {name: line["same"] for name, line in lines.items()} == {"a": ["c"], "b": [], "c": ["a"], "d": [], "e": []}
    assert read(Library.under(tmp_path), "runs", "a")["same"] == ["c"]


def test_the_kinds_of_runs_and_the_reason_of_a_failure_are_known(tmp_path: Path) -> None:
    Run.create(tmp_path, "study", manifest={"kind": "study", "study": {"objectives": {"accuracy": "maximize"}}})
    Run.create(tmp_path, "drnas", manifest={"law": {"bilevel": {"order": 1}}})
    Run.create(tmp_path, "plain", manifest={})
    kinds = {name: line["kind"] for name, line in listed(tmp_path).items()}
    assert kinds == {"study": "tune", "drnas": "gradient", "plain": "train"}
    made(tmp_path, "conv", (float("nan"),), "failed", reason="<b>loss</b> is nan")
    line = listed(tmp_path)["conv"]
    assert (line["state"], line["reason"], line["loss"]) == ("failed", "<b>loss</b> is nan", None)


def test_a_study_has_its_trials_and_its_best_value(tmp_path: Path) -> None:
    aims = {"accuracy": "maximize", "loss": "minimize"}
    run = Run.create(tmp_path, "study", manifest={"kind": "study", "study": {"objectives": aims}})
    run.events.append("started", trials=[], at=0, steps=3)
    for trial, values in enumerate(([0.5, 3.0], None, [0.75, 4.0])):
        run.events.append("ended", trials=[trial], values=values, state="complete")
    run.events.append("finished", steps=3)
    run.events.close()
    line = listed(tmp_path)["study"]
    assert (line["done"], line["steps"], line["metrics"]) == (3, 3, {"accuracy": 0.75, "loss": 3.0})


def test_one_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    made(tmp_path, "good")
    odd = {"format": 1, "config": 3, "law": [], "study": 1, "device": {}, "created": [], "kind": []}
    wrong = {
        "cut": "{",
        "list": "[]",
        "newer": '{"format": 99}',
        "deep": '{"format": 1, "config": ' + '{"a":' * 900 + "1" + "}" * 901,
        "huge": "{}",
        "odd": json.dumps(odd),
    }
    for name, text in wrong.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(text)
    (tmp_path / "none" / "results").mkdir(parents=True)
    os.truncate(tmp_path / "huge" / "manifest.json", 1 << 30)
    (tmp_path / "not a run").mkdir()
    (tmp_path / "file").write_text("")
    lines = listed(tmp_path)
    assert set(lines) == {"good", "none", *wrong}
    for name in ("cut", "list", "newer", "none", "huge"):
        assert lines[name]["state"] == "damaged"
        assert lines[name]["reason"]
        with pytest.raises(Exception, match="manifest"):
            Library.under(tmp_path).get(("runs", name))
    assert lines["good"]["state"] == "finished"
    assert lines["odd"]["state"] == "interrupted"


def test_a_name_is_looked_up_and_never_made_into_a_path(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    made(root, "conv")
    made(tmp_path, "secret")
    library = Library.under(root)
    for name in ("..", ".", "", "../secret", "..%2fsecret", str(tmp_path / "secret"), "conv/", "conv\0", "Conv"):
        for address in (("runs", name), ("runs", name, "curves"), ("plans", name)):
            with pytest.raises(NotFound, match="there is no"):
                library.get(address)
    with pytest.raises(NotFound, match="there is no view 'curve'; did you mean 'curves'"):
        library.get(("runs", "conv", "curve"))


def test_links_that_lead_out_of_the_runs_are_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    inside = made(root, "inside")
    outside = made(tmp_path, "outside")
    (root / "linked").symlink_to(outside.path)
    (root / "again").symlink_to(inside.path)
    (root / "round").symlink_to(root / "round")
    expected = {"inside": "finished", "again": "finished"}
    for name in ("events.jsonl", "manifest.json", "results", "traces", "lock"):
        run = made(root, f"with-{name}").path
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside.path / name if (outside.path / name).exists() else tmp_path)
        expected[run.name] = "damaged"
    assert {name: line["state"] for name, line in listed(root).items()} == expected
    library = Library.under(root)
    with pytest.raises(Exception, match=r"'events\.jsonl' is a link that leads out"):
        library.get(("runs", "with-events.jsonl", "curves"))


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("events.jsonl", "lock", "manifest.json"):
        run = made(tmp_path, f"with-{name}").path
        (run / name).unlink()
        os.mkfifo(run / name)
    assert {line["state"] for line in listed(tmp_path).values()} == {"damaged"}


def test_the_configuration_has_flat_names(tmp_path: Path) -> None:
    made(tmp_path, "conv")
    found = read(Library.under(tmp_path), "runs", "conv")
    train = {"train.steps": 4, "train.stages": 2, "train.metrics": ["accuracy"]}
    assert found["config"] == {"data": "digits", **train, "limits": {}}
    assert found["manifest"]["law"] == {"seed": 0}
    Run.create(tmp_path, "plain", manifest={"law": {"seed": 3, "stream": {"spacing": 2}}})
    assert read(Library.under(tmp_path), "runs", "plain")["config"] == {"seed": 3, "stream.spacing": 2}
    assert flatten({}) == {}


def test_of_a_long_event_file_the_list_reads_both_ends(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "long", manifest={})
    with open(run.path / "events.jsonl", "wb") as out:
        out.write(b'{"event": "started", "time": 10.0, "at": 0, "steps": 9}\n')
        out.seek(LARGE)
        out.write(b'\n{"event": "step", "time": 12.0, "step": 7, "loss": 0.5}\n')
        out.write(b'{"event": "finished", "time": 13.0, "fingerprint": "cd"}\n')
    line = listed(tmp_path)["long"]
    found = (line["done"], line["steps"], line["loss"], line["seconds"], line["state"], line["fingerprint"])
    assert found == (8, 9, 0.5, 3.0, "finished", "cd")
    assert line["damaged"] is None  # nobody has looked at the middle
    assert read(Library.under(tmp_path), "runs", "long", "curves")["damaged"] == 1


def test_a_document_is_made_once_until_a_file_changes(tmp_path: Path) -> None:
    run = made(tmp_path, "conv", end=None)
    other = made(tmp_path, "other")
    library = Library.under(tmp_path)
    addresses = [("runs",), ("runs", "conv"), ("runs", "conv", "curves"), ("runs", "other", "curves")]
    before = [library.get(address) for address in addresses]
    assert [library.get(address) for address in addresses] == before
    assert all(library.get(address) is found for address, found in zip(addresses, before, strict=True))
    with run.locked():
        run.events.append("step", step=2, loss=1.0)
    after = [library.get(address) for address in addresses]
    assert [new.tag != old.tag for new, old in zip(after, before, strict=True)] == [True, True, True, False]
    assert json.loads(after[1].body)["done"] == 3
    assert json.loads(after[1].body)["revision"] != json.loads(before[1].body)["revision"]
    with hold(other.path / "lock"):  # another state, though no event has come
        states = {line["name"]: line["state"] for line in read(library, "runs")["runs"]}
    assert states == {"conv": "interrupted", "other": "running"}
