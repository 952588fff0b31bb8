"""Real processes: what tells them their place; stages are started, die, are started again, report, are stopped, and
never outlive the parent."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import alive, processes, wait_for
from torch.distributed import HashStore

from weft.distributed.env import DistEnv, _tasks_per_node, read_env
from weft.distributed.launcher import launch
from weft.distributed.remote_call import Call
from weft.distributed.store import PARENT, report_error, reported
from weft.errors import ConfigError, NonFiniteError, TrainError, WeftError

WORK = '''
import json, os, signal, sys, time
from pathlib import Path
from weft.errors import NonFiniteError
from weft.distributed.env import read_env
from weft.distributed.store import EventsToParent, asked_to_stop, connect, report

def mark(folder, text=""):
    env = read_env()
    new = Path(folder) / f"new.{env.rank}"
    new.write_text(text or str(os.getpid()))
    new.rename(Path(folder) / f"{env.restarts}.{env.rank}")

def die(folder):
    """Stage 1 is killed in the first start, and leaves in the second."""
    mark(folder)
    if read_env().rank == 1:
        os._exit(3) if read_env().restarts else os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)

def stay(folder):
    """Does not stop when it is told to."""
    signal.signal(signal.SIGTERM, lambda *_: (Path(folder) / "told").touch())
    mark(folder)
    while True:
        time.sleep(0.1)

def sleep(folder):
    mark(folder)
    time.sleep(600)

def listeners(pid):
    """Local addresses on which a process listens, as the kernel writes them (hexadecimal, no port)."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                found.append(fields[1].rpartition(":")[0])
    return found

def reduce(folder):
    """Stage 0 has two events, then stage 1 dies once; the second time all is said again, and more."""
    import torch
    import torch.distributed as dist
    store, env = connect(), read_env()
    dist.init_process_group("gloo", init_method="env://")
    total = torch.tensor([env.rank + 1.0])
    dist.all_reduce(total)
    seen = {"stage": listeners(os.getpid()), "parent": listeners(os.getppid()), "sum": total.item(),
            "restarts": env.restarts, "world": env.world, "environment": dict(os.environ)}
    mark(folder, json.dumps(seen))
    if env.rank == 0:
        say = EventsToParent(store)
        for step in range(2 + env.restarts):
            say({"event": "step", "step": step, "loss": float("nan")})
    dist.barrier()
    if env.rank == 1 and env.restarts == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    if env.rank == 0:
        report(store, {"sum": total.item(), "restarts": env.restarts})
    dist.destroy_process_group()

def not_finite(folder):
    mark(folder)
    if read_env().rank == 1:
        raise NonFiniteError("the loss of step 3 is nan")
    time.sleep(600)

def bug():
    raise ValueError("no such key")

def until_told(folder):
    """Returns when it is told to stop, as a stage does that has written its checkpoint."""
    stop = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    mark(folder)
    while not stop:
        time.sleep(0.02)
    time.sleep(0.2)
    mark(folder, f"stopped: {asked_to_stop(connect())}")
'''

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

MAIN = """
import sys
sys.path.insert(0, {folder!r})
if __name__ == "__main__":
    import work
    from weft.distributed.launcher import Call, launch
    try:
        launch(1, Call(work.{work}, ({seen!r},)), restarts=2)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(7)
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module that stages import: it lies where they can find it, unlike this file."""
    import importlib

    folder = tmp_path_factory.mktemp("importable")
    (folder / "work.py").write_text(WORK)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("work")
    sys.path.remove(str(folder))
    del sys.modules["work"]


@pytest.fixture
def start(work: Any, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a script that launches stages, in a session of its own so that a terminal can be played."""
    with processes() as begin:

        def script(text: str) -> subprocess.Popen[str]:
            (tmp_path / "main.py").write_text(text)
            return begin(tmp_path / "main.py", start_new_session=True)

        yield script


def lines(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.name[0].isdigit()}


def test_a_stage_that_always_dies_is_named_after_the_last_restart(work, tmp_path, capfd, caplog):
    """And not the stage that was stopped for it."""
    with pytest.raises(TrainError) as caught:
        launch(2, Call(work.die, (str(tmp_path),)), restarts=1)
    assert str(caught.value) == (
        "rank 1 ended with exit code 3; all stages were restarted once, which is the most allowed"
    )
    assert {"0.1", "1.1"} <= set(lines(tmp_path)) <= {f"{attempt}.{rank}" for attempt in "01" for rank in "01"}
    assert [record.message for record in caplog.records if record.name == "weft"] == [
        "rank 1 was killed by signal 9 (it may have run out of memory); all stages start again (1 of 1)"
    ]
    assert [record.name for record in caplog.records if record.name.startswith("torch.")] == []
    assert capfd.readouterr() == ("", "")


# A call


class Restarted(NamedTuple):
    """Two stages that meet over gloo, of which one is killed the first time."""

    outcome: dict[str, Any]
    seen: dict[str, Any]
    said: list[str]
    """The log."""
    events: list[Any]
    failing: list[Any]
    """What a callback saw that fails."""


@pytest.fixture(scope="module")
def restarted(work: Any, tmp_path_factory: pytest.TempPathFactory) -> Restarted:
    folder = tmp_path_factory.mktemp("restarted")
    said: list[str] = []
    events: list[Any] = []
    failing: list[Any] = []

    def fails(event: Any) -> None:
        failing.append(event)
        raise ValueError("a callback that fails")

    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft").addHandler(handler)
    before, handlers = dict(os.environ), [signal.getsignal(number) for number in SIGNALS]
    try:
        callbacks = [fails, events.append]
        outcome = launch(2, Call(work.reduce, (str(folder),)), restarts=1, threads=2, callbacks=callbacks)
    finally:
        logging.getLogger("weft").removeHandler(handler)
    assert dict(os.environ) == before
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    seen = {name: json.loads(text) for name, text in lines(folder).items()}
    return Restarted(outcome, seen, said, events, failing)


def test_each_stage_gets_its_place(restarted):
    for name, seen in restarted.seen.items():
        restarts, rank = name.split(".")
        expected = {
            "RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RESTART_COUNT": restarts,
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "2",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            PARENT: str(os.getpid()),
        }
        assert {name: seen["environment"].get(name) for name in expected} == expected


def test_a_killed_stage_makes_all_start_again_and_the_outcome_comes_back(restarted):
    assert restarted.outcome == {"sum": 3.0, "restarts": 1}
    assert {name: (each["sum"], each["restarts"], each["world"]) for name, each in restarted.seen.items()} == {
        f"{restarts}.{rank}": (3.0, restarts, 2) for restarts in range(2) for rank in range(2)
    }
    # What the other one logs of its end, a traceback of gloo, comes first.
    words = "rank 1 was killed by signal 9 (it may have run out of memory); all stages start again (1 of 1)"
    said = [text for text in restarted.said if "callback" not in text]
    assert said[-1] == words
    assert all(text.startswith("rank 0 failed") for text in said[:-1])


def test_callbacks_see_the_events_of_every_start_and_one_that_fails_sees_no_more(restarted):
    assert [event["step"] for event in restarted.events] == [0, 1, 0, 1, 2]
    assert restarted.events[0] == {"event": "step", "step": 0, "loss": "nan"}
    assert len(restarted.failing) == 1
    assert restarted.said.count("a callback failed and sees no more of this run") == 1


def test_nothing_listens_beyond_loopback(restarted):
    loopback = "0100007F"
    for each in restarted.seen.values():
        assert each["parent"], "the store of the parent was not found, so this test sees nothing"
        assert each["stage"], "gloo's socket was not found, so this test sees nothing"
        assert set(each["parent"] + each["stage"]) == {loopback}


def test_an_error_of_the_users_making_comes_back_as_itself_and_starts_nothing_again(work, tmp_path):
    with pytest.raises(NonFiniteError) as caught:
        launch(2, Call(work.not_finite, (str(tmp_path),)), restarts=3)
    assert str(caught.value) == "the loss of step 3 is nan"
    assert "0.1" in lines(tmp_path)
    assert set(lines(tmp_path)) <= {"0.0", "0.1"}
    for pid in lines(tmp_path).values():
        assert not alive(int(pid))


def test_a_bug_in_a_stage_is_reported_in_one_line_and_leaves_no_files(work, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TrainError, match=r"^rank 0 ended with exit code 1: ValueError: no such key; all stages"):
        launch(1, Call(work.bug), restarts=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (lambda work: Call(lambda: None), r"the function, .*<lambda>, cannot be sent"),
        (lambda work: Call(work.mark, ("/tmp", lambda: None)), r"argument 1, .*<lambda>, cannot be sent"),
        (lambda work: Call(work.mark, (Call(lambda: None),)), r"'function', .*<lambda>, cannot be sent"),
    ],
)
def test_what_cannot_be_sent_to_a_stage_is_named(work, make, culprit):
    with pytest.raises(TrainError, match=rf"more than one stage means new processes, and {culprit}.*importable"):
        launch(2, make(work))


def test_a_function_that_stages_cannot_import_is_reported_once(work, monkeypatch):
    import types

    module = types.ModuleType("only_here")
    exec("def build(): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(TrainError, match=r"they cannot import what they are to run: No module named 'only_here'"):
        launch(1, Call(module.build), restarts=3)


# What the store holds


@pytest.mark.parametrize("problem", [ConfigError("a"), NonFiniteError("b\nc"), WeftError("d")])
def test_an_error_crosses_the_store_with_class_and_text(problem):
    store = HashStore()
    report_error(store, problem)
    report_error(store, TrainError("a later one, which follows from the first"))
    with pytest.raises(WeftError) as caught:
        reported(store)
    assert (type(caught.value), str(caught.value)) == (type(problem), str(problem))


@pytest.mark.parametrize("name", ["SystemExit", "nearest", "Iterable", "__builtins__", "Own"])
def test_only_errors_of_weft_are_raised_by_name(name):
    store = HashStore()
    report_error(store, type(name, (WeftError,), {})("text"))
    with pytest.raises(WeftError) as caught:
        reported(store)
    assert (type(caught.value), str(caught.value)) == (TrainError, "text")


# The end


@pytest.fixture
def launched(work: Any, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> Callable[..., Any]:
    """Starts a script that launches a stage with some work, and waits until it has begun; the folder that it sees."""

    def begin(name: str) -> tuple[subprocess.Popen[str], Path]:
        seen = tmp_path / "seen"
        seen.mkdir()
        main = start(MAIN.format(folder=str(Path(work.__file__).parent), work=name, seen=str(seen)))
        wait_for(lambda: "".join(lines(seen).values()))
        return main, seen

    return begin


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stages_stop_by_themselves_on_ctrl_c_and_sigterm(launched, number):
    main, seen = launched("until_told")
    # A terminal sends Ctrl-C to all of its processes; only the parent may act on it.
    os.killpg(main.pid, number) if number == signal.SIGINT else os.kill(main.pid, number)
    out, err = main.communicate(timeout=50)
    assert (out, err, main.returncode) == ("interrupted\n", "", 7)
    assert lines(seen) == {"0.0": "stopped: True"}


def test_a_second_ctrl_c_kills_stages_that_do_not_stop(launched):
    main, seen = launched("stay")
    os.kill(main.pid, signal.SIGINT)
    wait_for((seen / "told").exists)
    os.kill(main.pid, signal.SIGINT)
    out, err = main.communicate(timeout=50)
    assert (out, err, main.returncode) == ("interrupted\n", "", 7)
    assert not alive(int(lines(seen)["0.0"]))


def test_no_stage_outlives_a_parent_that_is_killed(launched):
    main, seen = launched("sleep")
    pid = int(lines(seen)["0.0"])
    assert alive(pid)
    main.kill()
    wait_for(lambda: not alive(pid), 20.0)


def test_a_grandchild_does_not_outlive_a_parent_that_is_killed(tmp_path, start):
    script = tmp_path / "stage.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\nfrom weft.distributed.store import die_with_parent\n"
        "die_with_parent()\nPath(sys.argv[1]).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    seen = tmp_path / "0"
    command = ["sh", "-c", '"$@"; true', "sh", sys.executable, str(script), str(seen)]
    main = start(f"import os, subprocess\nos.environ[{PARENT!r}] = str(os.getpid())\nsubprocess.run({command!r})\n")
    wait_for(lambda: seen.exists() and seen.read_text())
    pid = int(seen.read_text())
    assert alive(pid)
    main.kill()
    wait_for(lambda: not alive(pid), 20.0)


def test_a_script_without_a_guard_is_told_to_add_one(work, start):
    text = MAIN.format(folder=str(Path(work.__file__).parent), work="bug", seen="")
    main = start(text.replace('if __name__ == "__main__":', "if True:"))
    out, err = main.communicate(timeout=50)
    assert main.returncode == 1
    assert err.strip().splitlines()[-1].endswith("put what the script does under `if __name__ == '__main__':`")
    assert err.count("Traceback") == 1
    assert out == ""


# Which stage a process is, from what torchrun or srun put into its environment.


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
}
MEETING = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param(TORCHRUN, DistEnv(5, 8, 1, 4, 2), id="torchrun"),
        pytest.param({"PATH": "/bin"}, None, id="started by nobody"),
        pytest.param(SRUN | MEETING, DistEnv(3, 5, 1, 2, 0), id="a task of srun"),
        pytest.param(
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_LOCALID": "1"} | MEETING,
            DistEnv(1, 3, 1, 3, 0),
            id="three variables are enough on one machine",
        ),
        pytest.param(SRUN | TORCHRUN, DistEnv(5, 8, 1, 4, 2), id="torchrun under slurm"),
        pytest.param(
            SRUN | MEETING | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            DistEnv(3, 4, 1, 2, 0),
            id="a step smaller than its job",
        ),
        pytest.param(SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None, id="a single task"),
        pytest.param({k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}, None, id="the shell of a batch script"),
    ],
)
def test_the_environment_says_which_stage_a_process_is(environment, expected):
    assert read_env(environment) == expected


@pytest.mark.parametrize(
    ("given", "absent"),
    [
        ({}, "MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": "node7"}, "MASTER_PORT"),
        ({"MASTER_PORT": "1"}, "MASTER_ADDR"),
    ],
)
def test_srun_without_a_meeting_point_says_what_is_missing(given, absent):
    with pytest.raises(TrainError, match=f"also need {absent} to find one another: export"):
        read_env(SRUN | given)


@pytest.mark.parametrize("change", [{"RANK": "x"}, {"RANK": "8"}, {"LOCAL_RANK": "4"}, {"WORLD_SIZE": "-1"}])
def test_ranks_that_cannot_be_are_refused(change):
    with pytest.raises(TrainError, match=r"must be a whole number|cannot be rank"):
        read_env(TORCHRUN | change)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1))
def test_the_short_form_of_slurm_is_read_back(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert _tasks_per_node(text) == [count for count, times in runs for _ in range(times)]
