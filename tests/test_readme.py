"""What the README shows is true: its program runs, and every figure of its tables is in a result file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def rows(name: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
    return found


def test_the_program_on_the_first_screen_prints_what_the_readme_says(tmp_path: Path) -> None:
    code, printed = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    shown, seen = printed.splitlines(), done.stdout.splitlines()
    assert len(seen) == len(shown)
    assert re.fullmatch(
        r"[0-9a-f]{16}", seen[0]
    )  # the bits depend on the processor, the rest is the same kind of thing
    assert re.fullmatch(r"(block\d=(wide|narrow|skip) ?){6}", seen[1])
    assert float(seen[2]) > 0.9


def label(row: dict[str, object]) -> str:
    """As the README calls a row: with the layout only where both sides were told to have it."""
    told = row["device"] == "cuda" and row["space"] == "nas-bench-macro" and row["layout"] == row["plain_layout"]
    return f"{row['space']}, both {row['layout']}" if told else str(row["space"])


def test_every_figure_of_the_overhead_table_is_in_a_result_file() -> None:
    table = re.findall(r"^\| ([\w-]+(?:, both [a-z ]+)?) \| (1 core|H200) \| (.*?) \| (.*?) \| (.*?) \|", README, re.M)
    measured = [
        (
            label(row),
            "1 core" if row["device"] == "cpu" else "H200",
            *(f"{row[key]:.2f}" for key in ("plain_ms", "weft_ms", "ratio")),
        )
        for name in ("overhead-cpu", "overhead-gpu")
        for row in rows(name)
    ]
    assert table == measured


def test_every_figure_of_the_ranking_table_is_in_a_result_file() -> None:
    table = re.findall(
        r"^\| (iid|fair|spaced) \| (\S+) / (\S+) \| (\d+) / (\d+) \| (\S+) / (\S+) \| (\d+) / (\d+) \|", README, re.M
    )
    assert len(table) == 3
    for stream, *figures in table:
        wanted = []
        for name in ("search-quality", "search-quality-5000"):
            by = {(row["stream"], row["seed"]): row for row in rows(name)}
            pair = [by[stream, 0], by[stream, 1]]
            wanted += [*(f"{row['tau']:.2f}" for row in pair), *(str(row["pick_rank"]) for row in pair)]
        assert figures == wanted


def test_every_figure_of_the_bubble_table_is_in_a_result_file() -> None:
    table = re.findall(r"^\| (NLP\.c\d|CV\.c\d) \| (\S+) \| (\S+) \| (\S+) \|", README, re.M)
    by = {
        (row["space"], row["rule"], row["stream"], row["microbatches"]): f"{row['steady_bubble']:.3f}"
        for row in rows("schedules")
        if row["stages"] == 8
    }
    assert len(table) == 7
    for space, naspipe, finer, spaced in table:
        assert naspipe == by[space, "naspipe", "iid", 1]
        assert finer == by[space, "weft", "iid", 4]
        assert spaced == by[space, "weft", "spaced", 1]
