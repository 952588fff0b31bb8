"""The document of a pipeline: it shows what ``weft trace`` prints, in a window, downsampled, and of torn files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import traceoracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from tracefiles import EPOCH, simulated, step, write, write_events
from traceoracle import read_by_line

from weft.errors import RunError
from weft.pipeline.simulator import Simulated, jitter
from weft.runs import Run
from weft.serve.views.pipeline import REMEDY, SPANS, WAITING, document, present
from weft.trace.analysis import bubble, busy, busy_shares, summary, worst_waits
from weft.trace.reader import read_traces

KEYS = {"traced", "remedy", "stages", "total", "window", "real", "simulated", "busy", "memory", "offload"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Run.create(tmp_path, "r", manifest={"config": {"train": {"window": None}}}).path


def spans(found: dict[str, Any], which: str = "real") -> dict[str, list[Any]]:
    """The rows by the names of their operations."""
    return {f"{row[0]}{row[1]}{row[2]}": row for row in found[which]["spans"]}


def write_rows(run: Path, stage: int, *rows: Any) -> None:
    (run / "traces").mkdir(parents=True, exist_ok=True)
    (run / "traces" / f"stage{stage}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# Two stages, one step of two micro-batches, forward 1, backward 2, a message takes half a second; a letter is half one:
#   stage 0: ffFF......bbbb..BBBB        micro-batch 0 is f and b, 1 is F and B
#   stage 1: ...ffbbbbFFBBBB
def two(run: Path, m: int = 2, **options: Any) -> Simulated:
    result = simulated(2, 2 // m, m=m, latency=0.5)
    write(run, result, m=m, latency=0.5, **options)
    return result


def test_two_stages_drawn_by_hand_are_shown_as_drawn(run: Path) -> None:
    two(run, expected=simulated(2, 1, m=2, latency=0.5).spans)
    write_events(run, {"event": "started", "at": 0}, step(0, "aa", "bb"))
    found = document(run)
    assert set(found) == KEYS
    assert (found["traced"], found["remedy"], found["total"], found["window"]) == (True, None, [0, 10], [0, 10])
    rows = spans(found)
    first = {"0F0": [0, 1], "0F1": [1, 2], "0B0": [5, 7], "0B1": [8, 10]}
    second = {"1F0": [1.5, 2.5], "1B0": [2.5, 4.5], "1F1": [4.5, 5.5], "1B1": [5.5, 7.5]}
    assert {name: row[5:7] for name, row in rows.items()} == {**first, **second}
    assert all(row[3:5] == [0, "aa" if name.endswith("0") else "bb"] for name, row in rows.items())
    assert rows["0B0"][9:] == ["for 1B0, which was not over", 3.0]
    assert rows["1F0"][9:] == ["for 0F0, which was not over", 1.5]
    assert rows["0F1"][9:] == [None, 0]
    assert [stage["busy"] for stage in found["stages"]] == [0.6, 0.6]
    assert [stage["bubble"] for stage in found["stages"]] == [0.4, 0.4]
    # Stage 1 has no input for 1.5 of 10 seconds, and nothing left to do for 2.5; stage 0 waits for the other alone.
    assert [stage["waits"] for stage in found["stages"]] == [
        {"input": 0.4, "weights": 0.0, "window": 0.0},
        {"input": 0.15, "weights": 0.0, "window": 0.0},
    ]
    assert [(stage["stage"], stage["blocks"]) for stage in found["stages"]] == [(0, [0, 1]), (1, [1, None])]
    expected = spans(found, "simulated")
    assert {name: row[5:7] for name, row in expected.items()} == {name: row[5:7] for name, row in rows.items()}
    assert expected["1B1"][:5] == [1, "B", 1, 0, "bb"]
    assert all(row[7:] == [None, None, None, 0] for row in expected.values())


def test_a_stage_whose_next_forward_lacks_weights_waits_for_weights(run: Path) -> None:
    """Exact order, every step uses the same layers: 0F1 has its input at once, and waits for the update after 0B0."""
    two(run, m=1)
    found = document(run)["stages"]
    assert found[0]["waits"]["weights"] > 0
    assert found[0]["waits"]["window"] == 0
    assert found[1]["waits"]["input"] > 0


def test_a_stage_whose_window_is_full_waits_for_a_place(tmp_path: Path) -> None:
    """Every step has layers of its own, so that nothing but the window holds a forward back."""
    narrow = Run.create(tmp_path, "narrow", manifest={"config": {"train": {"window": 2}}}).path
    write(narrow, simulated(4, 12, choices=12, window=2))
    waits = document(narrow)["stages"][0]["waits"]
    assert waits["window"] > 0.1 > waits["weights"] == 0


def test_updates_and_versions_follow_their_operation(run: Path) -> None:
    head = {"start": 0, "stages": 1, "cut": [], "microbatches": 1, "time": 0}
    ops = [["op", "F", 4, 10.0, 11.0, 1, 3], ["op", "B", 4, 11.0, 13.0, 1, 3, 5]]
    write_rows(run, 0, head, *ops, ["update", 2, 6, 13.0, 13.5])
    write_events(run, step(4, "cc"))
    assert document(run)["real"]["spans"] == [
        [0, "F", 4, 4, "cc", 0.0, 1.0, 3, None, None, 0],
        [0, "B", 4, 4, "cc", 1.0, 3.0, 3, 5, None, 0],
        [0, "U", 4, 4, "cc", 3.0, 3.5, 6, None, None, 0],
    ]


def test_a_run_that_was_resumed_counts_on_and_so_does_what_was_simulated(run: Path) -> None:
    result = simulated(2, 3)
    write(run, result, expected=result.spans, first=20)
    write_events(run, *(step(number, f"s{number}") for number in range(23)))
    found = document(run)
    for which in ("real", "simulated"):
        assert {tuple(row[2:5]) for row in found[which]["spans"]} == {(n, n, f"s{n}") for n in (20, 21, 22)}
    assert found["simulated"]["real_seconds"] == found["simulated"]["seconds"] == found["total"][1]


@settings(max_examples=40)
@given(
    stages=st.integers(1, 4),
    steps=st.integers(1, 6),
    m=st.integers(1, 3),
    consistency=st.sampled_from(["exact", "delayed(1)", "lagged(2)", "bounded(6, 1)"]),
    latency=st.sampled_from([0.0, 0.25, 1.5]),
    updates=st.sampled_from([0.0, 0.125]),
    spread=st.sampled_from([0.0, 0.4]),
    choices=st.integers(1, 3),
)
def test_every_wait_and_every_share_is_what_is_found_operation_by_operation(
    tmp_path_factory: pytest.TempPathFactory,
    stages: int,
    steps: int,
    m: int,
    consistency: str,
    latency: float,
    updates: float,
    spread: float,
    choices: int,
) -> None:
    run = tmp_path_factory.mktemp("run")
    result = simulated(stages, steps, m, consistency, latency, jitter(1, spread), choices)
    write(run, result, m=m, latency=latency, updates=updates)
    trace, by_line = read_traces(run), read_by_line(run)
    assert by_line is not None
    expected = oracle.worst_waits(by_line, 10**6)
    assert worst_waits(trace, 10**6) == expected
    found, printed = document(run), summary(trace)
    assert [own["busy"] for own in found["stages"]] == pytest.approx(
        [own["busy_share"] for own in printed["stages"]], abs=1e-4
    )
    by_stage = {own["stage"]: own["bubble"] for own in found["stages"]}
    assert sum(by_stage.values()) / len(by_stage) == pytest.approx(bubble(trace), abs=1e-4)
    rows = found["real"]["spans"]
    assert {f"{row[0]}{row[1]}{row[2]}": row[10] for row in rows if row[9]} == pytest.approx(
        {str(wait.op): wait.seconds for wait in expected}, abs=1e-6
    )
    for own in found["stages"]:
        assert sum(own["waits"].values()) <= own["bubble"] + 1e-3


def long(run: Path, steps: int, stages: int = 2) -> None:
    """A trace with more operations than are shown one by one: each stage works two thirds of its time."""
    starts = [(n, EPOCH + 3 * n) for n in range(steps)]
    rows = [row for n, at in starts for row in (["op", "F", n, at, at + 1, 1], ["op", "B", n, at + 1, at + 2, 1])]
    for stage in range(stages):
        write_rows(run, stage, {"start": 0, "stages": stages, "cut": list(range(1, stages)), "time": 0}, *rows)


def test_a_long_trace_is_shown_in_shares_and_its_parts_in_operations(run: Path) -> None:
    long(run, SPANS)
    found = document(run)
    assert found["real"]["spans"] == []
    buckets = found["real"]["buckets"]
    assert {row[0] for row in buckets} == {0, 1}
    for stage in (0, 1):
        own = [row for row in buckets if row[0] == stage]
        assert [row[1] for row in own[1:]] == [row[2] for row in own[:-1]], "without gap or overlap"
        assert (own[0][1], own[-1][2]) == tuple(found["total"])
        assert [row[3] for row in own] == pytest.approx([2 / 3] * len(own), abs=0.04)
    assert len(json.dumps(found)) < 500_000
    part = document(run, **{"from": "300", "to": 600.5})
    assert part["window"] == [300, 600.5]
    assert part["real"]["buckets"] is None
    # Micro-batches 100 to 200: those that touch an edge of the window too.
    assert {row[2] for row in part["real"]["spans"]} == set(range(100, 201))
    assert part["stages"] == found["stages"], "shares are of the whole run"


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=12),
    st.lists(st.integers(0, 30), min_size=2, max_size=6, unique=True).map(sorted),
)
def test_the_share_of_a_bucket_is_the_time_in_it_that_any_interval_covers(
    intervals: list[tuple[int, int]], edges: list[int]
) -> None:
    start = np.array([float(at) for at, _ in intervals])
    end = start + np.array([float(length) for _, length in intervals])
    none = np.zeros(0)
    ops = type("Ops", (), {"start": start, "end": end})
    stage: Any = type("Stage", (), {"ops": ops, "updates": {"start": none, "end": none}})
    covered = {half for at, length in intervals for half in range(at * 2, (at + length) * 2)}
    expected = [
        sum(half in covered for half in range(low * 2, high * 2)) / ((high - low) * 2) for low, high in pairwise(edges)
    ]
    assert busy_shares(busy(stage), np.array(edges, dtype=float)).tolist() == pytest.approx(expected)


def test_many_stages_and_steps_stay_below_half_a_megabyte(tmp_path: Path) -> None:
    run = tmp_path / "run"
    long(run, 200, stages=64)
    events = ({"event": "pipeline", "time": EPOCH + n, "busy": [0.123456] * 64} for n in range(3000))
    write_events(run, *events)
    found = document(run)
    assert len(json.dumps(found, separators=(",", ":"))) < 500_000
    assert len(found["busy"]["stages"]) == 64
    times = found["busy"]["time"]
    assert times == sorted(times)
    assert times[0] < 60 < 2900 < times[-1]
    assert all(value == pytest.approx(0.1235) for own in found["busy"]["stages"] for value in own)


def test_a_window_beyond_the_trace_is_cut_to_it_and_an_empty_one_refused(run: Path) -> None:
    two(run)
    queries: list[dict[str, Any]] = [{"from": "x"}, {"from": 3, "to": 2}, {"from": "nan"}, {"to": "inf"}]
    for query in (*queries, {"from": 1, "to": 1}):
        with pytest.raises(RunError, match="seconds since the first operation"):
            document(run, **query)
    assert document(run, **{"from": -5, "to": 99})["window"] == [0, 10]
    assert document(run, **{"from": 7})["window"] == [7, 10]
    assert set(spans(document(run, **{"from": 7.6}))) == {"0B1"}


@pytest.mark.parametrize("name", ["busy", "utilisation"])  # the second in events of older runs
def test_a_run_without_a_trace_has_its_busy_shares_and_says_how_to_get_one(run: Path, name: str) -> None:
    write_events(
        run,
        {"event": "started", "time": EPOCH},
        {"event": "pipeline", "time": EPOCH + 0.5, name: [0.6, None]},  # one stage has written nothing yet
        {"event": "pipeline", "time": EPOCH + 1, name: [0.5, 0.25]},
        {"event": "pipeline", "time": EPOCH + 2, name: [0.7, 0.75]},
        {"event": "pipeline", "time": EPOCH + 3, name: "fast"},
    )
    assert present(run)
    found = document(run)
    assert set(found) == KEYS
    assert (found["traced"], found["remedy"]) == (False, REMEDY)
    assert "--execution.trace true" in REMEDY
    assert found["busy"] == {"time": [0.5, 1, 2], "stages": [[0.6, 0.5, 0.7], [None, 0.25, 0.75]]}
    assert [(own["busy"], own["bubble"]) for own in found["stages"]] == [(0.6, 0.4), (0.5, 0.5)]


def test_a_run_of_one_device_has_no_pipeline_to_show(run: Path) -> None:
    write_events(run, {"event": "started"}, step(0, "aa"))
    assert not present(run)
    assert document(run)["stages"] == []


def test_a_trace_without_an_operation_says_to_wait(run: Path) -> None:
    write_rows(run, 0, {"start": 0, "stages": 2, "cut": [1]})
    found = document(run)
    assert present(run)
    assert (found["traced"], found["remedy"]) == (False, WAITING)


def test_what_is_torn_or_lost_or_damaged_is_shown_as_far_as_it_goes(run: Path) -> None:
    write(run, simulated(3, 4), updates=0.25)
    whole = document(run)
    path = run / "traces" / "stage0.jsonl"
    path.write_bytes(path.read_bytes()[:-15] + b"\n\x00\xff{[\n")
    (run / "traces" / "stage1.jsonl").write_bytes(b"")
    (run / "traces" / "stage2.jsonl").unlink()
    (run / "manifest.json").write_text("{")
    torn = '{"event": "step", "time": 1, "step": 0, "subn\n[1]\n{"event": "residency", "time": 1, "stages": 3}\n'
    (run / "events.jsonl").write_text(torn)
    found = document(run)
    json.dumps(found, allow_nan=False)
    kept = {name: row[5:7] for name, row in spans(found).items()}
    assert kept
    assert all(spans(whole)[name][5:7] == times for name, times in kept.items())
    assert [own["busy"] for own in found["stages"][1:]] == [0, 0]


@pytest.mark.parametrize(
    ("event", "loaded", "evicted"),
    [("offload", "loaded_bytes", "evicted_bytes"), ("residency", "brought", "sent")],  # the second in older runs
)
def test_what_was_offloaded_is_the_newest_that_all_stages_wrote(
    run: Path, event: str, loaded: str, evicted: str
) -> None:
    def row(uses: int, misses: int) -> dict[str, int]:
        return {"uses": uses, "misses": misses, loaded: 10, evicted: 5, "budget": 100}

    def total(hits: int, misses: int, stages: int) -> dict[str, int]:
        return {"hits": hits, "misses": misses, "loaded_bytes": 10 * stages, "evicted_bytes": 5 * stages}

    two(run)
    assert document(run)["offload"] is None
    write_events(run, {"event": event, "stages": [row(3, 1)]})
    assert document(run)["offload"] == total(2, 1, 1)
    write_events(run, {"event": event, "stages": [row(3, 1), row(5, 0)]})
    assert document(run)["offload"] == total(7, 1, 2)
    write_events(run, {"event": "finished", event: [row(9, 2), row(9, 2)]})
    assert document(run)["offload"] == total(14, 4, 2)


def test_subnets_are_found_wherever_in_a_long_file_their_step_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serve.event_log.EVENTS", 1000)
    result = simulated(1, 3)
    write(run, result, first=150)
    events = [step(n if n % 7 else 1000 + n, f"s{n}") for n in range(300)]
    write_events(run, *events[:152])
    with open(run / "events.jsonl", "a") as file:  # in another form than runs have it
        file.writelines(json.dumps(dict(reversed(own.items())), separators=(",", ":")) + "\n" for own in events[152:])
    rows = document(run)["real"]["spans"]
    assert {(row[3], row[4]) for row in rows} == {(150, "s150"), (151, "s151"), (152, "s152")}


def test_names_are_given_as_they_are_and_are_no_longer_than_a_name(run: Path) -> None:
    two(run)
    write_events(run, step(0, "<img src=x onerror=alert(1)>", "y" * 5000))
    names = {row[4] for row in document(run)["real"]["spans"]}
    assert names == {"<img src=x onerror=alert(1)>", "y" * 64}
