"""weft simulate: rows by number of stages, and advice that would work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.cli import main
from weft.data import digits
from weft.pipeline import Optimizer
from weft.simulation import simulate_run
from weft.zoo import digits_conv

ARGUMENTS: dict[str, Any] = {"steps": 60, "batch_size": 32, "stream": "iid", "optimizer": Optimizer("sgd", lr=0.1)}


def test_advice_names_changes_that_shorten_the_wait() -> None:
    found = simulate_run(digits_conv, digits(), ARGUMENTS, [1, 4, 99], costs="equal")
    one, four, too_many = found["rows"]
    assert one["bubble"] == 0
    assert four["steady_bubble"] > 0.5
    assert "use 1 to 9 stages" in too_many["note"]
    assert all(row["steady_bubble"] < four["steady_bubble"] for row in found["advice"])
    assert [row["steady_bubble"] for row in found["advice"]] == sorted(row["steady_bubble"] for row in found["advice"])
    # Each change alone is in the list, and all of them together are best.
    assert found["advice"][0]["change"] == "stream = spaced, consistency.shared = lagged(8), microbatches = 4"
    changed = {**ARGUMENTS, "stream": "spaced", "consistency": {"shared": "lagged(8)"}, "microbatches": 4}
    again = simulate_run(digits_conv, digits(), changed, [4], costs="equal")
    assert again["rows"][0]["steady_bubble"] == pytest.approx(found["advice"][0]["steady_bubble"])


def test_the_verb_prints_a_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('supernet = "digits-mlp"\n[train]\nsteps = 40\nbatch_size = 32\nstream = "iid"\n')
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", "simulate", str(config), *words])
        try:
            main()
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return int(code), out, err

    code, out, _ = run("--stages", "1,2", "--json", "--costs", "equal")
    assert code == 0
    assert [row["stages"] for row in json.loads(out)["rows"]] == [1, 2]
    code, out, _ = run("--stages", "2", "--jitter", "0.2", "--latency", "0.001")
    assert code == 0
    assert "what would help on 2 stages" in out
    assert run("--stages", "two")[0] == 2
    assert "did you mean 'equal'" in run("--costs", "equl")[2]
    assert not (tmp_path / "runs").exists()
