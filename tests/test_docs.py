"""What the guides and pages show is true: their blocks run, and their figures are in result files."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.cli import main
from weft.config import read_config
from weft.pipeline.consistency import clock, parse
from weft.pipeline.placement import Placement
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


def test_what_the_page_on_asynchronous_pipelines_asserts_holds(folder: Path) -> None:
    pieces = [text for language, text in blocks("explanation/asynchronous.md") if language == "python"]
    assert len(pieces) == 3
    for text in pieces:
        assert "assert" in text
        run(text, {})


def test_the_table_of_versions_is_what_the_law_says() -> None:
    drawn = next(text for language, text in blocks("explanation/asynchronous.md") if text.startswith("n   "))
    rows = [[int(word) for word in line[29:44].split()] for line in drawn.splitlines()]
    drifts = [[int(word) for word in line.split("drift")[1].split()] for line in drawn.splitlines() if "drift" in line]
    assert rows[0] == list(range(8))
    for stage in range(3):
        at = clock(parse("bounded(2, 3)"), stage, 3, 1, 8)
        assert rows[1] == [at.slot(n) for n in range(8)]
        assert rows[2] == [at.backward_reads(n) for n in range(8)]
        assert rows[3 + stage] == [at.forward_reads(n) for n in range(8)]
        assert drifts[stage] == [backward - forward for backward, forward in zip(rows[2], rows[3 + stage], strict=True)]


def test_the_guide_to_asynchronous_pipelines_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "examples").mkdir()
    shutil.copy(DOCS.parent / "examples" / "gpt.toml", folder / "examples")
    (folder / "input.txt").write_text("To be, or not to be, that is the question.\n" * 200)
    small = ["--supernet.options={layers=6, heads=2, width=16, context=16}", "--data.options={context=16}"]
    for language, text in blocks("how-to/asynchronous.md"):
        if language == "python":
            run(text, {})
        elif language == "toml":
            (folder / "config.toml").write_text(text)
            command("weft train config.toml", monkeypatch)
        for line in text.splitlines() if not language else ():
            words = shlex.split(line, comments=True)
            if words[1] != "trace":
                words += ["--train.steps=1", "--train.threads=1", "--train.workers=0"]
                words += [] if "--supernet.options" in words else small
            if words[1] == "verify":  # that two stages end as one does is seen below
                words[words.index("1,2")] = "1"
            monkeypatch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as end:
                main()
            assert not end.value.code, line
    found = {run.name: run.state for run in list_runs(folder / "runs")}
    assert {"bounded", "alone", "deep", "config"} <= set(found)
    assert set(found.values()) == {"finished"}
    ends = {name: next(e for e in events(folder, name) if e["event"] == "finished") for name in found}
    assert ends["bounded"]["fingerprint"] == ends["alone"]["fingerprint"]
    assert len(ends["deep"]["drift"]) == 63  # all layers but the last
    assert (folder / "runs" / "bounded" / "traces" / "trace.json").is_file()


def test_the_commands_for_several_stages_on_one_process_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "how-to/several-devices.md").read_text().split("## Several stages on one process")[1]
    drawn, lines = re.findall(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[:2]
    for row in drawn.splitlines():
        shape, *ranks = (part.split() for part in re.split(r" {2,}(?:rank \d: )?|rank \d: ", row) if part)
        stages = [tuple(map(int, words)) for words in ranks[:3]]
        placed = Placement(3, len(stages[0]), shape[0])
        assert stages == [placed.stages_of(rank) for rank in range(3)]
    (folder / "config.toml").write_text('supernet = "digits-mlp"\n[train]\nbatch_size = 8\nmicrobatches = 4\n')
    simulated, loop, vee, _ = lines.splitlines()
    command(simulated, monkeypatch)
    command(f"{loop} --dry-run", monkeypatch)
    command("weft train config.toml", monkeypatch)
    command(vee, monkeypatch)
    found = [next(e for e in events(folder, run) if e["event"] == "finished") for run in ("config", "vee")]
    assert found[0]["fingerprint"] == found[1]["fingerprint"]


def test_the_warnings_that_the_guide_quotes_are_those_of_the_code() -> None:
    page = " ".join((DOCS / "how-to/asynchronous.md").read_text().split())
    quoted = re.findall(r"- \*(?!\*)(.*?)\*", page.split("## What a run says")[1])
    assert len(quoted) == 9
    code = "".join(path.read_text() for path in (DOCS.parent / "src" / "weft" / "pipeline").glob("*.py"))
    literals = " ".join(
        node.value
        for node in ast.walk(ast.parse(code.replace("from __future__ import annotations", "")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    said = re.sub(r"\s+", " ", literals)
    for text in quoted:
        # Names and numbers are those of the example; what is between them is the message.
        pieces = [
            piece.strip(" :,.;'") for piece in re.split(r"'[^']*'|\w+\([^)]*\)|\b\d+( %)?|\.\.\.|\bn\b", text) if piece
        ]
        assert all(piece in said for piece in pieces if len(piece) > 4), text


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


def test_every_figure_of_the_page_on_asynchronous_pipelines_is_in_a_result_file() -> None:
    page = (DOCS / "explanation/asynchronous.md").read_text()
    results = DOCS.parent / "benchmarks" / "results"
    rows = json.loads((results / "delays.json").read_text())["rows"]
    losses: dict[tuple[str, str, int | None, int | None], dict[int, float]] = {}
    rates = {"adamw": min(row["lr"] for row in rows if row["optimizer"] == "adamw" and row["method"] == "lagged")}
    for row in rows:
        name = row["optimizer"]
        own = next(r["lr"] for r in rows if (r["optimizer"], r["method"]) == (name, "lagged"))
        if row["lr"] == rates.setdefault(name, own):
            losses.setdefault((name, row["method"], row["depth"], row["k"]), {})[row["seed"]] = row["val_loss"]
    names = ("adamw", "muon", "nadam")
    means = [statistics.mean(losses[name, "flush", None, None].values()) for name in names]
    assert f"| 0 | {' | '.join(f'{mean:.3f}' for mean in means)} |" in page

    def cell(name: str, method: str, depth: int | None, k: int | None) -> str:
        flush = losses[name, "flush", None, None]
        apart = [loss - flush[seed] for seed, loss in losses[name, method, depth, k].items()]
        assert len(apart) == 5
        return f"{statistics.mean(apart):+.3f} ± {2.776 * statistics.stdev(apart) / 5**0.5:.3f}"

    for depth in (2, 8, 16):
        for k in (depth // 2, depth, 2 * depth):
            told = " | ".join(cell(name, "bounded", depth, k) for name in names)
            assert f"| `bounded({k}, {depth})` | {(depth - 1) / (2 * k):.2f} | {told} |" in page
    assert f"| `lagged(1)` | 1.00 | {' | '.join(cell(name, 'lagged', None, None) for name in names)} |" in page
    found = json.loads((results / "shakespeare.json").read_text())
    flush, bounded = (next(row for row in found["rows"] if row["method"] == name) for name in ("flush", "bounded"))
    best = f"best validation loss is {bounded['best_val_loss']:.3f}, that of the flush {flush['best_val_loss']:.3f}"
    assert best in page
    assert f"published one {found['published']:.3f}" in page
    assert f"after {flush['best_step']:,} steps and `bounded` after {bounded['best_step']:,}" in page


PAGES = ["how-to/gradient-search.md", "how-to/plan.md", "explanation/mixtures.md", "explanation/planner.md"]
PAGES += ["how-to/asynchronous.md", "how-to/several-devices.md", "explanation/asynchronous.md"]


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text())
    assert all(link.startswith("http") or (DOCS / page).parent.joinpath(link).exists() for link in links)


NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, width, depth):
        hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        super().__init__(nn.Flatten(), nn.Linear(64, width), *hidden, nn.Linear(width, 10))
"""


def test_the_study_of_the_guide_to_tuning_runs_as_a_script(tmp_path: Path) -> None:
    code = next(text for language, text in blocks("how-to/tune.md") if language == "python")
    few = code.replace("trials=40", "trials=2").replace("steps=300", "steps=4").replace("report=50", "report=2")
    assert few.count("trials=2") == few.count("steps=4") == few.count("report=2") == 1
    (tmp_path / "script.py").write_text(NET + few)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "'width'" in done.stdout
    assert (tmp_path / "runs" / "digits" / "study.db").is_file()
