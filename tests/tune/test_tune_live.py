"""What a person sees of a study: trials, devices as bars, the best, and where the time went."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from weft.tune import Device, StudyResult
from weft.tune.jobs import StudyProgress, TrialProgress
from weft.tune.progress import LiveTable, render, summary
from weft.tune.study.storage import TrialRecord


def board() -> StudyProgress:
    made = StudyProgress(
        "s", 9, ("loss",), ("minimize",), [Device("cuda:0", 8 * 2**30), Device("cuda:1", 2**30, "n", True)]
    )
    rows = [
        TrialProgress(0, {}, "complete", "cuda:0", (0,), 2**30, 2**29, 10, (0.5,), 1, ran=4.0, waited=1.0),
        TrialProgress(1, {}, "complete", "cuda:0", (0,), 2**30, 2**29, 10, (0.25,), 1, ran=2.0, starting=0.5),
        TrialProgress(2, {}, "running", "cuda:0", (0,), 2 * 2**30, None, 5, (0.75,), 2),
        TrialProgress(3, {}, "failed", "cuda:0", (0,), reason="ValueError: no"),
        TrialProgress(4, {}),
    ]
    made.trials = {row.number: row for row in rows}
    return made


def text(*printed: object) -> str:
    console = Console(file=io.StringIO(), width=160, force_terminal=False)
    console.print(*printed)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_board_knows_the_best_trial_what_is_on_a_device_and_where_the_time_went() -> None:
    made = board()
    assert made.best() is made.trials[1]
    made.directions = ("maximize",)
    assert made.best() is made.trials[0]
    assert made.used(0) == (1, 2 * 2**30)
    assert made.used(1) == (0, 0)
    assert made.time_breakdown() == {"running": 6.0, "waiting": 1.0, "starting": 0.5}


def test_the_table_shows_every_trial_with_its_memory_and_the_devices_as_bars() -> None:
    lines = text(render(board())).splitlines()
    assert lines[0].startswith("study s: 3 of 9 trials ended | 1 running | 1 failed | best loss 0.25 (trial 1)")
    assert "1 trial, 2.0 GiB of 8.0 GiB" in lines[1]
    assert lines[2].strip().endswith("away")
    rows = {line.split("│")[1].strip(): line for line in lines if line.startswith("│")}
    assert list(rows) == ["2", "4", "3", "1", "0"]  # what moves, then what ended last
    assert all(word in rows["2"] for word in ("running", "cuda:0", "2.0 GiB", "0.75", "attempt 2"))
    assert all(word in rows["0"] for word in ("complete", "1.0 GiB", "512.0 MiB", "0.5"))
    assert "ValueError: no" in rows["3"]


def test_the_summary_names_the_best_trials_what_mattered_and_the_shares_of_time() -> None:
    records = [
        TrialRecord(n, {"x": 0.5 * n, "k": "a"}, "complete", (value,)) for n, value in enumerate((3.0, 1.0, 2.0))
    ]
    trials = [*records, TrialRecord(3, {"x": 0.0, "k": "a"}, "failed")]
    shares, times = {"x": 0.75, "k": 0.25}, {"running": 6.0, "waiting": 2.0, "starting": 0.0}
    study = ("s", Path("runs/s"), "sqlite:///s.db", ("loss",), ("minimize",))
    found = StudyResult(*study, trials, [records[1]], shares, times, 5.0)
    console = Console(file=io.StringIO(), width=160, force_terminal=False)
    summary(console, found)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    order = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert order == ["1", "2", "0"]
    assert "3 complete, 1 failed" in printed
    assert "what mattered for loss: x 75%, k 25%" in printed
    assert "running 6.0 s (75%), waiting 2.0 s (25%), starting 0.0 s (0%); 5.0 s in all" in printed
    assert found.best == records[1]


def test_nothing_is_shown_where_nobody_looks() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with LiveTable(console) as live:
        live.update(board())
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
