"""A study from its events, and its jobs as bars on lanes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft.runs.run import hold
from weft.serve.views import study as studies
from weft.serve.views.study_events import (
    BARS,
    SHOWN,
    TRIALS,
    JobBar,
    StudyEvents,
    TrialState,
    assign_lanes,
    device_bars,
)
from weft.space import Space
from weft.tune import Device, StudyResult, Trial
from weft.tune.executors import Job
from weft.tune.jobs import Ended, Event, Lost, Reported

optuna = pytest.importorskip("optuna")

MIB = 2**20


def space() -> Space:
    found = Space()
    found.real("lr", 1e-4, 1e-1, log=True)
    found.integer("width", [16, 32, 64])
    found.integer("depth", 1, 4)
    found.categorical("kind", ["sgd", "adam"])
    return found


def quality(params: dict[str, Any]) -> float:
    return float(-abs(params["lr"] - 0.01) + params["depth"] / 10)


class Instant:
    """An executor whose jobs are over as soon as they are looked at: trial 2 fails, and trial 3 is lost once."""

    def __init__(self, objectives: int = 1) -> None:
        self.devices: Sequence[Device] = (Device("cpu", 64 * MIB), Device("cpu", 64 * MIB))
        self._objectives, self._events, self._lost = objectives, list[Event](), False

    def start(self, job: Job) -> None:
        for trial, params in zip(job.trials, job.params, strict=True):
            values = (quality(params), float(params["width"]))[: self._objectives]
            if trial == 3 and not self._lost:
                self._lost = True
                self._events.append(Lost(job.id, "by chance"))
            elif trial == 2:
                self._events.append(Ended(job.id, trial, "failed", error="Traceback\nValueError: no", seconds=0.1))
            else:
                self._events += [Reported(job.id, trial, step, values) for step in (10, 20)]
                self._events.append(Ended(job.id, trial, "complete", values, peak=3 * MIB, seconds=0.5))

    def answer(self, job: str, trial: int, prune: bool) -> None:
        pass

    def stop(self, job: str) -> None:
        pass

    def poll(self, timeout: float) -> list[Event]:
        return [self._events.pop(0)] if self._events else []

    def close(self) -> None:
        pass


def never(trial: Trial) -> float:
    raise AssertionError("the executor knows without asking")


def tuned(runs: Path, objectives: int = 1, **more: Any) -> StudyResult:
    aims: dict[str, Any] = {"maximize": "quality", **({"minimize": "cost"} if objectives == 2 else {})}
    given = {"trials": 8, "sampler": "random", "max_concurrent": 4, "trial_memory": "8MiB", **more}
    return weft.tune(never, space(), executor=Instant(objectives), name="study", folder=runs, **aims, **given)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """One that has ended; only to be read."""
    return tuned(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(study: StudyResult, tmp_path: Path) -> Path:
    """A copy of its run, to be damaged."""
    return Path(shutil.copytree(study.path, tmp_path / "study"))


def test_every_trial_is_shown_as_the_study_has_it(study: StudyResult, run: Path) -> None:
    found = studies.document(run)
    assert (found["study"], found["count"], found["damaged"]) == ("study", 8, 0)
    assert found["objectives"] == [{"name": "quality", "maximize": True}]
    for shown, record in zip(found["trials"], study.trials, strict=True):
        assert (shown["number"], shown["state"]) == (record.number, record.state)
        assert shown["params"] == {n: pytest.approx(v) if isinstance(v, float) else v for n, v in record.params.items()}
        assert shown["values"] == (None if record.values is None else pytest.approx(list(record.values)))
        assert (shown["estimated"], shown["fused"], shown["attempts"]) == (8 * MIB, 1, 2 if record.number == 3 else 1)
        assert shown["measured"] == (None if record.state == "failed" else 3 * MIB)
        assert [at for at, _ in shown["reports"]] == sorted(record.reports)
    failed = [(one["number"], one["error"]) for one in found["trials"] if one["state"] == "failed"]
    assert failed == [(2, "ValueError: no")]
    assert found["importances"] == {"quality": [[n, pytest.approx(s, rel=1e-6)] for n, s in study.importances.items()]}


def test_parameters_come_in_the_order_of_the_space_with_their_scales(run: Path) -> None:
    assert studies.document(run)["parameters"] == [
        {"name": "lr", "log": True, "options": None, "low": 1e-4, "high": 1e-1},
        {"name": "width", "log": False, "options": [16, 32, 64], "low": None, "high": None},
        {"name": "depth", "log": False, "options": None, "low": 1, "high": 4},
        {"name": "kind", "log": False, "options": ["sgd", "adam"], "low": None, "high": None},
    ]


def test_devices_have_their_memory_and_each_attempt_as_a_bar(run: Path) -> None:
    devices = studies.document(run)["devices"]
    assert [(one["name"], one["memory"]) for one in devices] == [("local/cpu", 64 * MIB), ("local/cpu (2)", 64 * MIB)]
    bars = [bar for device in devices for bar in device["bars"]]
    assert sorted(bar["trials"][0] for bar in bars) == sorted([*range(8), 3])
    assert {bar["state"] for bar in bars} == {"complete", "failed", "lost"}
    assert all(bar["estimated"] == 8 * MIB and 0 <= bar["start"] <= bar["end"] for bar in bars)
    assert all(bar["measured"] == 3 * MIB for bar in bars if bar["state"] == "complete")
    for device in devices:
        for bar in device["bars"]:
            beside = [one for one in device["bars"] if one["lane"] == bar["lane"] and one is not bar]
            assert all(one["end"] <= bar["start"] or bar["end"] <= one["start"] for one in beside)


def test_damaged_lines_are_skipped_and_counted(run: Path) -> None:
    before = studies.document(run)
    lines = (run / "events.jsonl").read_bytes().splitlines()
    lines[5:5] = [b"{", b"\xff\xfe", b"[3]", b'{"event": "placed", "trials": 3}']
    (run / "events.jsonl").write_bytes(b"\n".join(lines) + b'\n{"event": "ended", "tri')
    found = studies.document(run)
    assert found["damaged"] == 3
    assert found["trials"] == before["trials"]


def test_a_manifest_and_a_result_that_are_damaged_give_a_document(run: Path) -> None:
    (run / "manifest.json").write_bytes(b"[")
    (run / "results" / "study.json").write_bytes(b"{")
    found = studies.document(run)
    assert (found["objectives"], len(found["trials"])) == ([], 8)
    json.dumps(found, allow_nan=False)
    empty = studies.document(run.parent)
    assert studies.present(run)
    assert not studies.present(run.parent)
    assert (empty["trials"], empty["devices"], empty["importances"]) == ([], [], {})


def test_a_job_runs_without_end_for_as_long_as_its_driver_does(run: Path) -> None:
    lines = (run / "events.jsonl").read_bytes().splitlines()
    at = next(i for i, line in enumerate(lines) if b'"placed"' in line) + 1
    (run / "events.jsonl").write_bytes(b"\n".join(lines[:at]) + b"\n")

    def now() -> tuple[object, ...]:
        found = studies.document(run)
        (bar,) = found["devices"][0]["bars"]
        return bar["end"] == bar["start"], bar["state"], found["trials"][0]["state"]

    with hold(run / "lock"):
        assert now() == (False, "running", "running")
    assert now() == (True, "interrupted", "waiting")


def test_a_study_of_two_objectives_has_importances_of_both(tmp_path: Path) -> None:
    study = tuned(tmp_path, objectives=2, trials=5)
    found = studies.document(study.path)
    assert found["objectives"] == [{"name": "quality", "maximize": True}, {"name": "cost", "maximize": False}]
    assert found["importances"].keys() == {"quality", "cost"}
    assert [name for name, _ in found["importances"]["quality"]] == list(study.importances)
    assert sum(share for _, share in found["importances"]["cost"]) == pytest.approx(1, abs=1e-5)
    assert all(len(one["values"]) == 2 for one in found["trials"] if one["state"] == "complete")


def many(path: Path, count: int) -> Path:
    with open(path / "events.jsonl", "w") as file:
        for n in range(count):
            events = [{"event": "proposed", "time": 1e9 + n, "params": {f"parameter{k}": n / 7 for k in range(4)}}]
            events += [{"event": "placed", "time": 1e9 + n, "job": f"{n}-0-abcd"}]
            events += [{"event": "reported", "at": at, "values": [at / 7]} for at in range(20)]
            value = -1.0 if n == 77 else n / 7
            events += [{"event": "ended", "time": 1e9 + n + 3, "state": "complete", "values": [value]}]
            file.writelines(json.dumps({**event, "trials": [n]}) + "\n" for event in events)
        file.write(json.dumps({"event": "proposed", "trials": [count], "params": {}}) + "\n")
    study = {"objectives": {"loss": "minimize"}, "names": ["loss"]}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "kind": "study", "study": study}))
    return path


def test_however_many_trials_there_are_their_document_is_small_and_has_the_best(tmp_path: Path) -> None:
    found = studies.document(many(tmp_path, 3000))
    assert len(json.dumps(found)) < 700_000
    assert (found["count"], len(found["trials"])) == (3001, SHOWN)
    numbers = [one["number"] for one in found["trials"]]
    assert numbers == sorted(set(numbers))
    assert {77, 3000} <= set(numbers)  # the best, and one that waits


def test_importances_are_computed_once_for_a_number_of_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counting(space: Space, trials: Sequence[TrialState], objectives: object) -> dict[str, Any]:
        calls.append(len(trials))
        return {"loss": [["x", 1.0]]}

    monkeypatch.setattr(studies, "_shares", counting)
    found = Space()
    found.real("x", 0.0, 1.0)
    trials = [TrialState(n, {"x": 0.5}, "complete", [float(n)]) for n in range(1200)]
    for count in (2, 2, 3, 999, 1000, 1001, 1001, 1050, 1100, 1200):
        assert studies.importances(found, trials[:count], [("loss", False)], "key") == {"loss": [["x", 1.0]]}
    assert calls == [2, 3, 999, 1000, 1100]  # of more than a thousand, each tenth part


def test_importances_take_no_trial_that_was_not_drawn_from_the_space() -> None:
    odd = [TrialState(0, {"lr": 7.0}, "complete", [1.0]), TrialState(1, {"no": 1}, "complete", [2.0])]
    odd.append(TrialState(2, {}, "failed"))
    assert studies.importances(space(), odd, [("loss", False)], "odd") == {}
    assert studies.importances(None, odd, [("loss", False)], "odd") == {}


GIB = 2**30

times = st.integers(0, 20).map(float)
spans = st.lists(
    st.tuples(times, st.one_of(st.none(), times)).map(lambda s: (s[0], None if s[1] is None else s[0] + s[1])),
    max_size=25,
)


@given(spans)
def test_no_two_of_a_lane_overlap_and_no_lane_is_taken_without_need(spans: list[tuple[float, float | None]]) -> None:
    lanes = assign_lanes(spans)
    placed = [(start, 1e9 if end is None else end, lane) for (start, end), lane in zip(spans, lanes, strict=True)]
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
    event = {"devices": "cpu", "node": "local", "places": [0], "memory": None, "estimated": 7 * 2**20}
    return {"event": "placed", "trials": list(numbers), "job": job, **event, **more}


def ended(number: int, state: str = "complete", **more: Any) -> dict[str, Any]:
    event = {"values": [0.5], "seconds": 2.5, "attempts": 1, "fused": 1, "peak": 6 * 2**20}
    return {"event": "ended", "trials": [number], "state": state, **event, **more}


def test_a_fused_job_is_one_bar_that_lasts_until_the_last_of_its_trials() -> None:
    job = placed("0-0", 0, 1)
    found = events({"event": "started"}, DEVICES, *proposed(0, 1), job, ended(1, fused=2), ended(0, fused=2))
    (bar,) = found.done
    assert (bar.trials, bar.start, bar.end, bar.state) == ([0, 1], 104.0, 106.0, "complete")
    assert (bar.estimated, bar.measured) == (7 * 2**20, 6 * 2**20)
    assert not found.running
    assert [found.trials[n].fused for n in (0, 1)] == [2, 2]
    assert found.began == 100.0


START = [{"event": "started"}, *proposed(0, 1), placed("0-0", 0)]
LOST = {"event": "lost", "trials": [0], "job": "0-0", "why": "killed"}
EXCEEDED = {"event": "exceeded", "trials": [0], "job": "0-0", "memory": 5, "needed": 9}
RESTART = {"event": "started", "time": 500.0}
ATTEMPTS: dict[str, tuple[list[dict[str, Any]], list[tuple[str, str, float]], str, int]] = {
    "it runs": ([], [], "running", 1),
    "it was lost and runs again": ([LOST, placed("0-1", 0)], [("0-0", "lost", 104.0)], "running", 2),
    "it took too much memory": ([EXCEEDED], [("0-0", "exceeded", 104.0)], "waiting", 1),
    "its driver was killed": ([RESTART, placed("0-1", 0)], [("0-0", "interrupted", 103.0)], "running", 2),
}
"""Events, the jobs that ended then with their states and times, and the state and the attempts of trial 0."""


@pytest.mark.parametrize("case", ATTEMPTS)
def test_a_job_ends_when_it_is_lost_and_its_trial_has_another_attempt(case: str) -> None:
    more, ends, state, attempts = ATTEMPTS[case]
    found = events(*START, *more)
    assert [(bar.job, bar.state, bar.end) for bar in found.done] == ends
    assert (found.trials[0].state, found.trials[0].attempts, found.trials[1].state) == (state, attempts, "waiting")
    assert [bar.measured for bar in found.done if bar.state == "exceeded"] == [9] * (case == "it took too much memory")
    assert all(bar.end is None for bar in found.running.values())


def test_a_pruned_trial_has_the_values_of_its_last_report_and_a_failed_one_none() -> None:
    reports = [{"event": "reported", "trials": [0], "at": at, "values": [at / 100, "nan"]} for at in (20, 10)]
    found = events(*proposed(0, 1), *reports, ended(0, "pruned", values=None), ended(1, "failed", values=None))
    assert found.trials[0].values == [0.2, None]
    assert found.trials[1].values is None
    assert found.trials[0].reports == {10: [0.1, None], 20: [0.2, None]}


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
names = ["trials", "job", "devices", "places", "memory", "params", "values", "state", "at", "time", "now", "fit"]
kinds = ["started", "proposed", "placed", "reported", "ended", "lost", "exceeded", "devices", "stopped", "other"]
damaged = st.builds(
    lambda kind, fields: {"event": kind, **fields},
    st.sampled_from(kinds),
    st.dictionaries(st.sampled_from(names), weird | st.lists(st.integers(0, 2), max_size=3), max_size=8),
)


@settings(max_examples=40)
@given(st.lists(damaged, max_size=8))
def test_no_event_is_too_strange(events: list[dict[str, Any]]) -> None:
    found = StudyEvents()
    for event in events:
        found.add_line(json.dumps(event).encode())
    found.add_line(b'{"event": "ended", "trials": [1')
    assert found.damaged == 1
    device_bars([*found.done, *found.running.values()], found.devices, found.began or 0.0)
