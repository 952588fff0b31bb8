"""Jobs as bars on lanes, and the ledger that a study's events come to."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft.serve.views.study_events import BARS, TRIALS, JobBar, StudyEvents, assign_lanes, device_bars

GIB = 2**30

times = st.integers(0, 20).map(float)
spans = st.lists(
    st.tuples(times, st.one_of(st.none(), times)).map(lambda s: (s[0], None if s[1] is None else s[0] + s[1])),
    max_size=25,
)


def test_a_job_takes_the_first_lane_that_is_free_when_it_starts() -> None:
    assert assign_lanes([(0, 4), (1, 2), (2, 5), (4, 6), (4, None), (9, 10)]) == [0, 1, 1, 0, 2, 0]
    assert assign_lanes([]) == []


def test_one_that_has_not_ended_keeps_its_lane() -> None:
    assert assign_lanes([(0, None), (100, 101), (200, 201)]) == [0, 1, 1]


@given(spans)
def test_no_two_of_a_lane_overlap_and_no_lane_is_taken_without_need(spans: list[tuple[float, float | None]]) -> None:
    lanes = assign_lanes(spans)
    far = 1e9
    placed = [(start, far if end is None else end, lane) for (start, end), lane in zip(spans, lanes, strict=True)]
    for at, (start, end, lane) in enumerate(placed):
        for other_start, other_end, other_lane in placed[:at]:
            if lane == other_lane:
                assert end <= other_start or other_end <= start
    # As many lanes as there are jobs at once at the worst moment, which is the start of one of them.
    most = max((sum(a <= start < b for a, b, _ in placed) for start, _, _ in placed), default=0)
    used = {lane for start, end, lane in placed if start < end}
    assert len(used) <= max(most, 1 if placed else 0)


def test_a_job_on_several_devices_is_a_bar_on_each() -> None:
    bars = [JobBar("a", [0], ["n/cuda:0", "n/cuda:1"], 10, 12, 5, 4, "complete"), JobBar("b", [1], ["n/cuda:1"], 11)]
    first, second = device_bars(bars, {"n/cuda:0": GIB, "n/cuda:1": GIB, "n/cuda:2": None}, 10)[:2]
    assert [bar["job"] for bar in first["bars"]] == ["a"]
    assert [(bar["job"], bar["start"], bar["end"], bar["lane"]) for bar in second["bars"]] == [
        ("a", 0, 2, 0),
        ("b", 1, None, 1),
    ]
    assert first["memory"] == GIB


def events(*events: dict[str, Any]) -> StudyEvents:
    """From events that come a second apart, from 100 on."""
    found = StudyEvents()
    for at, event in enumerate(events):
        found.add_line(json.dumps({"time": 100.0 + at, "trials": [], **event}).encode())
    return found


DEVICES = {"event": "devices", "now": ["local/cpu", "local/cpu"], "memory": [GIB, None], "gone": []}


def proposed(*numbers: int) -> list[dict[str, Any]]:
    return [{"event": "proposed", "trials": [n], "params": {"lr": 0.1 * n}} for n in numbers]


def placed(job: str, *numbers: int, **more: Any) -> dict[str, Any]:
    told = {"devices": "cpu", "node": "local", "places": [0], "memory": None, "estimated": 7 * 2**20}
    return {"event": "placed", "trials": list(numbers), "job": job, **told, **more}


def ended(number: int, state: str = "complete", **more: Any) -> dict[str, Any]:
    told = {"values": [0.5], "seconds": 2.5, "attempts": 1, "fused": 1, "peak": 6 * 2**20}
    return {"event": "ended", "trials": [number], "state": state, **told, **more}


def test_a_fused_job_is_one_bar_that_lasts_until_the_last_of_its_trials() -> None:
    job = placed("0-0", 0, 1)
    found = events({"event": "started"}, DEVICES, *proposed(0, 1), job, ended(1, fused=2), ended(0, fused=2))
    (bar,) = found.done
    assert (bar.trials, bar.start, bar.end, bar.state) == ([0, 1], 104.0, 106.0, "complete")
    assert (bar.estimated, bar.measured) == (7 * 2**20, 6 * 2**20)
    assert not found.running
    assert [found.trials[n].fused for n in (0, 1)] == [2, 2]
    assert found.began == 100.0


def test_one_that_runs_has_no_end_and_its_trial_runs() -> None:
    found = events({"event": "started"}, *proposed(0, 1), placed("0-0", 0))
    (bar,) = found.running.values()
    assert (bar.end, bar.state) == (None, "running")
    assert [found.trials[n].state for n in (0, 1)] == ["running", "waiting"]


def test_a_lost_job_ends_and_its_trial_waits_and_has_another_attempt() -> None:
    lost = {"event": "lost", "trials": [0], "job": "0-0", "why": "killed"}
    found = events({"event": "started"}, *proposed(0), placed("0-0", 0), lost, placed("0-1", 0), ended(0, attempts=2))
    assert [(bar.job, bar.state, bar.end) for bar in found.done] == [("0-0", "lost", 103.0), ("0-1", "complete", 105.0)]
    assert found.trials[0].attempts == 2


def test_one_that_took_too_much_tells_how_much() -> None:
    told = {"event": "exceeded", "trials": [0], "job": "0-0", "memory": 5, "needed": 9}
    found = events({"event": "started"}, *proposed(0, 1), placed("0-0", 0, 1), told)
    assert [(bar.state, bar.measured) for bar in found.done] == [("exceeded", 9)]
    assert [found.trials[n].state for n in (0, 1)] == ["waiting", "waiting"]  # both, though one was told of


def test_what_a_killed_driver_left_ends_where_it_last_spoke() -> None:
    again = {"event": "started", "time": 500.0}
    found = events({"event": "started"}, *proposed(0), placed("0-0", 0), again, placed("0-1", 0))
    assert [(bar.state, bar.end) for bar in found.done] == [("interrupted", 102.0)]
    assert list(found.running) == ["0-1"]


def test_devices_of_one_name_are_told_apart_by_their_places() -> None:
    found = events(DEVICES, *proposed(0, 1), placed("a", 0), placed("b", 1, places=[1]))
    assert found.devices == {"local/cpu": GIB, "local/cpu (2)": None}
    assert [bar.devices for bar in found.running.values()] == [["local/cpu"], ["local/cpu (2)"]]
    without = {name: value for name, value in placed("c", 2).items() if name != "places"}
    assert events(*proposed(2), without).running["c"].devices == ["local/cpu"]


def test_a_pruned_trial_has_the_values_of_its_last_report_and_a_failed_one_none() -> None:
    reports = [{"event": "reported", "trials": [0], "at": at, "values": [at / 100, "nan"]} for at in (20, 10)]
    found = events(*proposed(0, 1), *reports, ended(0, "pruned", values=None), ended(1, "failed", values=None))
    assert found.trials[0].values == [0.2, None]
    assert found.trials[1].values is None
    assert found.trials[0].reports == {10: [0.1, None], 20: [0.2, None]}


def test_an_error_is_told_by_its_last_line() -> None:
    found = events(*proposed(0), ended(0, "failed", error="Traceback\n  File\nValueError: no\n"))
    assert found.trials[0].why == "ValueError: no"


def test_memory_does_not_grow_with_the_study() -> None:
    found = events({"event": "started"})
    for number in range(TRIALS + 100):
        for event in (*proposed(number), placed(f"{number}", number), ended(number)):
            found.add_line(json.dumps({"time": 200.0 + number, **event}).encode())
    for at in range(1000):
        found.add_line(json.dumps({"event": "reported", "trials": [TRIALS], "at": at, "values": [at]}).encode())
    assert len(found.trials) == TRIALS
    assert found.count == TRIALS + 100
    assert len(found.done) == BARS
    kept = found.trials[TRIALS].reports
    assert len(kept) <= 64
    assert {0, 999} <= kept.keys()


weird = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = [
    "trials",
    "job",
    "devices",
    "node",
    "places",
    "memory",
    "params",
    "values",
    "state",
    "at",
    "time",
    "now",
    "fit",
]
kinds = ["started", "proposed", "placed", "reported", "ended", "lost", "exceeded", "devices", "stopped", "other"]
damaged = st.builds(
    lambda kind, fields: {"event": kind, **fields},
    st.sampled_from(kinds),
    st.dictionaries(st.sampled_from(names), weird | st.lists(st.integers(0, 2), max_size=3), max_size=8),
)


@given(st.lists(damaged, max_size=12))
def test_no_event_is_too_strange(events: list[dict[str, Any]]) -> None:
    found = StudyEvents()
    for event in events:
        found.add_line(json.dumps(event).encode())
    found.add_line(b'{"event": "ended", "trials": [1')
    assert found.damaged == 1
    device_bars([*found.done, *found.running.values()], found.devices, found.began or 0.0)
