"""weft verify: equal fingerprints on several stages, and of runs that differ the step, the layer and the cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Done, inside, weft
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.consistency import Exact, VersionSchedule
from weft.space import make_stream
from weft.supernet import initialise
from weft.utils.imports import import_object
from weft.utils.rng import key
from weft.verify.record import Difference, ForwardDigests, LayerUse, RunRecord, first_difference

CODE = """
import os, random
from functools import partial
import numpy as np
import torch
from torch import nn
from weft import Chain, Choice, Data, Shared, Space, Tensors

class Numpy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + float(np.random.rand())

class Counts(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.calls, self.last = 0, None
    def forward(self, x):
        self.calls += 1
        self.last = super().forward(x)
        return self.last * (1 + self.calls % 2)

class Kept(nn.Linear):
    # As it should be: what lasts is a buffer, and draws come from torch's generator.
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("calls", torch.zeros(()))
        self.last = None
    def forward(self, x):
        self.calls += 1
        self.last = torch.nn.functional.dropout(super().forward(x), 0.1) * (1 + self.calls % 2)
        return self.last

class Stage(nn.Linear):
    def forward(self, x):
        return super().forward(x) + int(os.environ.get("RANK", "0"))

class Initial(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        nn.init.constant_(self.bias, np.random.rand())

class Pool(nn.Module):
    def forward(self, x):
        x = x.view(len(x), 1, 1, -1)
        kept, where = nn.functional.max_pool2d(x, (1, 2), return_indices=True)
        return nn.functional.max_unpool2d(kept, where, (1, 2), output_size=x.shape).view(len(x), -1)

class Twist(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        return g * float(np.random.rand())

class Backward(nn.Linear):
    def forward(self, x):
        return Twist.apply(super().forward(x))

def build(kind="Linear", width=6):
    space = Space()
    odd = Pool if kind == "Pool" else partial(globals().get(kind, nn.Linear), width, width)
    first = {"one": partial(nn.Linear, width, width), "two": partial(nn.Linear, width, width), "skip": nn.Identity}
    second = {"one": partial(nn.Linear, width, width), "odd": odd, "two": partial(nn.Linear, width, width)}
    return Chain(
        Shared(partial(nn.Linear, 4, width), "stem"), Choice(space, "b0", first), Choice(space, "b1", second),
        Shared(partial(nn.Linear, width, 3), "head"),
    )

class Listed(torch.utils.data.Dataset):
    # Every read is another one, so that even its fingerprint differs.
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return torch.ones(4) * random.random(), i % 3

def load(kind="plain"):
    if kind == "listed":
        return Listed()
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return Data("numbers", Tensors(x=x, y=x[:, :3].argmax(-1)))

def jitter(batch, draws):
    return {**batch, "x": batch["x"] + float(np.random.rand())}

def loss(outputs, batch):
    return torch.nn.functional.cross_entropy(outputs, batch["y"]) * (1 + random.random())
"""

CONFIG = """
supernet = "verified_net:build"
data = "verified_net:load"
[train]
steps = 400
batch_size = 8
stream = "iid"
[optimizer]
warmup_steps = 3
[execution]
threads = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified")
    (folder / "config.toml").write_text(CONFIG)
    (folder / "verified_net.py").write_text(CODE)
    return folder


def verify(folder: Path, *arguments: str) -> Done:
    return weft("verify", folder / "config.toml", *arguments)


def verdict(folder: Path, *arguments: str, stages: str = "1", steps: int = 12, code: int = 1) -> dict[str, Any]:
    done = verify(folder, "--json", "--stages", stages, "--steps", str(steps), *arguments)
    assert done.code == code, done
    found: dict[str, Any] = json.loads(done.out)
    return found


def first_use(folder: Path, layer: str, after: int = 0) -> int:
    """The first step from ``after`` on whose subnet uses the layer."""
    with inside(folder):
        chain = initialise(import_object("verified_net:build", folder))
    stream = make_stream(chain.space, "iid", 0)
    uses = (step for step in range(after, 400) if layer in [used.name for used in chain.route(stream[step][0])])
    return next(uses)


def test_two_stages_and_a_resumed_run_have_the_bits_of_one(folder: Path) -> None:
    shared = ["--supernet.options.kind=Kept", "--consistency.shared=lagged(3)", "--run.validation=5"]
    done = verify(folder, "--stages", "1,2", "--steps", "7", *shared)
    assert done.code == 0, done
    rows = [line.split("│")[1:-1] for line in done.out.splitlines() if "│" in line]
    assert [row[0].strip() for row in rows] == ["1", "1, stopped and resumed", "2"]
    assert [row[2].strip() for row in rows] == ["yes"] * 3
    prints = {row[1].strip() for row in rows}
    assert len(prints) == 1
    assert len(prints.pop()) == 16  # the whole of it is in the JSON
    assert "7 steps, equal to the last bit" in done.out
    assert "WARNING" not in done.err  # how fast it would be is not asked


def test_the_learning_rates_are_those_of_the_whole_run(folder: Path) -> None:
    def fingerprint(*options: str) -> str:
        return str(verdict(folder, *options, steps=5, code=0)["rows"][0]["fingerprint"])

    assert fingerprint() != fingerprint("--train.steps=5")
    constant = ["--optimizer.schedule=constant", "--optimizer.warmup_steps=0"]
    assert fingerprint(*constant) == fingerprint(*constant, "--train.steps=5")


TWICE = "layer 'b1.odd' gives another result when it is run twice"
READS = "two reads of batch 0 differ in 'x'"
FAULTS: dict[str, tuple[str | None, str, str]] = {
    "--supernet.options.kind=Numpy": ("b1.odd", "forward", TWICE),
    "--supernet.options.kind=Backward": ("b1.odd", "backward", "layer 'b1.odd'"),
    "--supernet.options.kind=Initial": ("b1.odd", "initial weights", "building layer 'b1.odd' twice"),
    "--supernet.options.kind=Pool": ("b1.odd", "kernel", "max_unpool"),
    "--data.options.kind=listed --run.metrics=[]": ("stem", "batch", READS),
    "--train.augment=verified_net:jitter": ("stem", "batch", READS),
    "--train.loss=verified_net:loss": (None, "loss", "the loss "),
}
"""What is wrong with a run: the layer and the place that are named, and how the cause begins."""


@pytest.mark.parametrize("options", FAULTS)
def test_what_is_not_a_function_of_its_inputs_is_named(folder: Path, options: str) -> None:
    layer, place, why = FAULTS[options]
    found = verdict(folder, *options.split())
    where, cause = found["difference"], found["cause"]
    step = first_use(folder, "b1.odd") if layer == "b1.odd" and place != "initial weights" else 0
    assert (where["step"], where["place"]) == (step, place)
    assert where["layer"] == layer or "listed" in options  # even the fingerprint of that data differs
    assert cause["kind"] == ("nondeterministic kernel" if place == "kernel" else "impure")
    assert why in cause["why"]
    fine = [row["equal"] for row in found["rows"]]
    assert fine == ([False, False] if place == "kernel" else [True, False])
    assert where["run"] == ("1 stage" if place == "kernel" else "1 stage, stopped and resumed")


def test_a_layer_that_keeps_something_beside_its_buffers_is_named(folder: Path) -> None:
    # What an instance keeps begins anew where the run is resumed, after 7 of 14 steps.
    uses = [step for step in range(7) if first_use(folder, "b1.odd", step) == step]
    assert len(uses) % 2, "an odd count before the resume makes the counter differ"
    found = verdict(folder, "--supernet.options.kind=Counts", steps=14)
    where = found["difference"]
    assert (where["step"], where["layer"], where["place"]) == (first_use(folder, "b1.odd", 7), "b1.odd", "forward")
    assert found["cause"]["kind"] == "impure"
    assert "layer 'b1.odd'" in found["cause"]["why"]


@pytest.mark.long
def test_a_layer_that_depends_on_its_process_differs_on_two_stages_only(folder: Path) -> None:
    done = verify(folder, "--stages=2", "--steps=6", "--supernet.options.kind=Stage", "--execution.cut=[2]")
    assert done.code == 1, done
    rows = [line.split("│")[1:-1] for line in done.out.splitlines() if "│" in line]
    assert [row[2].strip() for row in rows] == ["yes", "yes", "NO"]
    step = first_use(folder, "b1.odd")
    assert (
        f"first difference (2 stages): step {step}, layer 'b1.odd': its outputs differ, from equal inputs" in done.out
    )
    assert "likely cause: unknown: layer 'b1.odd' gives the same when it is done twice in one process" in done.out
    assert "remedy: " in done.out


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--stages=1,5", "5 stages cannot share 4 blocks: use 1 to 4 stages"),
        ("--stages=0", "--stages takes whole numbers"),
        ("--steps=0", "steps"),
        ("--train.batch_size=999", "larger than the data"),
    ],
)
def test_a_mistake_of_the_user_is_no_difference(folder: Path, option: str, words: str) -> None:
    assert words in verify(folder, option).error


# Two layers, three steps of one micro-batch: step 0 uses both, step 1 the second alone, step 2 both.
ROUTES = [["a", "b"], ["b"], ["a", "b"]]


def test_equal_runs_have_no_difference_and_other_initial_weights_are_named_before_what_follows_from_them() -> None:
    use = LayerUse(1, ROUTES, {name: VersionSchedule(Exact(), 1, 3) for name in "ab"})
    assert first_difference(use, trained(use), trained(use)) is None
    fault = (-1, "b", "initial weights")
    assert first_difference(use, trained(use), trained(use, fault)) == Difference(0, "b", "initial weights")


@given(st.data())
def test_whatever_goes_wrong_is_found_where_it_went_wrong(data: st.DataObject) -> None:
    m, names = data.draw(st.integers(1, 3)), ["a", "b", "c", "d"]
    routes = data.draw(st.lists(st.lists(st.sampled_from(names), min_size=1, unique=True), min_size=1, max_size=5))
    routes = [sorted(route) for route in routes for _ in range(m)]
    clocks = {name: VersionSchedule(Exact(), m, len(routes)) for name in names}
    use = LayerUse(m, routes, clocks)
    n = data.draw(st.integers(0, len(routes) - 1))
    name = data.draw(st.sampled_from(routes[n]))
    fault = data.draw(
        st.sampled_from([(n, routes[n][0], "batch"), (n, name, "forward"), (n, None, "loss"), (n, name, "backward")])
    )
    found = first_difference(use, trained(use), trained(use, fault))
    assert found == Difference(n // m, fault[1], fault[2])  # type: ignore[arg-type]


def trained(use: LayerUse, fault: tuple[int, str | None, str] | None = None) -> RunRecord:
    """A run in symbols: what depends on something has it in its name, and a fault leaves a mark in what it reaches."""
    weights = {name: f"{name}{'!' if fault == (-1, name, 'initial weights') else ''}" for name in use.clocks}
    sums: dict[str, str] = dict.fromkeys(weights, "")
    losses, records = {}, {}
    for n, route in enumerate(use.routes):
        step, j = divmod(n, use.microbatches)

        def mark(place: str, name: str | None, n: int = n) -> str:
            return "!" if fault == (n, name, place) else ""

        carry = f"x{n}{mark('batch', route[0])}"
        for name in route:
            out = f"{name}({weights[name]}, {carry}){mark('forward', name)}"
            records[n, name] = ForwardDigests(carry, "", weights[name], out)
            carry = out
        loss = f"loss({carry}){mark('loss', None)}"
        losses[step] = losses.get(step, 0.0) + float(key(loss))
        gradient = loss
        for name in reversed(route):
            gradient = f"{name}'({gradient}){mark('backward', name)}"
            sums[name] += gradient
        if j == use.microbatches - 1:
            for name in weights:
                weights[name] += f" - {key(sums[name])}" * bool(sums[name])
                sums[name] = ""
    return RunRecord(losses, dict(weights), records)
