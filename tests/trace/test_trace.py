"""Traces: what a recorder writes, what is read back, computed and drawn from it, and `weft trace`."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import disturbed
import pytest
import stages as nets
from command_line import weft
from hypothesis import given, settings
from hypothesis import strategies as st
from tracefiles import EPOCH, traced, write_trace
from traceoracle import Message, StageTrace, Trace, Update, Versions, columns, read_by_line, same

from weft import Optimizer
from weft.engine.consistency import parse_consistency
from weft.errors import RunError
from weft.pipeline.scheduler import Op, SchedulePolicy
from weft.pipeline.simulator import Simulated, Span, jitter, simulate
from weft.pipeline.workload import Workload
from weft.runs import Run
from weft.supernet.partition import best_cut
from weft.trace.analysis import bubble, busy, gaps, steady_bubble, summary, worst_waits
from weft.trace.perfetto import perfetto
from weft.trace.reader import read_traces
from weft.trace.recorder import TraceRecorder
from weft.trainer.api import train


def shared(blocks: int, m: int, steps: int, consistency: str = "exact") -> Workload:
    """A plain network: every micro-batch uses every layer."""
    return Workload(
        blocks, m, steps, lambda n: [(b, b) for b in range(blocks)], lambda layer: parse_consistency(consistency)
    )


def on(work: Workload, stages: int, **options: Any) -> Simulated:
    return simulate(work, best_cut([1.0] * work.blocks, stages), SchedulePolicy(2 * stages), **options)


def of(trace: Trace, *phases: str) -> list[dict[str, Any]]:
    return [event for event in perfetto(columns(trace))["traceEvents"] if event["ph"] in phases]


# Two stages, one step of two micro-batches, forward 1, backward 2, a message takes half a second; a letter is half one:
#   stage 0: ffFF......bbbb..BBBB        micro-batch 0 is f and b, 1 is F and B
#   stage 1: ...ffbbbbFFBBBB
TWO = on(shared(2, 2, 1), 2, latency=0.5)


def test_two_stages_drawn_by_hand_wait_for_what_the_drawing_says() -> None:
    trace = traced(TWO, latency=0.5)
    found = summary(columns(trace))
    assert found["time"] == 10
    assert [(row["busy"], row["idle"], row["busy_share"]) for row in found["stages"]] == [(6, 4, 0.6), (6, 4, 0.6)]
    assert [(row["ops"], row["ops_per_second"]) for row in found["stages"]] == [(4, 0.4), (4, 0.4)]
    assert [row["peak_in_flight"] for row in found["stages"]] == [2, 1]
    assert [(row["mean_wait"], row["worst_wait"]) for row in found["stages"]] == [(1.0, 3.0), (0.375, 1.5)]
    assert [row["bytes_sent"] for row in found["stages"]] == [201, 201]
    waits = [(wait["op"], wait["seconds"], wait["start"], wait["cause"], wait["source"]) for wait in found["waits"]]
    assert waits == [
        ("0B0", 3.0, 2.0, "op", "1B0"),
        ("1F0", 1.5, 0.0, "op", "0F0"),
        ("0B1", 1.0, 7.0, "op", "1B1"),  # half a second for each of the operation and its message: the first is named
    ]
    assert [wait["blocked"] for wait in found["waits"]] == [None, None, None]
    assert found["simulated"] is None


def stage(number: int, spans: list[tuple[str, int, float, float]], received: Sequence[Message] = ()) -> StageTrace:
    kept = tuple(Span(Op(number, kind, n), start, end) for kind, n, start, end in spans)  # type: ignore[arg-type]
    return StageTrace(number, kept, (1,) * len(kept), (), tuple(received))


def test_a_wait_has_the_cause_that_took_most_of_it() -> None:
    first = stage(0, [("F", 0, 0, 1), ("F", 1, 1, 2)])
    for arrived, start, cause in ((2, 3, "op"), (5, 6, "message"), (2.5, 8, "version or window")):
        second = stage(1, [("F", 1, start, start + 1)], [Message("F", 1, arrived)])
        wait = worst_waits(columns(Trace(0, (first, second))), 1)[0]
        assert (str(wait.op), wait.seconds, wait.cause, str(wait.source)) == ("1F1", start, cause, "0F1")
    # The first stage's buffer may be written later than the second's.
    early = Trace(0, (stage(0, [("F", 0, 0, 1)]), stage(1, [("F", 3, 6, 7)])))
    wait = worst_waits(columns(early), 1)[0]
    assert (wait.cause, str(wait.source)) == ("op", "0F3")


def test_an_operation_whose_input_lay_there_is_named_as_held_back() -> None:
    first = stage(0, [("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 0, 9, 10), ("F", 2, 10, 11)])
    second = stage(1, [("F", 0, 1, 2), ("B", 0, 2, 5), ("F", 1, 9, 10)], [Message("F", 0, 1), Message("F", 1, 2)])
    waits = {str(wait.op): wait for wait in worst_waits(columns(Trace(0, (first, second))), 10)}
    assert str(waits["0B0"].blocked) == "0F2"  # the first stage makes its own inputs
    assert (waits["1F1"].blocked, waits["1F1"].cause, waits["1F1"].seconds) == (None, "version or window", 4)
    assert waits["1F0"].blocked is None
    late = stage(1, [("F", 0, 1, 2), ("B", 0, 6, 7), ("F", 1, 7, 8)], [Message("F", 0, 1), Message("F", 1, 3)])
    waits = {str(wait.op): wait for wait in worst_waits(columns(Trace(0, (first, late))), 10)}
    assert waits["1B0"].blocked is None  # the input came in the meantime


@pytest.mark.parametrize("stages", [1, 2, 8])
@pytest.mark.parametrize("consistency", ["exact", "lagged(4)"])
def test_a_run_that_goes_as_simulated_has_the_figures_of_the_simulation(
    stages: int, consistency: str, tmp_path: Path
) -> None:
    result = on(shared(8, 2, 12, consistency), stages, latency=0.25)
    write_trace(traced(result, 0.25, m=2, since=EPOCH), tmp_path, simulated=result.spans)
    found = summary(read_traces(tmp_path))
    assert found["time"] == result.time
    assert tuple(row["busy"] for row in found["stages"]) == result.busy
    assert [row["busy_share"] for row in found["stages"]] == [part / result.time for part in result.busy]
    assert tuple(row["peak_in_flight"] for row in found["stages"]) == result.peak
    bubbles = {"bubble": result.bubble, "steady_bubble": result.steady_bubble}
    assert {name: found[name] for name in bubbles} == bubbles
    times = {"time": result.time, "real_time": result.time, "error": 0.0}
    assert found["simulated"] == {"steps": 12, **times, **bubbles}


@settings(max_examples=20)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 8), st.sampled_from(["exact", "lagged(2)"]), st.integers(0, 9)
)
def test_jittered_runs_have_the_figures_of_the_simulation(
    stages: int, m: int, steps: int, consistency: str, seed: int
) -> None:
    result = on(shared(4, m, steps, consistency), stages, duration=jitter(seed, 0.5))
    trace = columns(traced(result))
    assert bubble(trace) == pytest.approx(result.bubble, abs=1e-9)
    assert steady_bubble(trace) == pytest.approx(result.steady_bubble, abs=1e-9)
    # The rule starts what is ready: a stage that stands still does so for an input, never for anything else.
    assert {wait.cause for wait in worst_waits(trace, 10_000) if wait.seconds > 1e-6} <= {"op"}


def test_the_error_of_the_simulation_is_that_of_the_time_of_what_both_did() -> None:
    real = traced(on(shared(4, 1, 4), 2, latency=1.0))
    expected = on(shared(4, 1, 8), 2)
    found = summary(columns(Trace(0, real.stages, simulated=expected.spans)))["simulated"]
    assert (found["time"], found["steps"]) == (expected.time, 8)
    assert found["error"] == pytest.approx(on(shared(4, 1, 4), 2).time / (real.end - real.begin) - 1)
    assert found["error"] < 0


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=12),
            st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=4),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_busy_and_idle_time_of_every_stage_add_up_to_the_time_of_the_trace(
    drawn: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]],
) -> None:
    stages = []
    for number, (ops, changes) in enumerate(drawn):
        spans = [Span(Op(number, "F", n), at, at + took) for n, (at, took) in enumerate(sorted(ops))]
        updates = tuple(Update(1, n, at, at + took) for n, (at, took) in enumerate(changes))
        stages.append(StageTrace(number, tuple(spans), (1,) * len(spans), (), (), updates))
    trace = columns(Trace(0, tuple(stages)))
    found = summary(trace)
    cells = range(int(trace.begin), int(trace.end))
    for number, (one, row) in enumerate(zip(stages, found["stages"], strict=True)):
        worked = [any(start <= cell < end for start, end in one.intervals()) for cell in cells]
        assert (row["busy"], row["idle"]) == (sum(worked), len(cells) - sum(worked))
        work, idle = busy(trace.stages[number]), gaps(trace, number)
        shown = {cell for start, end in zip(*work, strict=True) for cell in range(int(start), int(end))}
        waited = [cell for start, end in zip(*idle[:2], strict=True) for cell in range(int(start), int(end))]
        assert sorted([*shown, *waited]) == list(cells)


def test_what_a_tracer_writes_is_read_back_to_the_last_bit(tmp_path: Path) -> None:
    result = on(shared(4, 2, 5, "lagged(2)"), 3, duration=jitter(1, 0.3))
    trace = traced(result, 0.125, m=2, since=EPOCH, updates=0.0)
    write_trace(trace, tmp_path, restart=3, simulated=result.spans)
    assert same(read_traces(tmp_path), Trace(3, trace.stages, (), 2, result.spans))


def test_nothing_is_written_before_a_flush_and_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "stage0.jsonl"
    tracer = TraceRecorder(path, 0)
    tracer.start(0, 1, ())
    before = path.read_bytes()
    for n in range(5):
        tracer.op(Op(0, "F", n), n, n + 1, 1)
    assert path.read_bytes() == before
    tracer.flush()
    tracer.flush()
    tracer.close()
    assert path.read_bytes().count(b"\n") == 6


def test_threads_lose_no_line_to_a_flush(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "stage0.jsonl"
    tracer = TraceRecorder(path, 0)
    tracer.start(0, 1, ())

    def record(first: int) -> None:
        for n in range(first, first + 2000):
            tracer.op(Op(0, "F", n), n, n + 1, 1)

    threads = [threading.Thread(target=record, args=(first,)) for first in (0, 2000, 4000)]
    pause = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            tracer.flush()
    finally:
        sys.setswitchinterval(pause)
    tracer.close()
    assert read_traces(tmp_path).stages[0].ops.microbatch.tolist() == list(range(6000))


def test_a_run_without_traces_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no traces"):
        read_traces(tmp_path)
    TraceRecorder(tmp_path / "traces" / "stage0.jsonl", 0).start(0, 2, (1,))
    with pytest.raises(RunError, match="no operation yet"):
        read_traces(tmp_path)


def test_perfetto_shows_every_operation_as_it_prints() -> None:
    result = on(shared(4, 2, 4, "lagged(2)"), 3, latency=0.5)
    trace = traced(result, 0.5, m=2, since=EPOCH, updates=0.0)
    shown = [event for event in of(trace, "X") if event["cat"] != "update"]
    found = {event["name"]: event for event in shown}
    assert len(shown) == len(found)
    assert found.keys() == {str(span.op) for span in result.spans}
    for span in result.spans:
        event, n = found[str(span.op)], span.op.microbatch
        times = round(span.start * 1e6), round((span.end - span.start) * 1e6)
        assert (event["pid"], event["ts"], event["dur"]) == (span.op.stage + 1, *times)
        assert (event["args"]["micro-batch"], event["args"]["step"]) == (n, n // 2)
        assert event["cat"] == {"F": "forward", "B": "backward"}[span.op.kind]
    changed = [event["args"] for event in of(trace, "X") if event["cat"] == "update" and event["pid"] == 1]
    assert changed == [{"layers": 2, "version": n} for n in range(1, 9)]


@st.composite
def runs(draw: st.DrawFn) -> tuple[Simulated, float]:
    """A run on some stages, and how long a message takes."""
    latency, vary = draw(st.sampled_from([0.0, 0.3])), jitter(draw(st.integers(0, 5)), 0.5)
    work = shared(4, 2, draw(st.integers(1, 6)), "lagged(2)")
    return on(work, draw(st.integers(1, 4)), latency=latency, duration=vary), latency


@settings(max_examples=20)
@given(runs(), st.booleans())
def test_perfetto_events_keep_the_rules_of_the_format(run: tuple[Simulated, float], beside: bool) -> None:
    (result, latency), stages = run, run[0].stages
    trace = traced(result, latency, m=2, since=EPOCH, updates=0.0)
    drawn = perfetto(columns(replace(trace, simulated=result.spans if beside else ())))
    assert json.loads(json.dumps(drawn, allow_nan=False)) == drawn
    assert set(drawn) == {"traceEvents", "displayTimeUnit"}
    events = drawn["traceEvents"]
    needed = {
        "M": {"args"},
        "X": {"ts", "dur", "cat"},
        "C": {"ts", "args"},
        "s": {"ts", "id", "cat"},
        "f": {"ts", "id"},
    }
    for event in events:
        assert needed[event["ph"]] | {"name", "pid", "tid"} <= event.keys()
        assert all(type(event[name]) is int and event[name] >= 0 for name in ("ts", "dur") if name in event)
        assert event["pid"] > 0  # Perfetto takes process 0 for the kernel's
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    expected = [f"simulated stage {s}" for s in range(stages)] if beside else []
    assert [named[pid] for pid in sorted(named)] == [f"stage {s}" for s in range(stages)] + expected
    assert {event["pid"] for event in events} == set(named)
    # On one thread events lie beside or within each other: others are dropped by Perfetto.
    for pid in named:
        own = [event for event in events if event["ph"] == "X" and event["pid"] == pid]
        open_until: list[int] = []
        for event in own:
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert all(event["ts"] + event["dur"] <= end for end in open_until)
            open_until.append(event["ts"] + event["dur"])


@settings(max_examples=20)
@given(runs())
def test_an_arrow_leads_from_the_operation_that_sent_a_message_to_the_one_that_took_it(
    run: tuple[Simulated, float],
) -> None:
    (result, latency), stages = run, run[0].stages
    events = perfetto(columns(traced(result, latency)))["traceEvents"]
    arrows: dict[int, list[str]] = {}
    last: dict[int, dict[str, Any]] = {}
    for event in events:  # as a viewer does: an arrow belongs to the last operation of its thread
        if event["ph"] == "X":
            last[event["tid"]] = event
        elif event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append(last[event["tid"]]["name"])
            slice_ = last[event["tid"]]
            assert slice_["ts"] <= event["ts"] <= slice_["ts"] + slice_["dur"]
            if event["ph"] == "f":
                assert (event["bp"], event["ts"]) == ("e", slice_["ts"])
    expected = [
        [str(span.op), str(Op(to, span.op.kind, span.op.microbatch))]
        for span in result.spans
        if 0 <= (to := span.op.stage + (1 if span.op.kind == "F" else -1)) < stages
    ]
    assert sorted(arrows.values()) == sorted(expected)


def test_an_arrow_of_a_message_that_left_before_its_operation_was_over_never_leads_back_in_time() -> None:
    first = StageTrace(0, (Span(Op(0, "F", 0), 0, 4),), (1,), (Message("F", 0, 1.0, 8),))
    second = stage(1, [("F", 0, 2, 3)], [Message("F", 0, 1.5)])
    drawn = [(event["ph"], event["ts"]) for event in of(Trace(0, (first, second)), "s", "f")]
    assert drawn == [("s", 2_000_000), ("f", 2_000_000)]


def test_counters_follow_what_is_in_flight_and_the_version() -> None:
    trace = traced(TWO, 0.5, updates=0.0)
    counters: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for event in of(trace, "C"):
        (value,) = event["args"].values()
        counters.setdefault((event["pid"], event["name"]), []).append((event["ts"] / 1e6, value))
    assert counters[1, "in flight"] == [(0, 1), (1, 2), (5, 2), (8, 1)]
    assert counters[1, "weights"] == [(7, 1), (10, 2)]


# A stage whose weights change while two micro-batches are under way. A letter is one second, the number below it the
# version that is seen: forwards 0 0 1, backwards 0 1 2, since an update follows each backward.
#   stage 0: F0 F1 B0 u  F2 B1 u  B2 u
SPLIT = [("F", 0, (0,)), ("F", 1, (0,)), ("B", 0, (0, 0)), ("u", 1, ()), ("F", 2, (1,)), ("B", 1, (0, 1))]
SPLIT += [("u", 2, ()), ("B", 2, (1, 2)), ("u", 3, ())]


def asynchronous(since: float = 0.0) -> Trace:
    spans, versions, updates = [], [], []
    for at, (kind, n, seen) in enumerate(SPLIT):
        if kind == "u":
            updates.append(Update(1, n, since + at, since + at + 1))
            continue
        spans.append(Span(Op(0, kind, n), since + at, since + at + 1))  # type: ignore[arg-type]
        versions.append(Versions(*seen))
    flying = (1, 2, 2, 2, 2, 1)
    return Trace(0, (StageTrace(0, tuple(spans), flying, (), (), tuple(updates), tuple(versions)),))


def test_versions_are_read_back_and_their_lag_is_counted_and_drawn(tmp_path: Path) -> None:
    write_trace(asynchronous(EPOCH), tmp_path)
    assert same(read_traces(tmp_path), asynchronous(EPOCH))
    trace = asynchronous()
    (row,) = summary(columns(trace))["stages"]
    assert row["version_lag"] == {"0": 1, "1": 2}
    assert (row["busy"], row["idle"], row["updates"], row["ops"]) == (9, 0, 3, 6)
    events = {event["name"]: event for event in of(trace, "X") if event["cat"] != "update"}
    assert events["0F2"]["args"] == {"micro-batch": 2, "step": 2, "in_flight": 2, "version_forward": 1}
    seen = {"version_forward": 0, "version_backward": 1, "version_lag": 1}
    assert events["0B1"]["args"] == {"micro-batch": 1, "step": 1, "in_flight": 2, **seen}
    counters = [(event["ts"], event["args"]["updates"]) for event in of(trace, "C") if event["name"] == "version lag"]
    assert counters == [(2_000_000, 0), (5_000_000, 1), (7_000_000, 1)]
    plain = traced(TWO, 0.5)
    assert [row["version_lag"] for row in summary(columns(plain))["stages"]] == [{}, {}]
    assert {event["name"] for event in of(plain, "C")} == {"in flight"}


def test_a_run_on_two_processes_is_traced_with_its_versions_and_all_its_updates(tmp_path: Path) -> None:
    """Every update waits for a norm, and most come between two operations."""
    trained = train(
        nets.plain,
        partial(disturbed.samples, "plain"),
        steps=6,
        batch_size=4,
        microbatches=2,
        consistency="bounded(2, 2)",
        optimizer=Optimizer(clip="global:1.0"),
        folder=tmp_path,
        stages=2,
        cut=[3],
        split_backward=True,
        trace=True,
    )
    found, trace = summary(read_traces(trained.path)), read_by_line(trained.path)
    assert trace is not None
    assert same(read_traces(trained.path), trace)
    finished = next(event for event in trained.run.events.read() if event["event"] == "finished")
    for one, window, layers in zip(trace.stages, (2, 1), (("embed", 3), ("out", 3)), strict=True):
        ops = {span.op: seen for span, seen in zip(one.spans, one.versions, strict=True)}
        assert len(ops) == len(one.spans)
        assert ops.keys() == {Op(one.stage, kind, n) for kind in "FB" for n in range(12)}  # type: ignore[arg-type]
        for op, seen in ops.items():
            n = op.microbatch
            forward = max(n + 1 - window, 0) // 2
            assert seen == (Versions(forward, n // 2) if op.kind == "B" else Versions(forward))
        row = found["stages"][one.stage]
        assert row["version_lag"] == finished["version_lag"].get(layers[0], {"0": 12})
        assert row["peak_in_flight"] <= window + (one.stage == 0)
        # Every layer's six updates, each of them counted once and none while something else was done.
        assert sum(update.layers for update in one.updates) == one.updates[-1].version == 6 * layers[1]
        work = sorted(one.intervals())
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(work))


def test_weft_trace_prints_shares_bubbles_and_the_worst_waits(tmp_path: Path) -> None:
    """Three steps on two stages, one after the other: 0F 1F 1B 0B, with messages of a quarter of a second."""
    run, work = Run.create(tmp_path, "r", manifest={}).path, shared(2, 1, 3)
    trace = traced(on(work, 2, latency=0.25), 0.25, since=EPOCH)
    write_trace(replace(trace, cut=(1,)), run, simulated=on(work, 2).spans)
    done = weft("trace", run)
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    # 3 steps of 1 + 2 + 1 + 2 seconds and two messages: 19.5 s, of which each stage works 9.
    assert "19.5 s; bubble 0.538" in done.out
    assert "simulated: 18 s for the first 3 steps, which took 19.5 s (-7.7 %); bubble 0.500" in done.out
    assert re.search(r"0 .* 46\.2 % .* 6 .* 0\.3077 .* 1 .* 1750 ms .* 3500 ms", done.out)
    assert re.search(r"0B0 .* 3500 ms .* 1 s .* 1B0", done.out)
    drawn = json.loads((run / "traces" / "trace.json").read_text())
    names = {event["args"]["name"] for event in drawn["traceEvents"] if event["name"] == "process_name"}
    assert names == {"stage 0", "stage 1", "simulated stage 0", "simulated stage 1"}
    file = tmp_path / "mine.json"
    found = weft("trace", run, "--out", file, "--json").json
    assert (found["run"], found["trace"], found["time"], found["cut"]) == (str(run), str(file), 19.5, [1])
    assert found["simulated"]["error"] == pytest.approx(18 / 19.5 - 1)
    assert len(found["waits"]) == 6
    assert json.loads(file.read_text()) == drawn
