"""What the guide to gradient search and the page on mixtures show is true: every block of them runs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.cli import main
from weft.config import read_config
from weft.runs import list_runs

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str) -> list[tuple[str, str]]:
    """The blocks of a page in order, each with its language."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As for a user who works in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    sys.modules.pop("mynet", None)


def run(code: str, names: dict[str, Any]) -> None:
    """A piece of a script, with few steps: what it says of time and quality is not looked at here."""
    exec(compile(re.sub(r"steps=2000", "steps=4", code), "<a block>", "exec"), names)


def command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line, comments=True)
    few = ["--train.steps=4", "--train.threads=1", "--search.warmup=0", "--search.budget=4"]
    monkeypatch.setattr(sys, "argv", [*words, *(few if words[1] == "search" else few[:2])])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code, line


def test_the_guide_to_gradient_search_runs_from_its_first_block_to_its_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names: dict[str, Any] = {"__name__": "__main__"}
    ran = []
    for language, text in blocks("how-to/gradient-search.md"):
        file = re.match(r"# (\w+\.py)\n", text)
        if language == "python" and file and "__main__" not in text:
            (folder / file[1]).write_text(text)
        elif language == "python":
            run(text, {"__name__": "__main__"} if file else names)
        elif language == "toml":
            (folder / "config.toml").write_text(text)
            assert read_config(folder / "config.toml").search.method == "drnas"
        else:
            for line in text.splitlines():
                command(line, monkeypatch)
        ran.append(language)
    assert ran.count("python") == 7
    assert ran.count("toml") == 1
    found = {run.name: run.state for run in list_runs(folder / "runs")}
    wanted = {"digits", "config", "other", "cooler", "staged", "staged-too", "smaller", "again"}
    assert wanted <= set(found)
    assert set(found.values()) == {"finished"}
    fingerprints = [
        next(event["fingerprint"] for event in events(folder, name) if event["event"] == "finished")
        for name in ("config", "staged-too")
    ]
    assert fingerprints[0] == fingerprints[1]
    assert (folder / "runs" / "config" / "results" / "search" / "probabilities.svg").is_file()
    assert (folder / "runs" / "config" / "results" / "others" / "front.json").is_file()


def events(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    from weft.runs import Run

    return Run.open(folder / "runs" / name).events.read()


def test_what_the_page_on_mixtures_asserts_holds(folder: Path) -> None:
    pieces = blocks("explanation/mixtures.md")
    assert [language for language, _ in pieces] == ["python"] * 4
    names: dict[str, Any] = {}
    for _, text in pieces:
        assert "assert" in text
        run(text, names)


@pytest.mark.parametrize("page", ["how-to/gradient-search.md", "explanation/mixtures.md"])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text())
    assert all(link.startswith("http") or (DOCS / page).parent.joinpath(link).exists() for link in links)
