"""Jobs as local processes: what a worker does with a job, and what is told of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import objectives
import pytest
from trials import until

from weft.errors import TuneError
from weft.tune.executors import Device, Job, StudySpec
from weft.tune.executors.local import LocalExecutor, idle_workers
from weft.tune.executors.worker import JsonConnection, kill_process, start_process
from weft.tune.jobs import Ended, Lost, Reported, event_from_json, event_to_json, job_from_json

Run = Callable[..., tuple[list[Reported], Any]]
"""What was reported of a job, and its end."""
GIB = 2**30


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    made = LocalExecutor(StudySpec(objectives.act, ("v",), 0), [Device("cpu", None)])
    yield made
    made.close()


@pytest.fixture
def run(executor: LocalExecutor, tmp_path: Path) -> Run:
    """Runs one job to its end."""

    def run(what: str, prune_at: int | None = None, timeout: float | None = None) -> tuple[list[Reported], Any]:
        params = {"what": what, "x": 0.5}
        job = Job(f"{what}-{time.monotonic_ns()}", (3,), (params,), None, (0,), None, str(tmp_path), timeout)
        executor.start(job)
        reports: list[Reported] = []
        while True:
            for event in executor.poll(30.0):
                if not isinstance(event, Reported):
                    return reports, event
                reports.append(event)
                executor.answer(job.id, event.trial, event.step == prune_at)

    return run


def test_idle_workers_stay_only_where_their_contexts_have_room() -> None:
    small, large, whole = (Job("", (0,), ({},), None, (0,), memory, "") for memory in (GIB, 9 * GIB, None))
    assert [idle_workers(11 * GIB, GIB, jobs) for jobs in ([small], [large], [small, large], [whole])] == [9, 1, 0, 0]
    assert idle_workers(None, GIB, [small]) == 0
    assert idle_workers(None, 0, [whole]) is None


def test_a_job_and_every_event_travel_as_json_and_come_back_equal() -> None:
    job = Job("a", (1, 2), ({"x": 0.1, "s": "t"}, {"x": 2, "s": True}), None, (0,), 5, "d", 1.5)
    assert job_from_json(json.loads(json.dumps(asdict(job)))) == job
    events = [Reported("a", 1, 2, (0.1, float("inf"))), Ended("a", 1, "complete", (1.0,), None, 7, 0.5), Lost("a", "x")]
    mine, far = map(JsonConnection, socket.socketpair())
    for event in events:
        mine.send(event_to_json(event))
    assert [event_from_json(message) for message in far.receive_all()[0]] == events
    mine.close()
    assert far.receive_all() == ([], False)


def test_reports_are_answered_and_the_value_comes_back_but_of_a_trial_that_is_told_to_end(run: Run) -> None:
    reports, end = run("parabola")
    assert [(event.step, event.values) for event in reports] == [(n, (0.2**2 + 1 / n,)) for n in (1, 2, 3)]
    assert (end.state, end.values, end.trial) == ("complete", (0.2**2,), 3)
    reports, end = run("parabola", prune_at=2)
    assert [event.step for event in reports] == [1, 2]
    assert (end.state, end.values) == ("pruned", None)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("failing", "ValueError: the objective is wrong"),
        ("leaving", "SystemExit: 3"),
        ("nothing", "must return a number, not nothing (None)"),
        ("nan", "'v' is nan at the end"),
        ("late", "a report is made after 0 to 2147483647 steps"),
        ("text", "must return a number, not 'good'"),
    ],
)
def test_a_trial_that_goes_wrong_is_failed_with_its_reason_and_its_worker_lives_on(
    run: Run, what: str, words: str
) -> None:
    before, end, after = (run(one)[1] for one in ("pid", what, "pid"))
    assert end.state == "failed"
    assert words in end.error
    assert before.values == after.values


def test_a_worker_that_keeps_memory_of_its_device_is_replaced(run: Run, executor: LocalExecutor) -> None:
    _, last = run("leaking")

    def replaced() -> bool:
        assert executor.poll(0.2) == []  # it is replaced once it says that it is idle
        return bool(run("pid")[1].values != last.values)

    until(replaced)


def test_what_a_trial_prints_is_kept_in_its_directory(run: Run, tmp_path: Path) -> None:
    run("printing")
    lines = (tmp_path / "trials" / "3" / "output.txt").read_text().splitlines()
    assert sorted(lines) == ["even so", "to the file"]


def test_global_generators_depend_on_the_trial_and_not_on_what_ran_before(run: Run) -> None:
    first, second = run("drawn")[1], run("drawn")[1]
    assert first.values == second.values


def test_a_killed_worker_is_told_of_and_the_next_attempt_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    (tmp_path / "kill").write_text("3")
    _, lost = run("counting")
    assert isinstance(lost, Lost)
    assert "signal 9" in lost.reason
    reports, end = run("counting")
    assert [event.step for event in reports] == [4, 5, 6, 7, 8, 9, 10]
    assert end.values == (0.5 * sum(range(1, 11)),)
    assert "lives 2" in (tmp_path / "trials" / "3" / "output.txt").read_text()


def test_a_trial_that_hangs_ends_at_its_limit_with_what_it_started(run: Run, tmp_path: Path) -> None:
    _, end = run("starting", timeout=1.0)
    assert end.state == "timeout"
    assert "limit of 1 s" in end.error
    until(lambda: not _lives(int((tmp_path / "trials" / "3" / "started").read_text())), 10.0)


def test_a_process_that_leads_no_group_is_ended_alone() -> None:
    with subprocess.Popen(["sleep", "77"]) as beside:  # of the group of this very process
        process, connection = start_process("sleeps", None, _sleeping, recipe=False)
        kill_process(process)
        connection.close()
        assert beside.poll() is None
        beside.kill()


def _sleeping(line: Any) -> None:
    time.sleep(1000)


def test_a_job_that_is_stopped_reports_no_more_and_its_process_is_gone(executor: LocalExecutor, tmp_path: Path) -> None:
    executor.start(Job("stop", (3,), ({"what": "slow", "x": 1.0},), None, (0,), None, str(tmp_path)))
    here = tmp_path / "trials" / "3" / "here"
    until(lambda: executor.poll(0.1) == [] and here.exists() and here.read_text() != "")
    executor.stop("stop")
    assert executor.poll(0.1) == []
    assert not _lives(int(here.read_text()))
    executor.answer("stop", 3, True)  # ignored


def test_a_function_that_no_other_process_can_import_is_refused() -> None:
    with pytest.raises(TuneError, match=r"trials run in processes of their own, and .*lambda.*functions defined in a"):
        LocalExecutor(StudySpec(lambda trial: 0.0, ("v",), 0))


def test_no_worker_outlives_a_driver_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import objectives\n"
        "from weft.tune.executors import Device, Job, StudySpec\n"
        "from weft.tune.executors.local import LocalExecutor\n"
        "if __name__ == '__main__':\n"
        "    executor = LocalExecutor(StudySpec(objectives.act, ('v',), 0), [Device('cpu', None)])\n"
        f"    executor.start(Job('a', (0,), ({{'what': 'slow', 'x': 1.0}},), None, (0,), None, {str(tmp_path)!r}))\n"
        "    executor.poll(1000)\n"
    )
    driver = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "OMP_NUM_THREADS": "1"})
    here = tmp_path / "trials" / "0" / "here"
    try:
        until(lambda: here.exists() and here.read_text() != "")
        worker = int(here.read_text())
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    until(lambda: not _lives(worker))


def _lives(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
