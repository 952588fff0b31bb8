"""The guides that take long, and what they must come to; `make test-all` runs them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from pages import GUIDES, ROOT, Reader

from weft.runs import Run, list_runs

pytestmark = pytest.mark.long


def ends(folder: Path) -> dict[str, dict[str, Any]]:
    """The last event of every run, by its name, but for those of exports; all of them finished."""
    found = {}
    for run in list_runs(folder / "runs"):
        *_, found[run.name] = (event for event in Run.open(run.path).events.read() if event["event"] != "test")
    assert {event["event"] for event in found.values()} == {"finished"}
    return found


def copy_examples(folder: Path, *names: str) -> None:
    (folder / "examples").mkdir()
    for name in names:
        shutil.copy(ROOT / "examples" / name, folder / "examples")


def test_every_guide_is_run_here() -> None:
    assert sorted(GUIDES) == sorted(re.findall(r'read\("(.*?)"\)', Path(__file__).read_text()))


def test_the_guide_to_gradient_search_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Reader(folder).read("how-to/gradient-search.md")
    found = ends(folder)
    assert {"digits", "config", "other", "cooler", "staged", "staged-too", "smaller", "again"} <= set(found)
    assert found["config"]["fingerprint"] == found["staged-too"]["fingerprint"]
    assert (folder / "runs" / "config" / "results" / "search" / "mixture.json").is_file()
    assert (folder / "runs" / "config" / "results" / "others" / "front.json").is_file()


def test_the_guide_to_asynchronous_pipelines_runs(folder: Path) -> None:
    copy_examples(folder, "gpt.toml")
    (folder / "input.txt").write_text("To be, or not to be, that is the question.\n" * 200)
    small = ["--supernet.options={layers=6, heads=2, width=16, context=16}", "--data.options={context=16}"]
    small += ["--train.steps=1"]
    Reader(folder, options=dict.fromkeys(("train", "simulate", "verify"), small)).read("how-to/asynchronous.md")
    found = ends(folder)
    assert {"bounded", "alone", "deep"} <= set(found)
    assert found["bounded"]["fingerprint"] == found["alone"]["fingerprint"]
    assert len(found["deep"]["version_lag"]) == 63  # all layers but the last
    assert (folder / "runs" / "bounded" / "traces" / "trace.json").is_file()


def test_the_guide_to_several_devices_runs(folder: Path) -> None:
    Reader(folder).read("how-to/several-devices.md")
    assert set(ends(folder)) == {"script", "config"}


def test_the_guide_to_several_machines_runs_on_one(folder: Path) -> None:
    Reader(folder).read("how-to/several-machines.md")
    assert set(ends(folder)) == {"script", "config"}


def test_the_guide_to_tuning_runs(folder: Path) -> None:
    copy_examples(folder, "tune.toml", "tuned_net.py")
    Reader(folder, options={"tune": ["--study.name=second"]}).read("how-to/tune.md")
    assert {"digits", "second", "own"} == {path.parent.name for path in (folder / "runs").glob("*/study.db")}
