"""`weft trace`: what it prints and writes of a run with traces, and how it answers one without."""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from weft.cli import main
from weft.engine.consistency import Exact
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.simulator import Simulated, simulate
from weft.pipeline.workload import Workload
from weft.runs import Run
from weft.trace.recorder import TraceRecorder

EPOCH = 2.0**31


def weft(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str, str]:
    """Calls the command line in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def simulated(latency: float) -> Simulated:
    work = Workload(2, 1, 3, lambda n: [(0, 0), (1, 1)], lambda layer: Exact())
    return simulate(work, (1,), SchedulePolicy(4), latency)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Run.create(tmp_path, "r", manifest={}).path


def write(run: Path) -> None:
    """Three steps on two stages, one after the other: 0F 1F 1B 0B, with messages of a quarter of a second."""
    for stage in range(2):
        tracer = TraceRecorder(run / "traces" / f"stage{stage}.jsonl", stage)
        tracer.start(0, 2, (1,), 1, simulated(0.0).spans if stage == 0 else None)
        for span in simulated(0.25).spans:
            if span.op.stage == stage:
                tracer.op(span.op, EPOCH + span.start, EPOCH + span.end, 1)
            if (span.op.stage, span.op.kind) in ((0, "F"), (1, "B")):
                if span.op.stage == stage:
                    tracer.sent(span.op.kind, span.op.microbatch, EPOCH + span.end, 8)
                else:
                    tracer.received(span.op.kind, span.op.microbatch, EPOCH + span.end + 0.25)
        tracer.close()


def test_a_person_reads_shares_bubbles_and_the_worst_waits(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run)
    code, out, err = weft(monkeypatch, "trace", run)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    # 3 steps of 1 + 2 + 1 + 2 seconds and two messages: 19.5 s, of which each stage works 9.
    assert "19.5 s; bubble 0.538" in out
    assert "simulated: 18 s for the first 3 steps, which took 19.5 s (-7.7 %); bubble 0.500" in out
    assert re.search(r"0 .* 46\.2 % .* 6 .* 0\.3077 .* 1 .* 1750 ms .* 3500 ms", out)
    assert re.search(r"0B0 .* 3500 ms .* 1 s .* 1B0", out)
    assert re.search(r"1F0 .* 1250 ms .* 0 s .* 0F0", out)
    assert "ui.perfetto.dev" in out
    drawn = json.loads((run / "traces" / "trace.json").read_text())
    names = {event["args"]["name"] for event in drawn["traceEvents"] if event["name"] == "process_name"}
    assert names == {"stage 0", "stage 1", "simulated stage 0", "simulated stage 1"}
    assert sum(event["ph"] == "X" for event in drawn["traceEvents"]) == 24
    assert sum(event["ph"] == "s" for event in drawn["traceEvents"]) == 6


def test_json_is_one_document_and_the_file_goes_where_it_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run)
    file = tmp_path / "mine.json"
    code, out, err = weft(monkeypatch, "trace", run, "--out", file, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    said = json.loads(out, parse_constant=pytest.fail)
    assert (said["run"], said["trace"], said["time"], said["cut"]) == (str(run), str(file), 19.5, [1])
    assert said["bubble"] == pytest.approx(1 - 18 / 39)
    assert said["simulated"]["error"] == pytest.approx(18 / 19.5 - 1)
    assert [row["busy"] for row in said["stages"]] == [9, 9]
    assert len(said["waits"]) == 6
    assert "traceEvents" in json.loads(file.read_text())
    assert not (run / "traces" / "trace.json").exists()


def test_a_run_without_traces_is_answered_with_one_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = weft(monkeypatch, "trace", run)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "has no traces" in err
    assert not (run / "traces").exists()


def test_mistakes_end_with_one_line_and_code_2(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run)
    for arguments, words in (
        ([run.with_name("q")], "is not a run"),
        ([run, "--out", tmp_path / "none" / "t.json"], "cannot write"),
        ([], "Missing argument"),
    ):
        code, out, err = weft(monkeypatch, "trace", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err
