"""Studies whose processes are killed: what comes out is what an undisturbed study gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import objectives
import optuna
import pytest
from trials import until

import weft
from weft.runs import Events
from weft.tune import StudyResult
from weft.tune.jobs import StudyProgress

SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import objectives, weft

def space():
    made = weft.Space()
    made.real("x", 0.0, 1.0)
    made.categorical("what", [{what!r}])
    return made

if __name__ == "__main__":
    weft.tune(objectives.act, space(), {arguments})
"""


def space(what: str) -> weft.Space:
    made = weft.Space()
    made.real("x", 0.0, 1.0)
    made.categorical("what", [what])
    return made


def told(found: StudyResult) -> list[Any]:
    return [(one.number, dict(one.params), one.state, one.values, dict(one.reports)) for one in found.trials]


def count(folder: Path, **options: Any) -> StudyResult:
    """The study of five trials that count, which the tests disturb."""
    given: dict[str, Any] = {"trials": 5, "minimize": "v", "max_concurrent": 2, "name": "s", "folder": folder}
    return weft.tune(objectives.act, space("counting"), **given, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return told(count(tmp_path_factory.mktemp("undisturbed")))


def test_a_trial_whose_worker_is_killed_goes_on_from_what_it_kept(tmp_path: Path, undisturbed: list[Any]) -> None:
    def mark(board: StudyProgress) -> None:
        if not (tmp_path / "s" / "kill").exists():
            (tmp_path / "s" / "kill").write_text("1 3")

    found = count(tmp_path, jobs_per_device=1, callback=mark)
    assert told(found) == undisturbed
    assert [one.info["attempts"] for one in found.trials] == [1, 2, 1, 2, 1]
    events = list(Events(tmp_path / "s" / "events.jsonl").read())
    lost = [event for event in events if event["event"] == "lost"]
    assert [event["trials"] for event in lost] == [[1], [3]]
    for event in lost:
        again = next(e for e in events if e["event"] == "reported" and e["time"] > event["time"])
        assert again["trials"] == event["trials"]


def test_a_study_whose_driver_is_killed_goes_on_as_if_nothing_had_been(tmp_path: Path, undisturbed: list[Any]) -> None:
    arguments = f"trials=5, minimize='v', max_concurrent=2, name='s', folder={str(tmp_path)!r}"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent), what="counting", arguments=arguments))
    events = Events(tmp_path / "s" / "events.jsonl")
    driver = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "OMP_NUM_THREADS": "1"})

    def ended() -> list[int]:
        return [event["trials"][0] for event in events.read() if event["event"] == "ended"]

    until(lambda: len(ended()) >= 2 or driver.poll() is not None)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    finished = ended()
    assert weft.Run.open(tmp_path / "s").state() == "interrupted"
    found = count(tmp_path, resume=True)
    assert told(found) == undisturbed
    assert sorted(ended()) == [0, 1, 2, 3, 4]  # those that had ended were not run again, and each is in the log
    assert ended()[: len(finished)] == finished


def test_what_ended_and_was_not_logged_when_its_driver_died_is_logged_by_the_next(tmp_path: Path) -> None:
    def study(trials: int, **options: Any) -> None:
        weft.tune(objectives.act, space("parabola"), trials=trials, minimize="v", name="s", folder=tmp_path, **options)

    study(2)
    file = tmp_path / "s" / "events.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    (lost,) = [line for line in lines if '"ended"' in line and json.loads(line)["trials"] == [1]]
    file.write_text("".join(line for line in lines if line != lost))
    study(3, resume=True)
    ended = [event for event in Events(file).read() if event["event"] == "ended"]
    assert [event["trials"] for event in ended] == [[0], [1], [2]]
    assert (ended[1]["state"], ended[1]["values"]) == ("complete", json.loads(lost)["values"])


def test_a_script_without_its_guard_is_told_so_and_leaves_no_study_behind(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    arguments = f"trials=2, minimize='v', name='s', folder={str(tmp_path)!r}, storage={storage!r}"
    text = SCRIPT.format(here=str(Path(__file__).parent), what="parabola", arguments=arguments)
    script = tmp_path / "script.py"
    script.write_text(text.replace('if __name__ == "__main__":', "if True:"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=100)
    assert "under `if __name__ == '__main__':`" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "s").exists()
    assert optuna.get_all_study_names(storage) == []


@pytest.mark.long
def test_ctrl_c_leaves_a_study_that_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "objectives.py").write_text(Path(objectives.__file__).read_text())
    (tmp_path / "c.toml").write_text(
        'objective = "objectives:act"\n[study]\nname = "s"\ntrials = 2\nminimize = "v"\njobs_per_device = 1\n'
        '[space]\nx = {low = 0.0, high = 1.0}\nwhat = ["slow"]\n'
    )
    command = [sys.executable, "-m", "weft", "tune", "c.toml", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    here = tmp_path / "runs" / "s" / "trials" / "0" / "here"
    until(lambda: here.exists() or first.poll() is not None)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=60)
    assert (first.returncode, out) == (130, "")
    assert "Go on with: weft tune c.toml --resume" in err
    assert weft.Run.open(tmp_path / "runs" / "s").state() == "stopped"
    (tmp_path / "runs" / "s" / "go").touch()
    second = subprocess.run(
        [*command, "--resume"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert second.returncode == 0, second.stderr
    found = json.loads(second.stdout)
    assert [one["state"] for one in found["trials"]] == ["complete", "complete"]
