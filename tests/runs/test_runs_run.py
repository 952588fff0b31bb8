from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weft.errors import RunError
from weft.runs import Run
from weft.utils.files import write_json


def test_a_new_run_states_where_it_comes_from(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "runs", "first", manifest={"seed": 3, "config": {"steps": 10}, "note": "x"})
    assert (run.path, run.name) == (tmp_path / "runs" / "first", "first")
    manifest = Run.open(run.path).manifest
    assert manifest == run.manifest
    assert (manifest["seed"], manifest["config"], manifest["note"]) == (3, {"steps": 10}, "x")
    assert {"device", "data", "space", "git", "platform"} <= manifest.keys()
    assert manifest["command"] == sys.argv
    assert manifest["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert manifest["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", manifest["created"])


def test_a_directory_is_used_if_it_is_vacant_or_holds_a_run_that_may_exist(tmp_path: Path) -> None:
    names = {Run.create(tmp_path, manifest={}).name for _ in range(5)}
    assert len(names) == 5
    assert all(re.fullmatch(r"run-\d{8}-\d{6}-[0-9a-f]{4}", name) for name in names)
    Run.create(tmp_path, "r", manifest={"seed": 1})
    (tmp_path / "r" / "notes.txt").write_text("a user's own")
    with pytest.raises(RunError, match="already holds a run; resume it, or choose another name"):
        Run.create(tmp_path, "r", manifest={"seed": 2})
    assert Run.create(tmp_path, "r", manifest={"seed": 2}, exist_ok=True).manifest["seed"] == 1
    (tmp_path / "home").mkdir()
    assert Run.create(tmp_path, "home", manifest={}).name == "home"
    (tmp_path / "home" / "manifest.json").unlink()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match=r"holds 'thesis\.tex'"):
        Run.create(tmp_path, "home", manifest={}, exist_ok=True)


def test_the_commit_of_the_working_directory_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert Run.create(tmp_path / "runs", "none", manifest={}).manifest["git"] is None

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "x").write_text("1")
    git("add", "x")
    git("commit", "-m", "x")
    commit = git("rev-parse", "HEAD")
    assert Run.create(tmp_path / "runs", "clean", manifest={}).manifest["git"] == commit
    (tmp_path / "x").write_text("2")
    assert Run.create(tmp_path / "runs", "dirty", manifest={}).manifest["git"] == f"{commit}-dirty"


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "x\n"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="cannot be called"):
        Run.create(tmp_path, name, manifest={})
    run = Run.create(tmp_path, "ok", manifest={})
    with pytest.raises(RunError, match="cannot be called"):
        run.save_result(name, 1)


def test_what_is_not_a_run_is_not_opened(tmp_path: Path) -> None:
    Run.create(tmp_path, "digits-1", manifest={})
    with pytest.raises(RunError, match=r"is not a run: .*did you mean 'digits-1'"):
        Run.open(tmp_path / "digits-2")
    (tmp_path / "bad").mkdir()
    for text, words in [("{", "not valid JSON"), ("[]", "not the manifest"), ('{"format": 99}', "newer weft")]:
        (tmp_path / "bad" / "manifest.json").write_text(text)
        with pytest.raises(RunError, match=words):
            Run.open(tmp_path / "bad")


def test_manifest_fields_are_added_and_changed_on_disk(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "r", manifest={"seed": 1})
    other = Run.open(run.path)
    run.update_manifest(space="abc")
    other.update_manifest(data="def", seed=2)
    assert Run.open(run.path).manifest.items() >= {"space": "abc", "data": "def", "seed": 2}.items()
    with pytest.raises(TypeError):
        run.manifest["seed"] = 3  # type: ignore[index]


def test_results_are_kept_by_name(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "r", manifest={})
    path = run.save_result("front", [{"accuracy": 0.5}])
    assert path == run.path / "results" / "front.json"
    assert Run.open(run.path).result("front") == [{"accuracy": 0.5}]
    run.save_result("front", [])
    assert run.result("front") == []
    with pytest.raises(RunError, match="no result 'fronts'; did you mean 'front'"):
        run.result("fronts")


@pytest.mark.parametrize("end", ["finished", "stopped", "failed"])
def test_the_last_end_among_the_events_is_the_state(tmp_path: Path, end: str) -> None:
    run = Run.create(tmp_path, "r", manifest={})
    assert run.state() == "interrupted"
    with run.locked():
        run.events.append("step", step=0)
        assert run.state() == "running"
        run.events.append("failed")
        run.events.append(end)
        run.events.append("test")
        assert run.state() == "running"
    assert Run.open(run.path).state() == end
    run.events.drop_from(0)
    assert run.state() == "interrupted"


def test_leaving_the_lock_writes_the_events_even_after_an_error(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "r", manifest={})
    write_json(run.path / "lock", {"pid": 1, "host": "elsewhere"})  # nobody holds it, whatever it says
    assert run.state() == "interrupted"
    with pytest.raises(KeyError), run.locked():  # noqa: PT012
        run.events.append("step", step=0)
        raise KeyError
    assert run.state() == "interrupted"
    assert [event["step"] for event in Run.open(run.path).events.read()] == [0]


def test_checkpoints_live_in_the_run_and_locking_cleans_them(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "r", manifest={}, keep=1)
    for step in (1, 2):
        run.checkpoints.save(step, {"a.w": torch.ones(2)}, {})
    run.checkpoints.write_shard(3, "stage0", {})
    assert run.checkpoints.steps() == [2]
    with Run.open(run.path).locked() as again:
        assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-00000002"]
        assert again.checkpoints.load().step == 2


def test_the_test_set_gives_one_score_a_name(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "r", manifest={})
    assert run.test_scores == {}
    run.record_test("best", {"accuracy": 0.5, "loss": float("nan")})
    run.record_test("best", {"accuracy": 0.5, "loss": float("nan")})
    with pytest.raises(RunError, match=r"already used for 'best' on \d{4}-.*choose another name"):
        run.record_test("best", {"accuracy": 0.6})
    run.record_test("second", {"accuracy": 0.6})
    scores = [(name, use["scores"]) for name, use in Run.open(run.path).test_scores.items()]
    assert scores == [("best", {"accuracy": 0.5, "loss": "nan"}), ("second", {"accuracy": 0.6})]
    assert [event["name"] for event in run.events.read() if event["event"] == "test"] == ["best", "second"]
