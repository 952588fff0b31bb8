"""Steps that are replayed: the same bits as steps that run as they are, and what cannot be replayed runs as it is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import CachesTable, Idle, conv, mlp, transformer
from standin import Standin
from torch import Tensor, nn

import weft
from weft.data import Data, digits
from weft.engine.losses import cross_entropy
from weft.memory.allocator import AllocatorConfig
from weft.memory.replay import replay, reserved_in_two_pools
from weft.memory.timeline import AllocationTimeline
from weft.nn.state import ModuleState
from weft.runs import Checkpoints
from weft.tune.fit.peaks import step_memory
from weft.tune.fusion.trainer import train_fused
from weft.tune.jobs import Fit
from weft.tune.recipe import Recipe, TrialConfig, trial_config
from weft.tune.training.cuda_graphs import MAX_GRAPHS, MIN_STEPS, WARM_UP_STEPS, GraphedStep, empty_aligned_like
from weft.tune.training.memory_limit import OutOfMemory
from weft.tune.training.trainer import Result, train
from weft.utils.rng import host

STEPS = 14
MODELS = {"mlp": mlp, "conv": conv, "transformer": transformer, "idle": lambda _: Idle(), "caches": CachesTable}


class Odd(nn.Module):
    """What it does differs from forward to forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.head, self.how, self.count, self.mean = nn.Linear(64, 10), how, 0, torch.ones(())
        self.own = np.random.default_rng(0)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(image.flatten(1))
        if not self.training:
            return out
        if self.how == "counts":
            self.count += 1
            return out * self.count
        if self.how == "keeps":
            self.mean = 0.9 * self.mean + out.mean().detach()
            return out * self.mean
        return out * float(self.own.random() if self.how == "draws" else np.random.rand())  # noqa: NPY002


@contextmanager
def recorded() -> Iterator[list[Standin]]:
    """The recorders that trainings within the block are given."""
    found: list[Standin] = []

    def recorder(device: torch.device) -> Standin:
        found.append(Standin())
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        for module in ("training", "fusion"):
            patch.setattr(f"weft.tune.{module}.trainer.make_recorder", recorder)
        yield found
    assert all(one.closed for one in found)


@pytest.fixture(scope="module")
def data() -> Data:
    return digits()


def recipe(data: Data, model: Any, **fields: Any) -> Recipe:
    given: dict[str, Any] = {
        "steps": STEPS,
        "batch_size": 16,
        "report_every": 5,
        "optimizer_options": {"lr": 0.02},
    } | fields
    metrics = {"accuracy": weft.accuracy}
    return Recipe(model=model, data=data, metrics=metrics, objectives=("accuracy", "loss"), **given)


def cut(micro: int) -> Fit:
    return Fit("accumulate", micro, -(-16 // micro), 1, 0, None, "")


def run(one: TrialConfig, folder: Path, fit: Fit | None = None) -> tuple[Result, dict[str, Tensor]]:
    result = train(one, fit, device="cpu", directory=folder, report=lambda *_: False)
    return result, kept(folder)


def kept(folder: Path) -> dict[str, Tensor]:
    """What the last two checkpoints hold: the earlier has the optimizer's state, the last the weights."""
    steps = Checkpoints(folder / "checkpoints").steps()[-2:]
    return {
        f"{step} {n}": t for step in steps for n, t in Checkpoints(folder / "checkpoints").load(step).tensors.items()
    }


def check_same(one: Any, other: Any) -> None:
    (mine, tensors), (its, wanted) = one, other
    assert mine.losses == its.losses
    assert mine.values == its.values
    assert tensors.keys() == wanted.keys()
    assert any(name.startswith("10 ") for name in tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize(
    ("model", "micro", "graphs"), [*((name, 16, 1) for name in MODELS), ("mlp", 4, 3), ("conv", 6, 3), ("idle", 6, 3)]
)
def test_replayed_steps_have_the_bits_of_steps_that_run_eagerly(
    model: str, micro: int, graphs: int, data: Data, tmp_path: Path
) -> None:
    fit = None if micro == 16 else cut(micro)
    one = trial_config(recipe(data, MODELS[model], microbatch_batchnorm=True, lr_schedule="cosine"), {})
    wanted = run(one, tmp_path / "plain", fit)
    with recorded() as made:
        check_same(run(one, tmp_path / "replayed", fit), wanted)
    assert len(made) == 1
    assert made[0].captures == graphs
    assert made[0].replays == (STEPS - WARM_UP_STEPS) * (1 if fit is None else fit.microbatches)


@pytest.mark.parametrize(("optimizer", "precision"), [("sgd", "bf16"), ("rmsprop", "fp32")])
def test_any_optimizer_and_precision_is_replayed(optimizer: str, precision: str, data: Data, tmp_path: Path) -> None:
    one = trial_config(recipe(data, mlp, optimizer=optimizer, precision=precision), {})
    wanted = run(one, tmp_path / "plain")
    with recorded() as made:
        check_same(run(one, tmp_path / "replayed"), wanted)
    assert made[0].replays == STEPS - WARM_UP_STEPS


class Killed(Exception):
    pass


def test_a_trial_that_is_killed_goes_on_from_its_checkpoint_and_is_captured_again(data: Data, tmp_path: Path) -> None:
    one = trial_config(recipe(data, conv, steps=20), {})
    wanted = run(one, tmp_path / "plain", None)

    def report(step: int, values: Any) -> bool:
        if step == 10:
            raise Killed
        return False

    with recorded() as made:
        with pytest.raises(Killed):
            train(one, None, device="cpu", directory=tmp_path / "killed", report=report)
        resumed, tensors = run(one, tmp_path / "killed")
    assert resumed.losses == wanted[0].losses
    assert resumed.values == wanted[0].values
    assert all(torch.equal(tensor, wanted[1][name]) for name, tensor in tensors.items())
    assert [one.replays for one in made] == [10 - WARM_UP_STEPS, 15 - WARM_UP_STEPS]  # from the checkpoint of step 5


@pytest.mark.parametrize("how", ["counts", "keeps", "draws", "draws globally"])
def test_a_model_that_changes_on_the_host_runs_eagerly(
    how: str, data: Data, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = trial_config(recipe(data, lambda _: Odd(how)), {})
    np.random.seed(3)  # noqa: NPY002
    wanted = run(one, tmp_path / "plain")
    np.random.seed(3)  # noqa: NPY002
    with recorded() as made, caplog.at_level("INFO", "weft.tune"):
        check_same(run(one, tmp_path / "odd"), wanted)
    assert (made[0].captures, made[0].replays) == (0, 0)
    assert "runs without CUDA graphs: it changes what the model keeps on the host" in caplog.text


def test_a_capture_that_fails_leaves_no_trace(
    data: Data, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial_config(recipe(data, conv, microbatch_batchnorm=True), {})
    wanted = run(one, tmp_path / "plain", cut(8))
    capture = Standin.capture

    def second_fails(self: Standin, function: Any) -> Any:
        self.fails = RuntimeError("no such kernel\nat all") if self.captures else None
        return capture(self, function)

    monkeypatch.setattr(Standin, "capture", second_fails)
    with recorded() as made, caplog.at_level("INFO", "weft.tune"):
        check_same(run(one, tmp_path / "failed", cut(8)), wanted)
    assert (made[0].captures, made[0].replays) == (2, 1)
    assert "without CUDA graphs: RuntimeError: no such kernel" in caplog.text


def test_memory_that_a_capture_lacks_is_the_trials_own(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Standin, "capture", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    with recorded(), pytest.raises(OutOfMemory):
        run(trial_config(recipe(data, mlp), {}), tmp_path)


def test_what_judges_a_trial_must_keep_no_tensor(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Standin, "keeps", 1)
    with recorded() as made:
        run(trial_config(recipe(data, mlp), {}), tmp_path)
    assert made[0].replays == 5 - WARM_UP_STEPS  # up to the first report


@pytest.mark.parametrize(
    ("fields", "fit"),
    [
        ({"steps": MIN_STEPS - 1, "report_every": None}, None),
        ({"cuda_graphs": False}, None),
        ({}, Fit("recompute", 16, 1, 1, 0, None, "")),
        ({}, Fit("offload", 16, 1, 1, 0, None, "")),
    ],
)
def test_steps_that_are_not_worth_it_are_not_recorded(
    fields: dict[str, Any], fit: Fit | None, data: Data, tmp_path: Path
) -> None:
    with recorded() as made:
        train(
            trial_config(recipe(data, mlp, **fields), {}),
            fit,
            device="cpu",
            directory=tmp_path,
            report=lambda *_: False,
        )
    assert made == []


def doubled(batch: Any, carried: Any) -> Any:
    found = 2 * batch["x"]
    return found.sum(), [found if carried is None else carried[0].add_(found)]


def summed(batch: Any, carried: Any) -> Any:
    found = batch["x"].sum()
    return found, [found.clone() if carried is None else carried[0].add_(found)]


def made_of(function: Any, recorder: Any) -> GraphedStep:
    return GraphedStep(function, recorder, nn.Linear(1, 1), cross_entropy, lambda problem: None)


def test_batches_that_change_their_shape_run_eagerly() -> None:
    recorder: Any = Standin()
    captured = made_of(doubled, recorder)
    for step, size in enumerate((3, 3, 3, 3, 5, 3)):
        x = torch.full((size,), float(step))
        loss, gradients = captured({"x": x}, None)
        assert loss.item() == 2 * size * step
        assert torch.equal(gradients[0], 2 * x)  # type: ignore[arg-type]
    assert recorder.replays == 2
    assert recorder.closed


def test_a_step_of_many_kinds_of_micro_batches_runs_eagerly() -> None:
    for kinds, replays in ((MAX_GRAPHS, MAX_GRAPHS), (MAX_GRAPHS + 1, 0)):
        recorder: Any = Standin()
        captured = made_of(summed, recorder)
        for _ in range(WARM_UP_STEPS + 1):
            carried = None
            for size in range(1, kinds + 1):
                loss, carried = captured({"x": torch.ones(size)}, carried)
                assert loss.item() == size
            assert carried[0].item() == kinds * (kinds + 1) / 2
        assert recorder.replays == replays


def test_gradients_that_are_not_added_in_place_cannot_be_replayed() -> None:
    recorder: Any = Standin()
    captured = made_of(lambda batch, carried: (batch["x"].sum(), [torch.ones(2)]), recorder)
    for _ in range(WARM_UP_STEPS + 1):
        carried = None
        for value in (1.0, 2.0, 3.0):
            loss, carried = captured({"x": torch.full((1,), value)}, carried)
            assert loss.item() == value
    assert recorder.replays == 2  # the third is of the second's kind, and has other gradients before it


def test_recurrent_layers_that_drop_are_refused() -> None:
    for layers, dropout, closed in ((2, 0.1, True), (2, 0.0, False)):
        recorder: Any = Standin()
        GraphedStep(doubled, recorder, nn.GRU(2, 2, layers, dropout=dropout), cross_entropy, lambda problem: None)
        assert recorder.closed == closed


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64])
def test_a_copy_lies_as_its_original_does(dtype: torch.dtype, start: int) -> None:
    whole = torch.arange(60).reshape(6, 10).to(dtype)
    for tensor in (whole[start:], whole.t()[start:], whole[start:, ::2]):
        copy = empty_aligned_like(tensor, 64).copy_(tensor)
        assert copy.stride() == tensor.stride()
        assert copy.data_ptr() % 64 == tensor.data_ptr() % 64
        assert torch.equal(copy, tensor)


def test_a_change_of_what_a_module_or_its_loss_holds_is_seen() -> None:
    model, loss = conv({}), nn.CrossEntropyLoss()
    model.extra = [lambda: 0, {"a": (1, 2)}]  # type: ignore[assignment]

    def state() -> ModuleState:
        return ModuleState(model, loss, host())

    def replace_buffer() -> None:
        model[1].running_mean = torch.zeros(4)

    before = state()
    model(torch.randn(3, 1, 8, 8)).sum().backward()  # running statistics are written into, where they lie
    assert state() == before
    for change in (
        lambda: setattr(loss, "label_smoothing", 0.1),
        replace_buffer,
        lambda: model.extra[1].update(a=(1, 3)),  # type: ignore[index,operator]
        lambda: setattr(model, "extra", (one for one in ())),  # nobody can tell where it stands
    ):
        before = state()
        change()
        assert state() != before


def run_fused(
    configs: list[TrialConfig], folder: Path, fit: Fit | None, pruned: Any = ()
) -> tuple[dict[int, Any], Any]:
    found: dict[int, Any] = {}
    folders = [folder / str(trial) for trial in range(len(configs))]
    report = lambda trial, step, values: (trial, step) in pruned  # noqa: E731
    train_fused(configs, fit, device="cpu", directories=folders, report=report, ended=found.__setitem__)
    return found, [kept(folder) for trial, folder in enumerate(folders) if found[trial] != "pruned"]


@pytest.mark.parametrize(
    ("model", "micro", "alike"), [(mlp, 16, False), (mlp, 6, True), (conv, 16, False), (transformer, 6, False)]
)
def test_fused_trials_are_replayed_with_the_same_bits(
    model: Any, micro: int, alike: bool, data: Data, tmp_path: Path
) -> None:
    fit = None if micro == 16 else cut(micro)
    one = recipe(data, model, steps=20, microbatch_batchnorm=True, optimizer="sgd", optimizer_options={"momentum": 0.9})
    own = [{"lr": 0.02 * (trial + 1), "dropout": 0.1 * trial, "seed": 0 if alike else trial} for trial in range(3)]
    configs = [trial_config(one, params) for params in own]
    wanted = run_fused(configs, tmp_path / "plain", fit, {(1, 10)})
    with recorded() as made:
        found = run_fused(configs, tmp_path / "replayed", fit, {(1, 10)})
    assert found[0][1] == wanted[0][1] == "pruned"
    for trial in (0, 2):
        assert found[0][trial].losses == wanted[0][trial].losses
        assert found[0][trial].values == wanted[0][trial].values
    for mine, its in zip(found[1], wanted[1], strict=True):
        assert mine.keys() == its.keys()
        assert all(torch.equal(tensor, its[name]) for name, tensor in mine.items())
    parts = 1 if fit is None else fit.microbatches
    figures = [(one.captures, one.replays) for one in made]
    assert figures == [(parts, (10 - WARM_UP_STEPS) * parts)] * 2  # anew once a trial has left


def test_an_evaluation_of_fused_trials_leaves_no_tensor_that_a_replay_would_write_over(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def live_tensors(self: Standin) -> int:
        return sum(type(one) is Tensor for one in gc.get_objects())

    monkeypatch.setattr(Standin, "held", live_tensors)
    configs = [trial_config(recipe(data, mlp), {"seed": trial}) for trial in range(2)]
    with recorded() as made:
        run_fused(configs, tmp_path, None, ())
    assert [one.replays for one in made] == [STEPS - WARM_UP_STEPS]


def test_what_one_pool_has_free_the_other_cannot_use() -> None:
    mib = 2**20
    tape = AllocationTimeline(
        # Set-up: 4 of weights. Forward: 40 and 30, of which 40 is free again before the optimizer wants 40.
        events=(1, 0, 2, 3, 0, -2, -3, 0, 4, -4),
        sizes=(4 * mib, 40 * mib, 30 * mib, 40 * mib),
        categories=("weights", "activations", "activations", "optimizer"),
        modules=("",) * 4,
        phases=("setup", "forward", "backward", "optimizer"),
    )
    assert replay(tape).reserved == (20 + 40 + 30) * mib  # weights share a segment of 20
    assert reserved_in_two_pools(tape, AllocatorConfig()) == (20 + 40 + 30 + 40) * mib


def test_a_captured_trial_is_given_the_memory_of_its_graphs(data: Data) -> None:
    one = trial_config(recipe(data, mlp, batch_size=256), {})
    short, plain = (replace(one, steps=MIN_STEPS - 1), replace(one, cuda_graphs=False))
    needs = [step_memory(each, "whole", "h200", accumulate=False).bytes_at(256) for each in (one, short, plain)]
    assert needs[0] > needs[1] == needs[2]
    assert step_memory(one, "recompute", "h200", accumulate=False).bytes_at(256) == step_memory(
        plain, "recompute", "h200", accumulate=False
    ).bytes_at(256)


def test_the_largest_micro_batch_is_the_largest_that_fits(data: Data) -> None:
    found = step_memory(trial_config(recipe(data, mlp, batch_size=512), {}), "whole", "h200", accumulate=True)
    room = found.bytes_at(200)
    largest = found.largest(room)
    assert largest >= 200
    assert found.bytes_at(largest) <= room < found.bytes_at(largest + 1)
