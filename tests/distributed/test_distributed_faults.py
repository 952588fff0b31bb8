"""Stages in real processes that are killed, stopped, interrupted, or run code that fails."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import disturbed
import pytest
import stages
import torch
from processes import processes
from stages import in_stages, make_task, sequentially

import weft
from weft.errors import NonFiniteError, PipelineError, TrainError
from weft.trainer.api import TrainedRun

HERE = Path(disturbed.__file__).parent

STEPS = 40


@pytest.fixture(autouse=True)
def soon_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that waits for the dead in a checkpoint gives up after a few seconds."""
    monkeypatch.setenv("WEFT_SILENCE", "2.5")


def train(runs: Path, seen: Path | None = None, **more: Any) -> TrainedRun:
    data = partial(disturbed.samples, "text", None if seen is None else str(seen))
    options: dict[str, Any] = {"steps": STEPS, "checkpoint_every": 5, "batch_size": 4, "microbatches": 2}
    consistency = {"embed": "lagged(2)", "norm": "delayed(1)", "out": "delayed(4)"}
    told = {"consistency": consistency, "loss": disturbed.loss, "stream": "iid", "folder": runs, "run": "x"}
    return weft.train(disturbed.text, data, **{**options, **told, **more})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return str(train(tmp_path_factory.mktemp("whole")).fingerprint)


class Strikes:
    """A thread that waits for a moment of each start of the stages and then sends a signal to one of them.

    ``plan`` has a rank, a signal and a moment for each start: a function of the run's directory that is asked, until it
    says yes, once all stages of the start have loaded their data.
    """

    def __init__(self, seen: Path, run: Path, plan: list[tuple[int, signal.Signals, Callable[[Path], bool]]]) -> None:
        self.struck = 0
        self._seen, self._run, self._plan = seen, run, plan
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._strike, daemon=True)

    def _strike(self) -> None:
        for start, (rank, number, moment) in enumerate(self._plan):
            while not (pid := self._pid(start, rank)) or not moment(self._run):
                if self._over.wait(0.001):
                    return
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                self.struck += 1

    def _pid(self, start: int, rank: int) -> int:
        with suppress(FileNotFoundError):
            return int((self._seen / f"{start}.{rank}").read_text())
        return 0

    def __enter__(self) -> Strikes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def after(steps: int) -> Callable[[Path], bool]:
    """The moment at which this many steps are written down."""

    def reached(run: Path) -> bool:
        with suppress(FileNotFoundError):
            return (run / "events.jsonl").read_text().count('"event": "step"') >= steps
        return False

    return reached


def in_a_checkpoint(run: Path) -> bool:
    """A moment at which a checkpoint is being written and not yet published."""
    with suppress(FileNotFoundError):
        return any(any(path.iterdir()) for path in (run / "checkpoints").glob(".*.tmp"))
    return False


def in_a_while(seconds: float) -> Callable[[Path], bool]:
    """So long after it was first asked."""
    began: list[float] = []

    def passed(run: Path) -> bool:
        began.append(time.monotonic()) if not began else None
        return time.monotonic() - began[0] >= seconds

    return passed


def starts(seen: Path) -> set[str]:
    return {path.name for path in seen.iterdir() if not path.name.startswith(".")}


def assert_whole(trained: TrainedRun, fingerprint: str) -> None:
    """The run is as if nothing had happened, its log included."""
    assert trained.fingerprint == fingerprint
    assert [e["step"] for e in trained.run.events.read() if e["event"] == "step"] == list(range(STEPS))
    assert trained.run.state() == "finished"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_moments_never_change_a_bit(
    undisturbed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    draw = random.Random(seed)
    count = draw.choice([2, 3, 4])
    seen = tmp_path / "seen"
    seen.mkdir()
    moments = [lambda: in_a_checkpoint, lambda: in_a_while(draw.uniform(0.0, 3.0)), lambda: after(draw.randrange(35))]
    plan = [(draw.randrange(count), signal.SIGKILL, draw.choice(moments)()) for _ in range(6)]
    with Strikes(seen, tmp_path / "x", plan) as strikes:
        trained = train(tmp_path, seen, stages=count, max_restarts=6)
    assert_whole(trained, undisturbed)
    assert strikes.struck > 0
    assert "all stages start again (1 of 6)" in caplog.text
    at = [e["at"] for e in trained.run.events.read() if e["event"] == "started"]
    assert at[0] == 0
    assert at == sorted(at)


def test_a_stage_that_is_stopped_is_named_and_ended(tmp_path: Path) -> None:
    words = r"^rank 1 hangs: no sign of life for \d+ s.*restarted 0 times"
    plan = [(1, signal.SIGSTOP, after(5))]
    with Strikes(tmp_path, tmp_path / "x", plan) as strikes, pytest.raises(TrainError, match=words):
        train(tmp_path, tmp_path, stages=2, max_restarts=0)
    assert strikes.struck == 1
    for name in ("0.0", "0.1"):
        assert not Path(f"/proc/{(tmp_path / name).read_text()}").exists()


@pytest.mark.long
def test_a_run_goes_on_after_a_stage_was_stopped(undisturbed: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    plan = [(rank, signal.SIGSTOP, after(5 + 10 * rank)) for rank in (0, 2, 1)]
    with Strikes(seen, tmp_path / "x", plan) as strikes:
        trained = train(tmp_path, seen, stages=3)
    assert strikes.struck == 3
    assert_whole(trained, undisturbed)


@pytest.mark.parametrize("text", ["soon", "0.5", "inf", "nan"])
def test_a_silence_that_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.trainer.rank_main import silence

    monkeypatch.setenv("WEFT_SILENCE", text)
    with pytest.raises(TrainError, match=r"WEFT_SILENCE='.*' in the environment: it is a number of seconds above 1"):
        silence()


# Code that fails


def numbers(step: int) -> dict[str, torch.Tensor]:
    return {name: values[4 * step % 16 :][:4] for name, values in disturbed.numbers().items()}


def test_an_error_in_a_layer_is_one_line_and_nothing_is_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    net = partial(disturbed.faulty, 3, "raise")
    options: dict[str, Any] = {"batch_size": 4, "folder": tmp_path, "run": "x", "cut": (2,), "stream": "fair"}
    with pytest.raises(TrainError) as caught:
        weft.train(net, disturbed.numbers, steps=4, stages=2, **options)
    text = str(caught.value)
    assert text.startswith("rank 1 failed: ValueError: a layer that fails (")
    assert "disturbed.py, line " in text
    assert text.endswith(", in forward)")
    assert capfd.readouterr() == ("", "")
    # What stages log is logged by the process that started them, here the bubble that is foreseen.
    said = [record.getMessage() for record in caplog.records if record.name.startswith("weft")]
    assert len(said) == 1, said
    assert said[0].startswith("every subnet uses 'layer0', 'layer1', 'layer2' and others with consistency exact, so ")
    events = list(weft.Run.open(tmp_path / "x").events.read())
    assert [e["event"] for e in events if e["event"] != "pipeline"] == ["started", "failed"]
    assert events[-1]["reason"] == text


def test_what_cannot_travel_is_refused_with_the_name_of_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stages.KINDS, "faulty", (partial(disturbed.faulty, 1, "sparse"), numbers))
    words = r"^layer 'layer1': a tensor of type float32, layout torch.sparse_coo cannot travel"
    with pytest.raises(PipelineError, match=words):
        in_stages(make_task("faulty", stream="fair"), (2,), 4)


@pytest.mark.parametrize("where", range(5))
def test_a_loss_that_is_not_a_number_names_the_layer_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch, where: int
) -> None:
    monkeypatch.setitem(stages.KINDS, "faulty", (partial(disturbed.faulty, where, "nan"), numbers))
    task = make_task("faulty", m=2, stream="fair")
    with pytest.raises(NonFiniteError, match=f"it first appears in layer 'layer{where}'") as alone:
        sequentially(task)
    for cut in ((), (1,), (3,), (1, 2, 4), (1, 2, 3, 4)):
        for seed in range(3):
            with pytest.raises(NonFiniteError) as caught:
                in_stages(task, cut, 4, seed)
            assert str(caught.value) == str(alone.value)


# The command line, and torchrun

CONFIG = """
supernet = "disturbed:text"
data = {{ source = "disturbed:samples", options = {{ kind = "text" }} }}
[run]
name = "x"
folder = {runs!r}
checkpoint_every = 1000
[train]
steps = 60
batch_size = 4
microbatches = 2
loss = "disturbed:loss"
stream = "iid"
[execution]
threads = 1
[consistency]
shared = "lagged(2)"
"""


@contextmanager
def started(*command: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, so that a terminal can be played; it is ended with the block."""
    paths = [str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    with processes() as start:
        yield start(*command, cwd=cwd, env=environment, start_new_session=True)


def test_ctrl_c_writes_a_checkpoint_and_the_run_goes_on_on_another_number_of_stages(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG.format(runs=str(tmp_path / "runs")))
    weft_train = ("-m", "weft", "train", "config.toml")
    run = tmp_path / "runs" / "x"
    with started(*weft_train, "--stages=2", cwd=tmp_path) as process:
        until = time.monotonic() + 120
        while not after(3)(run):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the parent and every stage
        out, err = process.communicate(timeout=60)
    opened = weft.Run.open(run)
    assert opened.state() == "stopped"
    at = opened.checkpoints.steps()
    assert len(at) == 1
    assert 3 <= at[0] < 60
    assert process.returncode == 130
    assert out == ""
    command = "weft train config.toml --stages=2 --resume"
    assert err == f"stopped; a checkpoint after {at[0]} steps is written. Resume with: {command}\n"
    net, data = disturbed.text, partial(disturbed.samples, "text")
    told: dict[str, Any] = {"loss": disturbed.loss, "consistency": {"shared": "lagged(2)"}, "stream": "iid"}
    options = {**told, "steps": 60, "batch_size": 4, "microbatches": 2, "threads": 1}
    again = weft.train(net, data, folder=run.parent, run="x", resume=True, **options)
    assert again.fingerprint == weft.train(net, data, folder=tmp_path, run="whole", **options).fingerprint


SCRIPT = """
import os, sys
import disturbed, weft
from functools import partial
weft.train(
    disturbed.text, partial(disturbed.samples, "text"), steps=6 + {differ} * int(os.environ["RANK"]), batch_size=4,
    stream="iid", folder=sys.argv[1], run="x", consistency="lagged(2)",
)
"""


def torchrun(tmp_path: Path, differ: int) -> tuple[int, str]:
    (tmp_path / "script.py").write_text(SCRIPT.format(differ=differ))
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py", str(tmp_path))
    with started(*command, cwd=tmp_path) as process:
        err = process.communicate(timeout=120)[1]
        return process.returncode, err


def test_processes_of_torchrun_that_disagree_are_refused_and_shown_the_difference(tmp_path: Path) -> None:
    code, err = torchrun(tmp_path, differ=1)
    assert code != 0
    assert "rank 1 was started with another configuration: steps is 7 here and 6 on rank 0" in err
    assert not (tmp_path / "x" / "events.jsonl").exists()


@pytest.mark.long
def test_processes_of_torchrun_that_agree_train(tmp_path: Path) -> None:
    code, err = torchrun(tmp_path, differ=0)
    assert code == 0, err
    net, data = disturbed.text, partial(disturbed.samples, "text")
    whole = weft.train(
        net, data, steps=6, batch_size=4, stream="iid", folder=tmp_path, run="one", consistency="lagged(2)"
    )
    last = list(weft.Run.open(tmp_path / "x").events.read())[-1]
    assert (last["event"], last["fingerprint"]) == ("finished", whole.fingerprint)
