"""What real processes leave behind when they are killed or the disk is full."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.errors import RunError
from weft.runs import Checkpoints, Events, Run
from weft.utils.rng import generator

SAVE_FOREVER = """
import itertools, torch
from weft.runs import Checkpoints
checkpoints = Checkpoints(folder, keep=2)
for serial in itertools.count(serial + 1):
    checkpoints.save(serial, {f"l{i}.w": torch.full((1000,), float(serial)) for i in range(5)}, {"serial": serial})
    send(serial)
"""


def assert_whole(checkpoints: Checkpoints, step: int | None) -> int:
    got = checkpoints.load(step)
    serial = got.meta["serial"]
    assert got.step == serial
    assert sorted(got.tensors) == [f"l{i}.w" for i in range(5)]
    for tensor in got.tensors.values():
        assert torch.equal(tensor, torch.full((1000,), float(serial)))
    return got.step


def test_a_saver_killed_at_random_moments_always_leaves_what_it_reported(tmp_path: Path, forks: Any) -> None:
    draw = generator(0, "kill")
    serial = reported = 0
    for round_ in range(8):
        forks.start(SAVE_FOREVER, folder=str(tmp_path), serial=serial)
        first = [forks.receive()] if round_ % 2 else []  # also on a busy machine some rounds get far
        time.sleep(draw.uniform(0, 0.06))
        forks.kill()
        messages, status = forks.finish()
        assert status == -9
        if first + messages:
            reported = (first + messages)[-1]
        checkpoints = Checkpoints(tmp_path)
        if not reported:
            continue
        serial = assert_whole(checkpoints, None)
        assert serial >= reported, round_
        for other in checkpoints.steps():
            assert_whole(checkpoints, other)
    assert reported >= 4
    Checkpoints(tmp_path).save(serial + 1, {}, {})
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


KILLED_AT_LINE = """
import os, signal, sys, torch
from weft.runs import Checkpoints, Events
from weft.utils import files
count = 0
pure = "to_json disk_errors _path steps _entries _digest _refuse_twice _bytes names layer_of check parse".split()
pure += "<genexpr> <listcomp> <dictcomp> <setcomp> <lambda>".split()
def trace(frame, event, arg):
    global count
    file = frame.f_code.co_filename
    if not ("/weft/runs/" in file or file.endswith("/weft/utils/files.py")) or frame.f_code.co_name in pure:
        return None
    if event == "line":
        count += 1
        if count == line:
            os.kill(os.getpid(), signal.SIGKILL)
    return trace
sys.settrace(trace)
exec(action)
sys.settrace(None)
"""


def killed_at_every_line(forks: Any, made: Path, work: Path, action: str) -> Any:
    """Yields after each kill, with `work` a copy of `made` in which the action was cut short; at last it was not."""
    line, status = 0, -9
    while status == -9:
        line += 1
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(made, work)
        messages, status = forks.run(KILLED_AT_LINE, action=action, line=line, work=str(work))
        assert messages == []
        yield status == 0
    assert status == 0
    assert line > 10


def test_a_publication_killed_at_any_line_leaves_the_checkpoints_before_or_with_it(tmp_path: Path, forks: Any) -> None:
    made, work = tmp_path / "made", tmp_path / "work"
    for step in (1, 2):
        Checkpoints(made).save(step, {"a.w": torch.full((3,), float(step))}, {"serial": step})
    seen = set()
    action = "Checkpoints(work, keep=2).save(3, {'a.w': torch.full((3,), 3.0)}, {'serial': 3})"
    for done in killed_at_every_line(forks, made, work, action):
        steps = Checkpoints(work).steps()
        got = Checkpoints(work).load()
        assert got.step == steps[-1]
        assert got.step == 3 or not done
        seen.add(tuple(steps))
        for step in steps:
            found = Checkpoints(work).load(step)
            assert found.meta == {"serial": step}
            assert torch.equal(found.tensors["a.w"], torch.full((3,), float(step)))
        Checkpoints(work, keep=2).clean()
        assert [path.name for path in work.iterdir() if path.name.startswith(".")] == []
        assert Checkpoints(work).steps() == steps
    assert seen == {(1, 2), (1, 2, 3), (2, 3)}


def test_a_resume_killed_at_any_line_leaves_all_events_or_the_wanted(tmp_path: Path, forks: Any) -> None:
    made, work = tmp_path / "made", tmp_path / "work"
    made.mkdir()
    with Events(made / "e.jsonl") as events:
        for step in range(4):
            events.append("step", step=step)
    seen = set()
    for _ in killed_at_every_line(forks, made, work, "Events(work + '/e.jsonl').drop_from(2)"):
        events = Events(work / "e.jsonl")
        seen.add(tuple(event["step"] for event in events.read()))
        assert events.damaged == 0
    assert seen == {(0, 1, 2, 3), (0, 1)}


FULL = """
import resource, torch
from pathlib import Path
from weft.errors import RunError
from weft.runs import Checkpoints, Events
from weft.utils.files import write_atomic
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size if size else hard, hard))
def expect(file, act):
    limit(20_000)
    try:
        act()
        raise AssertionError("no error")
    except RunError as error:
        for part in (f"/{file}'", " bytes needed", " bytes free", "nothing finished was lost", "resume"):
            assert part in str(error), error
    finally:
        limit(None)
folder = Path(folder)

checkpoints = Checkpoints(folder)
checkpoints.save(1, {"a.w": torch.ones(10)}, {})
expect("shard0.safetensors", lambda: checkpoints.save(2, {"a.w": torch.ones(10_000)}, {}))
expect("manifest.json", lambda: checkpoints.save(2, {}, {"much": "x" * 30_000}))
assert [path.name for path in folder.iterdir()] == ["step-00000001"]
assert checkpoints.load().tensors["a.w"].tolist() == [1.0] * 10
expect("stage0.safetensors", lambda: checkpoints.write_shard(3, "stage0", {"a.w": torch.ones(10_000)}))
assert list((folder / ".step-00000003.tmp").iterdir()) == []
checkpoints.save(2, {"a.w": torch.ones(10_000)}, {})
assert checkpoints.load().step == 2

write_atomic(folder / "x", "old")
expect("x", lambda: write_atomic(folder / "x", b"n" * 30_000))
assert (folder / "x").read_text() == "old"

events = Events(folder / "e.jsonl", every=1e9)
events.append("step", step=0)
events.flush()
for step in range(1, 20):
    events.append("step", step=step, text="x" * 3000)
expect("e.jsonl", events.flush)
assert [event["step"] for event in Events(folder / "e.jsonl").read()] == [0]
events.append("step", step=20)
events.close()
assert [event["step"] for event in Events(folder / "e.jsonl").read()] == list(range(21))
"""


def test_without_room_every_write_is_a_clear_error_and_what_was_there_stays(tmp_path: Path, forks: Any) -> None:
    assert forks.run(FULL, folder=str(tmp_path)) == ([], 0)
    files = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".step")}
    assert files == {"e.jsonl", "step-00000001", "step-00000002", "x"}


HOLD = """
import os, time
from weft.runs import Run
with Run.open(folder).locked() as run:
    run.events.append("step", step=0)
    run.events.flush()
    child = os.fork() if fork else 0
    if fork and child == 0:
        time.sleep(60)
        os._exit(0)
    send(child)
    time.sleep(60)
"""


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a forked child that lives on"])
def test_a_run_is_locked_by_one_process_until_it_dies(tmp_path: Path, forks: Any, fork: bool) -> None:
    run = Run.create(tmp_path, "r", manifest={})
    assert run.state() == "interrupted"
    pid = forks.start(HOLD, folder=str(run.path), fork=fork)
    child = forks.receive()
    try:
        assert run.state() == "running"
        with pytest.raises(RunError, match=f"in use by process {pid} on"), run.locked():
            pass
        assert run.state() == "running"
    finally:
        forks.kill()
        assert forks.finish() == ([], -9)
    try:
        assert run.state() == "interrupted"
        with run.locked():
            assert run.state() == "running"
            with pytest.raises(RunError, match="in use by process"), Run.open(run.path).locked():
                pass
        assert run.state() == "interrupted"
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


def test_a_process_that_only_looks_does_not_keep_another_from_locking(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "r", manifest={})
    handle = os.open(run.path / "lock", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)  # as one who looks does, for an instant
    timer = threading.Timer(0.05, os.close, [handle])
    timer.start()
    with run.locked():
        assert run.state() == "running"
    timer.join()
