"""What the pages say is true: their tables follow from the law, and their figures are in result files."""

from __future__ import annotations

import ast
import json
import re
import statistics
from pathlib import Path

from weft.engine.consistency import parse_consistency, version_schedule

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str) -> list[tuple[str, str]]:
    """The blocks of a page in order, each with its language."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def test_the_table_of_versions_is_what_the_law_says() -> None:
    drawn = next(text for language, text in blocks("explanation/asynchronous.md") if text.startswith("n   "))
    rows = [[int(word) for word in line[29:44].split()] for line in drawn.splitlines()]
    drifts = [[int(word) for word in line.split("drift")[1].split()] for line in drawn.splitlines() if "drift" in line]
    assert rows[0] == list(range(8))
    for stage in range(3):
        at = version_schedule(parse_consistency("bounded(2, 3)"), stage, 3, 1, 8)
        assert rows[1] == [at.slot(n) for n in range(8)]
        assert rows[2] == [at.backward_reads(n) for n in range(8)]
        assert rows[3 + stage] == [at.forward_reads(n) for n in range(8)]
        assert drifts[stage] == [backward - forward for backward, forward in zip(rows[2], rows[3 + stage], strict=True)]


def literals() -> str:
    """All text in the code, a blank for every break."""
    paths = sorted((DOCS.parent / "src" / "weft").rglob("*.py"))
    found = [
        node.value
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return re.sub(r"\s+", " ", " ".join(found))


def unsaid(text: str, said: str) -> list[str]:
    """The pieces of a message that nobody says; names and numbers in it are those of an example."""
    pieces = re.split(r"'[^']*'|\w+\([^)]*\)|\b\d+(?: %)?|\.\.\.|\bn\b|[\w.]+ ?=", text)
    return [piece for piece in (piece.strip(" :,.;'?") for piece in pieces) if len(piece) > 4 and piece not in said]


def test_the_warnings_that_the_guide_quotes_are_those_of_the_code() -> None:
    page = " ".join((DOCS / "how-to/asynchronous.md").read_text().split())
    quoted = re.findall(r"- \*(?!\*)(.*?)\*", page.split("## What a run says")[1])
    assert len(quoted) == 7
    said = literals()
    assert {text: unsaid(text, said) for text in quoted} == {text: [] for text in quoted}


def test_the_refusals_that_guides_list_are_those_of_the_code() -> None:
    said = literals()
    found = 0
    for page in ("own-supernet", "gradient-search", "larger-than-memory"):
        text = (DOCS / "how-to" / f"{page}.md").read_text()
        table = re.search(r"^\| (?:what )?it says .*?(?=^$|\Z)", text, re.MULTILINE | re.DOTALL)
        assert table is not None, page
        for quoted in re.findall(r"^\| `(.*?)`", table[0], re.MULTILINE):
            assert unsaid(quoted, said) == [], (page, quoted)
            found += 1
    assert found >= 14
    assert unsaid("layer 'x' is purple", said) == ["is purple"]


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
