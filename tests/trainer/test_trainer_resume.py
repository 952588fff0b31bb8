"""Resume: a run that crashed, was stopped or killed, and went on ends with the fingerprint of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from stages import Listed
from torch import Tensor, nn

import weft
from weft.data import Draws
from weft.engine.losses import cross_entropy, mean_squared_error
from weft.engine.optimizer import Optimizer
from weft.errors import CheckpointError, RunError
from weft.space import Space
from weft.supernet import Chain, Choice, Shared

STEPS, BATCH, WIDTH = 11, 8, 4


def mlp() -> Chain:
    space = Space()

    def layer(hidden: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH))

    blocks = [
        Choice(space, f"b{i}", {"p": partial(layer, 3), "q": partial(layer, 5), "skip": nn.Identity}) for i in range(2)
    ]
    return Chain(
        Shared(partial(nn.Linear, WIDTH, WIDTH), "stem"), *blocks, Shared(partial(nn.Linear, WIDTH, WIDTH), "head")
    )


def noisy() -> Chain:
    """Dropout, batch norms, an embedding of extra inputs and weights tied within a layer."""
    space = Space()

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.2), nn.Dropout(0.3))

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, WIDTH)

        def forward(self, x: Tensor, *, kind: Tensor) -> Tensor:
            return x + self.table(kind)

    blocks = [Choice(space, f"b{i}", {"p": layer, "q": layer, "tied": Tied}) for i in range(2)]
    return Chain(
        Shared(Told, "stem", extra_inputs=["kind"]),
        *blocks,
        Shared(partial(nn.Linear, WIDTH, WIDTH), "head"),
        inputs="x",
    )


def data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(40, WIDTH, generator=generator),
        "y": torch.randn(40, WIDTH, generator=generator),
        "kind": torch.randint(0, 5, (40,), generator=generator),
    }


class Crash(Exception):
    pass


def crashing(at: int) -> Any:
    """Raises from the event of a step, as a user's callback or a full disk would."""

    def callback(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == at:
            raise Crash

    return callback


OPTIONS: dict[str, Any] = {
    "steps": STEPS,
    "batch_size": BATCH,
    "loss": mean_squared_error,
    "stream": "iid",
    "checkpoint_every": 3,
}


def train(folder: Path, net: Any = mlp, source: Any = None, **changes: Any) -> weft.TrainedRun:
    return weft.train(net, data() if source is None else source, folder=folder, **{**OPTIONS, **changes})


def undisturbed_and_resumed(
    folder: Path, net: Any, crashes: tuple[int, ...] = (4, 7), source: Any = None, **changes: Any
) -> tuple[weft.TrainedRun, weft.TrainedRun]:
    rows = data()
    parts = weft.Data("rows", weft.Tensors(**rows), weft.Tensors(**{key: part[:8] for key, part in rows.items()}))
    given = {"net": net, "source": parts if source is None else source, **changes}
    whole = train(folder, run="whole", **given)
    for at in crashes:
        with pytest.raises(Crash):
            train(folder, run="x", resume=True, callbacks=[crashing(at)], **given)
    # The crash came after a checkpoint, and not at the last moment of a window.
    assert weft.Run.open(folder / "x").checkpoints.steps()[-1] == crashes[-1] // 3 * 3
    return whole, train(folder, run="x", resume=True, **given)


def assert_same(whole: weft.TrainedRun, resumed: weft.TrainedRun) -> None:
    for (name, a), b in zip(whole.chain.state_dict().items(), resumed.chain.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert whole.fingerprint == resumed.fingerprint
    steps = [
        [(e["step"], e["loss"], e["subnets"], e["rate"]) for e in trained.run.events.read() if e["event"] == "step"]
        for trained in (whole, resumed)
    ]
    assert steps[0] == steps[1]
    assert [step for step, *_ in steps[0]] == list(range(STEPS))
    # At the end nothing is kept or waits, in layers that were not used again after the crash either.
    for numbers in resumed.run.checkpoints.load().meta["layers"].values():
        assert numbers["kept"] == []
        assert "pending" not in numbers


OPTIMIZERS = {
    "sgd": Optimizer("sgd", lr=0.02, momentum=0.9, weight_decay=0.01),
    "adamw": Optimizer("adamw", lr=0.01, amsgrad=True),
    "nadam": Optimizer("nadam", lr=0.01),
    "muon": Optimizer("muon", lr=0.01, others=Optimizer("sgd", lr=0.01, momentum=0.5)),
}


CONSISTENCIES = ("exact", "delayed(2)", "lagged(4)", "bounded(8,4)", "bounded(2,4)")


@pytest.mark.parametrize(
    ("consistency", "m", "optimizer"),
    [
        *((consistency, m, "sgd") for consistency in CONSISTENCIES for m in (1, 2)),
        *(("lagged(4)", 2, optimizer) for optimizer in OPTIMIZERS if optimizer != "sgd"),
        ("bounded(2,4)", 1, "adamw"),
    ],
)
def test_a_resumed_run_has_the_fingerprint_of_an_undisturbed_one(
    tmp_path: Path, consistency: str, m: int, optimizer: str
) -> None:
    options = {"consistency": consistency, "microbatches": m, "optimizer": OPTIMIZERS[optimizer]}
    assert_same(*undisturbed_and_resumed(tmp_path, mlp, **options))


class Counting(torch.optim.Optimizer):
    """Keeps plain numbers in its state, as many optimizers outside torch do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                state["scale"] = state.get("scale", 1.0) * 0.7
                p.add_(p.grad, alpha=-group["lr"] * state["scale"] / state["n"])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.bfloat16) for kind in ("nadam", "asgd", "adamw", Counting)),
        ("nadam", torch.float32),
        ("asgd", torch.float64),
    ],
)
def test_the_optimizers_state_comes_back_in_its_own_type(tmp_path: Path, kind: Any, dtype: torch.dtype) -> None:
    def build() -> Chain:
        layers = {name: lambda: nn.Linear(WIDTH, WIDTH).to(dtype) for name in "pq"}
        return Chain(Choice(Space(), "b", layers), Shared(nn.Identity(), "end"))

    source = {key: value.to(dtype) for key, value in data().items() if key != "kind"}
    assert_same(*undisturbed_and_resumed(tmp_path, build, (7,), source, optimizer=Optimizer(kind, lr=0.05)))


MIXED = {"shared": "lagged(4)", "b0": "delayed(3)", "b1.p": "bounded(4,4)", "b1.q": "exact", "b1.tied": "bounded(8,3)"}


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16"},
        {"optimizer": Optimizer(clip=0.1, schedule="cosine", warmup_steps=5)},
        {"optimizer": Optimizer("adamw", lr=0.01, schedule=lambda step, steps: 1 / (step + 1))},
        {"on_nonfinite": "skip", "validation": 4},
    ],
    ids=["plain", "bf16", "clip, cosine, warm-up", "own schedule", "skip, validate"],
)
def test_dropout_norms_ties_and_mixed_consistencies_resume_too(tmp_path: Path, m: int, options: dict[str, Any]) -> None:
    assert_same(*undisturbed_and_resumed(tmp_path, noisy, microbatches=m, consistency=MIXED, **options))


@pytest.mark.parametrize(("consistency", "fused"), [("exact", True), ("lagged(4)", False), ("bounded(4,3)", True)])
def test_images_with_channels_innermost_resume_too(tmp_path: Path, consistency: str, fused: bool) -> None:
    """Checkpoints hold tensors in row-major order; weights, momenta and old versions must come back as they lay."""

    def build() -> Chain:
        space = Space()
        layers = {"p": partial(nn.Conv2d, 3, 3, 3, padding=1), "q": partial(nn.Conv2d, 3, 3, (3, 1), padding=(1, 0))}
        return Chain(
            Shared(partial(nn.Conv2d, 2, 3, 3, padding=1), "stem"),
            Choice(space, "b", layers),
            Shared(nn.Flatten(), "head"),
        )

    generator = torch.Generator().manual_seed(0)
    images = {"x": torch.randn(40, 2, 4, 4, generator=generator), "y": torch.randn(40, 48, generator=generator)}
    optimizer = Optimizer("sgd", lr=0.01, momentum=0.9, fused=fused)
    given: dict[str, Any] = {"channels_last": True, "consistency": consistency, "optimizer": optimizer}
    assert_same(*undisturbed_and_resumed(tmp_path, build, (4,), images, **given))


def test_augmentation_and_a_teacher_resume(tmp_path: Path) -> None:
    torch.manual_seed(1)
    teacher = nn.Linear(WIDTH, WIDTH)
    loss = weft.Distillation(teacher, mean_squared_error)

    def augment(batch: dict[str, Tensor], draws: Draws) -> dict[str, Tensor]:
        return {**batch, "x": batch["x"] + torch.from_numpy(draws.uniform("shift")).float().view(-1, 1)}

    assert_same(*undisturbed_and_resumed(tmp_path, mlp, loss=loss, augment=augment, data_workers=2))


def test_a_layer_that_counts_in_a_buffer_of_its_own_resumes(tmp_path: Path) -> None:
    class Counts(nn.Module):
        def __init__(self, persistent: bool = True) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("seen", torch.zeros(()), persistent=persistent)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen += 1
            return x * self.scale / (1 + self.seen)

    def build() -> Chain:
        layers = {"p": partial(Counts, False), "q": Counts}
        return Chain(Choice(Space(), "b", layers), Shared(partial(nn.Linear, WIDTH, WIDTH), "head"))

    assert_same(*undisturbed_and_resumed(tmp_path, build))


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(tmp_path: Path) -> None:
    whole = train(tmp_path, run="whole", consistency="lagged(4)")
    with pytest.raises(Crash):
        train(tmp_path, run="x", callbacks=[crashing(7)], consistency="lagged(4)")
    checkpoints = weft.Run.open(tmp_path / "x").checkpoints
    assert checkpoints.steps() == [3, 6]
    shard = next((tmp_path / "x" / "checkpoints").glob("*6*/*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    assert_same(whole, train(tmp_path, run="x", resume=True, consistency="lagged(4)"))


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    whole = train(tmp_path, run="whole", checkpoint_every=100)
    with pytest.raises(Crash):
        train(tmp_path, run="x", callbacks=[crashing(7)], checkpoint_every=100)
    assert_same(whole, train(tmp_path, run="x", resume=True, checkpoint_every=100))


def test_resuming_a_finished_run_trains_nothing_and_gives_its_fingerprint(tmp_path: Path) -> None:
    first = train(tmp_path, run="x")
    events: list[str] = []
    again = train(tmp_path, run="x", resume=True, callbacks=[lambda e: events.append(e["event"])])
    assert events == ["started", "finished"]
    assert_same(first, again)


def test_resume_of_a_run_that_is_not_there_starts_it(tmp_path: Path) -> None:
    assert train(tmp_path, run="new", resume=True).run.name == "new"
    with pytest.raises(RunError, match="name of the run"):
        train(tmp_path, resume=True)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run "x" that was interrupted, which no refused resume changes."""
    folder = tmp_path_factory.mktemp("crashed")
    with pytest.raises(Crash):
        train(folder, run="x", callbacks=[crashing(4)])
    return folder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"batch_size": 4}, "batch_size"),
        ({"microbatches": 2}, "microbatches"),
        ({"steps": 12}, "steps"),
        ({"stream": "fair"}, "stream"),
        ({"optimizer": Optimizer("sgd", lr=0.5)}, "optimizer"),
        ({"optimizer": Optimizer(schedule="linear")}, "optimizer"),
        ({"optimizer": Optimizer(warmup_steps=1)}, "optimizer"),
        ({"optimizer": Optimizer(clip=1.0)}, "optimizer"),
        ({"precision": "bf16"}, "precision"),
        ({"consistency": "delayed(1)"}, "consistency"),
        ({"loss": cross_entropy}, "loss"),
        ({"on_nonfinite": "skip"}, "on_nonfinite"),
        ({"channels_last": True}, "channels_last"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_would_change_the_result_are_refused_on_resume(
    crashed: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(RunError, match=f"made with {named} = "):
        train(crashed, run="x", resume=True, **change)


def test_other_data_and_another_supernet_are_refused_on_resume(crashed: Path) -> None:
    other = data()
    other["x"][0, 0] += 1
    with pytest.raises(RunError, match="made with data = "):
        train(crashed, source=other, run="x", resume=True)
    with pytest.raises(RunError, match="made with space = "):
        train(crashed, net=noisy, run="x", resume=True)

    def wider() -> Chain:
        chain = mlp()
        chain.module("head").factory = partial(nn.Linear, WIDTH, WIDTH, bias=False)
        return chain

    with pytest.raises(CheckpointError, match="does not fit layer 'head'"):
        train(crashed, net=wider, run="x", resume=True)


def weighted(outputs: Tensor, batch: dict[str, Tensor], weight: float) -> Tensor:
    return weight * mean_squared_error(outputs, batch)


class Weighted:
    def __call__(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return mean_squared_error(outputs, batch)


def test_losses_that_print_their_address_can_be_resumed_in_another_process(tmp_path: Path) -> None:
    """A partial function or an object shows where it lies in memory, which another process cannot repeat."""
    for make in (lambda: partial(weighted, weight=0.5), Weighted):
        folder = tmp_path / str(make())[:10].strip("<>").replace(".", "")
        kept = [make()]  # so that the second one lies elsewhere
        with pytest.raises(Crash):
            train(folder, run="x", callbacks=[crashing(4)], loss=kept[0])
        manifest = weft.Run.open(folder / "x").manifest
        assert "0x" not in str(manifest["train_config"]["loss"])
        train(folder, run="x", resume=True, loss=make())
    with pytest.raises(RunError, match="made with loss"):
        train(folder, run="x", resume=True, loss=partial(weighted, weight=0.25))


def test_a_layer_that_is_not_used_after_the_crash_lets_go_of_its_old_versions(tmp_path: Path) -> None:
    space = mlp().space
    p, q = space.subnet(b0="p", b1="p"), space.subnet(b0="q", b1="q")
    given: dict[str, Any] = {"stream": Listed(space, [(p,)] * 5 + [(q,)] * 6), "consistency": "delayed(3)"}
    with pytest.raises(Crash):
        train(tmp_path, run="x", callbacks=[crashing(6)], **given)
    assert weft.Run.open(tmp_path / "x").checkpoints.load().meta["layers"]["b0.p"]["kept"] == [3, 4]
    whole = train(tmp_path, run="whole", **given)
    assert_same(whole, train(tmp_path, run="x", resume=True, **given))


# Runs that are interrupted or killed in the middle of anything, in processes of their own, and go on.


SCRIPT = """
import json, os, sys, time
from functools import partial
import torch
from torch import nn
import weft
from weft import Optimizer
from weft.engine.losses import mean_squared_error
torch.set_num_threads(1)
p = nn.Parameter(torch.zeros(1))
p.grad = torch.zeros(1)
torch.optim.AdamW([p]).step()  # torch imports much when its first optimizer runs: once here, and not in every child

def build():
    space = weft.Space()
    layer = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))
    blocks = [weft.Choice(space, f"b{i}", {"p": layer, "q": layer}) for i in range(3)]
    ends = [weft.Shared(partial(nn.Linear, 4, 4), name) for name in ("stem", "head")]
    return weft.Chain(ends[0], *blocks, ends[1])

def train(pause, **more):
    generator = torch.Generator().manual_seed(0)
    data = {key: torch.randn(40, 4, generator=generator) for key in "xy"}
    def watch(event):
        if event["event"] in ("step", "started"):
            say(event.get("step", -1))
            time.sleep(pause)
    return weft.train(
        build, data, steps=24, batch_size=8, microbatches=2, loss=mean_squared_error, stream="iid", checkpoint_every=2,
        consistency={"shared": "lagged(3)", "b0": "delayed(2)", "b1": "bounded(4,4)"},
        optimizer=Optimizer("adamw", lr=0.01),
        callbacks=[watch], resume=True, **more)

def say(value):
    os.write(1, (json.dumps(value) + "\\n").encode())

for line in sys.stdin:
    task = json.loads(line)
    pid = os.fork()
    if pid == 0:
        say({"pid": os.getpid()})
        try:
            say({"fingerprint": train(**task).fingerprint})
        except BaseException as error:
            say({"error": type(error).__name__, "text": str(error)})
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    say({"end": os.waitstatus_to_exitcode(status)})
"""


class Trainings:
    """An interpreter that has imported torch forks a child for each training, whose words come back line by line."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = 0

    def start(self, runs: Path, run: str, pause: float = 0.0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"folder": str(runs), "run": run, "pause": pause}).encode() + b"\n")
        self.process.stdin.flush()
        self.pid = self.hear()["pid"]

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def hear_step(self, step: int) -> None:
        """Waits until the child is there; step -1 is the start."""
        while self.hear() < step:
            pass

    def finish(self) -> dict[str, Any]:
        """What the child said apart from its steps, and its exit status as its ``end`` (-9 if killed)."""
        said: dict[str, Any] = {}
        while "end" not in said:
            heard = self.hear()
            said |= heard if isinstance(heard, dict) else {}
        return said

    def fingerprint(self, runs: Path) -> str:
        """That of the run, once it has gone on to its end."""
        self.start(runs, "x")
        said = self.finish()
        assert said["end"] == 0, said
        return str(said["fingerprint"])


@pytest.fixture(scope="module")
def trainings() -> Iterator[Trainings]:
    home = Trainings()
    yield home
    assert home.process.stdin is not None
    home.process.stdin.close()
    home.process.wait(30)


@pytest.fixture(scope="module")
def undisturbed(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> str:
    return trainings.fingerprint(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_three_times_at_random_moments_ends_as_if_nothing_had_happened(
    trainings: Trainings, undisturbed: str, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    for _ in range(3):
        trainings.start(tmp_path, "x", pause=0.01)
        trainings.hear_step(-1)
        time.sleep(draw.uniform(0.0, 0.15))
        os.kill(trainings.pid, signal.SIGKILL)
        assert trainings.finish()["end"] == -signal.SIGKILL
    assert trainings.fingerprint(tmp_path) == undisturbed
    steps = [e["step"] for e in weft.Run.open(tmp_path / "x").events.read() if e["event"] == "step"]
    assert steps == list(range(24))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_finishes_the_step_writes_a_checkpoint_and_the_run_can_go_on(
    trainings: Trainings, undisturbed: str, tmp_path: Path, number: signal.Signals
) -> None:
    trainings.start(tmp_path, "x", pause=0.02)
    trainings.hear_step(8)
    os.kill(trainings.pid, number)
    assert trainings.finish()["error"] == "KeyboardInterrupt"
    run = weft.Run.open(tmp_path / "x")
    assert run.state() == "stopped"
    last = list(run.events.read())[-1]
    assert last["event"] == "stopped"
    assert 9 <= last["at"] < 24
    assert run.checkpoints.steps()[-1] == last["at"]
    assert trainings.fingerprint(tmp_path) == undisturbed


def test_a_second_ctrl_c_stops_at_once_and_the_run_can_go_on(
    trainings: Trainings, undisturbed: str, tmp_path: Path
) -> None:
    trainings.start(tmp_path, "x", pause=0.2)
    trainings.hear_step(3)
    os.kill(trainings.pid, signal.SIGINT)
    time.sleep(0.05)
    os.kill(trainings.pid, signal.SIGINT)
    assert trainings.finish()["error"] == "KeyboardInterrupt"
    assert trainings.fingerprint(tmp_path) == undisturbed
