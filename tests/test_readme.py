"""What the README shows is true: its program runs, and each figure that it quotes is in its result file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def row(found: dict[str, Any], **of: object) -> dict[str, Any]:
    """The one row of a result file that has these values."""
    (only,) = [row for row in found["rows"] if all(row[key] == value for key, value in of.items())]
    return only


Result = dict[str, Any]
QUOTED: list[tuple[str, str, Callable[[Result], tuple[str, ...]]]] = [
    (
        "Same bits on any number",
        "race",
        lambda f: (f"{f['exact']['fingerprints']} fingerprint;", f"runs, {f['careless']['fingerprints']}"),
    ),
    ("Pipelines without waiting", "pipeline", lambda f: (f"{f['speedup_2_over_1']:.2f} times one process",)),
    (
        "Asynchronous pipelines",
        "paci",
        lambda f: (f"{row(f, method='weft-bounded', k=2)['step_ratio_to_torch_1f1b']:.2f} times as fast as torch's",),
    ),
    (
        "Elastic layers",
        "elastic-gpu",
        lambda f: (
            "{:.2f} of the largest".format(
                row(f, space="gpt-small", tokens=3152, what="network", mode="graph", precision="fp32", way="ours")[
                    "ratio"
                ]
            ),
        ),
    ),
    (
        "Supernets larger",
        "residency",
        lambda f: (
            "{state_gib:.1f} GiB of state in {budget_gib:.1f} GiB, at {step_ms:.1f} ms".format(
                **row(f, space="NLP.c0", tokens=8192, way="weft")
            ),
            "takes {step_ms:.1f}".format(**row(f, space="NLP.c0", tokens=8192, way="resident")),
        ),
    ),
    (
        "**Studies**",
        "tune",
        lambda f: ("64 trials {ratio:.2f} times".format(**row(f, trials=64, way="packed", mps=True)),),
    ),
    ("Memory before you run", "memory-expandable", lambda f: (f"{f['summary']['fresh']['reserved']['p95']:.1%}",)),
    ("**Plans**", "planner", lambda f: (f"{f['ratio_geomean']:,.0f} times less time",)),
]


def test_the_program_on_the_first_screen_prints_what_the_readme_says(tmp_path: Path) -> None:
    code, printed = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    shown, seen = printed.splitlines(), done.stdout.splitlines()
    assert len(seen) == len(shown)
    assert re.fullmatch(r"[0-9a-f]{16}", seen[0])  # the bits depend on the processor, the rest is of the same kind
    assert re.fullmatch(r"(block\d=(wide|narrow|skip) ?){6}", seen[1])
    assert float(seen[2]) > 0.9


@pytest.mark.parametrize(("start", "name", "figures"), QUOTED, ids=[name for _, name, _ in QUOTED])
def test_a_figure_that_the_readme_quotes_is_in_its_result_file(
    start: str, name: str, figures: Callable[[Result], tuple[str, ...]]
) -> None:
    (line,) = [line for line in README.splitlines() if line.startswith("| ") and start in line]
    measured = line.split(" | ")[1]
    for text in figures(json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())):
        text = text.replace(" %", "%").replace("%", " %")
        assert text in measured, (text, measured)


def test_every_row_of_the_table_of_features_is_checked() -> None:
    table = README[README.index("| what | measured |") : README.index("Each figure comes from")]
    assert table.count("\n| **") == len(QUOTED)
