"""What the guides and pages show is true: their blocks run, and their figures are in result files."""

from __future__ import annotations

import json
import re
import shlex
import statistics
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


def test_the_guide_to_planning_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, script = (text for language, text in blocks("how-to/plan.md") if language == "python")
    (folder / "mymodel.py").write_text(own)
    names: dict[str, Any] = {}
    exec(compile(script, "<a block>", "exec"), names)
    assert names["plan"].reasons() == []
    shell = next(text for language, text in blocks("how-to/plan.md") if text.startswith("weft plan"))
    line = next(line for line in shell.splitlines() if "mymodel" in line)
    for more in ("", " --keep '0=n' --keep '2=replicated' --save plan.json", " --load plan.json --html plan.html"):
        monkeypatch.setattr(sys, "argv", shlex.split(line + more if "#" not in line else line.split("#")[0] + more))
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, line + more
    assert (folder / "plan.html").is_file()
    sys.modules.pop("mymodel", None)


def test_every_figure_of_the_page_on_the_planner_is_in_a_result_file() -> None:
    page = (DOCS / "explanation/planner.md").read_text()
    results = DOCS.parent / "benchmarks" / "results"
    rows = json.loads((results / "planner-published.json").read_text())["rows"]
    names = {"alexnet": "AlexNet", "inception3": "Inception-v3", "rnnlm": "RNNLM", "transformer": "Transformer"}
    for network, shown in names.items():
        for machine in ("1080Ti", "2080Ti"):
            own = {r["p"]: r for r in rows if (r["network"], r["machine"]) == (network, machine)}
            cells = [
                " / ".join(f"{own[p][key]:.2f}" for p in (4, 16, 64)) for key in ("paper", "published", "corrected")
            ]
            assert f"| {shown}, {machine} | {' | '.join(cells)} |" in page
    assert f"up to {1 + max(r['over_optimum'] for r in rows):.1f} times" in page
    found = json.loads((results / "planner-predicted-gpu.json").read_text())
    errors = [abs(r["error"]) for r in found["rows"] if r["dtype"] == "float32"]
    longer = [r["measured_ms"] / r["predicted_ms"] for r in found["rows"] if r["dtype"] == "bfloat16"]
    assert f"the median error is\n{100 * statistics.median(errors):.0f} %" in page
    assert f"{statistics.median(longer):.1f} times as long" in page
    applied = json.loads((results / "planner-applied.json").read_text())
    for claim, shown in zip(applied["claims"], ("AlexNet", "RNNLM"), strict=True):
        paper = ", ".join(f"{value:.2f}" for value in claim["paper"].values())
        assert f"| {shown} | {claim['measured']:.2f} | {claim['predicted']:.2f} | {paper} |" in page
    taus = {name: f"{tau['step']:.2f}" for name, tau in applied["tau"].items()}
    for name, words in {
        "alexnet": "for AlexNet",
        "transformer": "for a small transformer",
        "rnnlm": "for a small",
    }.items():
        assert f"{taus[name]} {words}" in page
    assert f"{taus['mlp']} for an MLP and {taus['convnet']} for a small convolutional" in page
    again = [tau["again"] for tau in applied["tau"].values()]
    assert f"agree by {min(again):.2f} to {max(again):.2f}" in page
    assert f"tau is {found['tau']['float32']:.2f} and {found['tau']['bfloat16']:.2f}" in page


PAGES = ["how-to/gradient-search.md", "how-to/plan.md", "explanation/mixtures.md", "explanation/planner.md"]


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text())
    assert all(link.startswith("http") or (DOCS / page).parent.joinpath(link).exists() for link in links)
