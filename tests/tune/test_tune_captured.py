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
from networks import Between, CachesTable, Idle, conv, mlp, transformer
from standin import Standin
from torch import Tensor, nn
from trials import Killed, check_same, config_of, fit_of, run, run_fused

from weft.engine.losses import cross_entropy
from weft.memory.allocator import AllocatorConfig
from weft.memory.replay import replay, reserved_in_two_pools
from weft.memory.timeline import AllocationTimeline
from weft.nn.state import ModuleState
from weft.tune.fit.peaks import step_memory
from weft.tune.jobs import Fit
from weft.tune.recipe import TrialConfig
from weft.tune.training.cuda_graphs import (
    MAX_GRAPHS,
    MIN_STEPS,
    WARM_UP_STEPS,
    GraphedStep,
    can_capture,
    empty_aligned_like,
)
from weft.tune.training.memory_limit import OutOfMemory
from weft.utils.rng import host

STEPS = 14
MODELS = {"mlp": mlp, "conv": conv, "transformer": transformer, "idle": lambda _: Idle(), "caches": CachesTable}


class Odd(Between):
    """What it does differs from forward to forward."""

    how = ""

    def prepare(self, params: Any) -> None:
        self.count, self.mean, self.own = 0, torch.ones(()), np.random.default_rng(0)

    def between(self, x: Tensor) -> Tensor:
        if self.how == "counts":
            self.count += self.training
            return x * self.count
        if self.how == "keeps":
            self.mean = 0.9 * self.mean + x.mean().detach()
            return x * self.mean
        return x * float(self.own.random() if self.how == "draws" else np.random.rand())  # noqa: NPY002


@contextmanager
def recorded() -> Iterator[list[Standin]]:
    """The recorders that trainings within the block are given."""
    found: list[Standin] = []

    def recorder(device: torch.device, config: TrialConfig, left: int, memory: int | None) -> Standin | None:
        if not can_capture(config, left, memory):
            return None
        found.append(Standin())
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        for module in ("training", "fusion"):
            patch.setattr(f"weft.tune.{module}.trainer.make_recorder", recorder)
        yield found
    assert all(one.closed for one in found)


def config(model: Any, params: Any = None, **fields: Any) -> TrialConfig:
    given = {"steps": STEPS, "report_every": 5, "optimizer_options": {"lr": 0.02}, "microbatch_batchnorm": True}
    return config_of(model, params, **given | fields)


def run_both(one: TrialConfig, folder: Path, fit: Fit | None = None) -> Standin:
    """Trains eagerly, and with a recorder, which is returned, to the same bits."""
    wanted, _ = run(one, folder / "plain", fit)
    with recorded() as made:
        found, _ = run(one, folder / "replayed", fit)
    check_same(found, wanted, folder / "replayed", folder / "plain")
    assert len(made) == 1
    return made[0]


@pytest.mark.parametrize(
    ("model", "micro", "graphs", "fields"),
    [
        *((name, 16, 1, {}) for name in MODELS),
        ("mlp", 4, 3, {}),
        ("conv", 6, 3, {}),
        ("idle", 6, 3, {}),
        ("mlp", 16, 1, {"optimizer": "sgd", "precision": "bf16"}),
        ("mlp", 16, 1, {"optimizer": "rmsprop"}),
    ],
)
def test_replayed_steps_have_the_bits_of_steps_that_run_eagerly(
    model: str, micro: int, graphs: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    fit = fit_of(micro)
    recorder = run_both(config(MODELS[model], lr_schedule="cosine", **fields), tmp_path, fit)
    assert recorder.captures == graphs
    assert recorder.replays == (STEPS - WARM_UP_STEPS) * fit.microbatches


def test_a_trial_that_is_killed_goes_on_from_its_checkpoint_and_is_captured_again(tmp_path: Path) -> None:
    one = config(conv, steps=20)
    wanted, _ = run(one, tmp_path / "plain")
    with recorded() as made:
        with pytest.raises(Killed):
            run(one, tmp_path / "killed", kill_at=10)
        found, _ = run(one, tmp_path / "killed")
    check_same(found, wanted, tmp_path / "killed", tmp_path / "plain")
    assert [one.replays for one in made] == [10 - WARM_UP_STEPS, 15 - WARM_UP_STEPS]  # from the checkpoint of step 5


@pytest.mark.parametrize("how", ["counts", "keeps", "draws", "draws globally"])
def test_a_model_that_changes_on_the_host_runs_eagerly(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Odd, "how", how)
    with caplog.at_level("INFO", "weft.tune"):
        recorder = run_both(config(Odd), tmp_path)
    assert (recorder.captures, recorder.replays) == (0, 0)
    assert "without CUDA graphs: it changes what the model keeps on the host" in caplog.text


def test_a_capture_that_fails_leaves_no_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = Standin.capture

    def second_fails(self: Standin, function: Any) -> Any:
        self.fails = RuntimeError("no such kernel\nat all") if self.captures else None
        return capture(self, function)

    monkeypatch.setattr(Standin, "capture", second_fails)
    with caplog.at_level("INFO", "weft.tune"):
        recorder = run_both(config(conv), tmp_path, fit_of(8))
    assert (recorder.captures, recorder.replays) == (2, 1)
    assert "without CUDA graphs: RuntimeError: no such kernel" in caplog.text


def test_memory_that_a_capture_lacks_is_the_trials_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Standin, "capture", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    with recorded(), pytest.raises(OutOfMemory):
        run(config(mlp), tmp_path)


def test_what_judges_a_trial_must_keep_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Standin, "keeps", 1)
    assert run_both(config(mlp), tmp_path).replays == 5 - WARM_UP_STEPS  # up to the first report


@pytest.mark.parametrize(
    ("fields", "strategy"),
    [
        ({"steps": MIN_STEPS - 1, "report_every": None}, "whole"),
        ({"cuda_graphs": False}, "whole"),
        ({}, "recompute"),
        ({}, "offload"),
    ],
)
def test_steps_that_are_not_worth_it_are_not_recorded(fields: dict[str, Any], strategy: str, tmp_path: Path) -> None:
    with recorded() as made:
        run(config(mlp, **fields), tmp_path, fit_of(strategy=strategy))
    assert made == []


def summed(batch: Any, carried: Any) -> Any:
    found = batch["x"].sum()
    return found, [found.clone() if carried is None else carried[0].add_(found)]


def not_in_place(batch: Any, carried: Any) -> Any:
    return batch["x"].sum(), [torch.ones(2)]


@pytest.mark.parametrize(
    ("function", "steps", "replays"),
    [
        (summed, [[3], [3], [3], [3], [5], [3]], 2),  # the fifth has another shape
        (summed, [range(1, MAX_GRAPHS + 1)] * 3, MAX_GRAPHS),
        (summed, [range(1, MAX_GRAPHS + 2)] * 3, 0),  # too many kinds
        (not_in_place, [[1, 1, 1]] * 3, 2),  # the third is of the second's kind, and has other gradients before it
    ],
)
def test_a_step_of_other_or_too_many_kinds_of_micro_batches_or_gradients_runs_eagerly(
    function: Any, steps: list[Any], replays: int
) -> None:
    recorder: Any = Standin()
    captured = GraphedStep(function, recorder, nn.Linear(1, 1), cross_entropy, lambda problem: None)
    for step, sizes in enumerate(steps):
        carried = None
        for size in sizes:
            loss, carried = captured({"x": torch.full((size,), float(step))}, carried)
            assert loss.item() == step * size
        assert function is not_in_place or carried[0].item() == step * sum(sizes)
    assert recorder.replays == replays
    assert recorder.closed == (replays <= 2)


def test_recurrent_layers_that_drop_are_refused() -> None:
    for layers, dropout, closed in ((2, 0.1, True), (2, 0.0, False)):
        recorder: Any = Standin()
        GraphedStep(summed, recorder, nn.GRU(2, 2, layers, dropout=dropout), cross_entropy, lambda problem: None)
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


@pytest.mark.parametrize(
    ("model", "micro", "alike"), [(mlp, 16, False), (mlp, 6, True), (conv, 16, False), (transformer, 6, False)]
)
def test_fused_trials_are_replayed_with_the_same_bits(model: Any, micro: int, alike: bool, tmp_path: Path) -> None:
    fit = fit_of(micro)
    own = [{"lr": 0.02 * (trial + 1), "dropout": 0.1 * trial, "seed": 0 if alike else trial} for trial in range(3)]
    configs = [config(model, params, steps=20, optimizer="sgd", optimizer_options={"momentum": 0.9}) for params in own]

    def prune(trial: int, step: int, values: Any) -> bool:
        return (trial, step) == (1, 10)

    wanted = run_fused(configs, tmp_path / "plain", fit, prune)
    with recorded() as made:
        found = run_fused(configs, tmp_path / "replayed", fit, prune)
    assert found[1] == wanted[1] == "pruned"
    for trial in (0, 2):
        check_same(found[trial], wanted[trial], *(tmp_path / how / str(trial) for how in ("replayed", "plain")))
    figures = [(one.captures, one.replays) for one in made]
    assert figures == [(fit.microbatches, (10 - WARM_UP_STEPS) * fit.microbatches)] * 2  # anew once a trial has left


def test_an_evaluation_of_fused_trials_leaves_no_tensor_that_a_replay_would_write_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def live_tensors(self: Standin) -> int:
        return sum(type(one) is Tensor for one in gc.get_objects())

    monkeypatch.setattr(Standin, "held", live_tensors)
    with recorded() as made:
        run_fused([config(mlp, {"seed": trial}, checkpoint_every=STEPS) for trial in range(2)], tmp_path)
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


def test_a_captured_trial_is_given_the_memory_of_its_graphs() -> None:
    def needed(one: TrialConfig, strategy: Any = "whole") -> int:
        return step_memory(one, strategy, "h200", accumulate=False).bytes_at(256)

    one = config(mlp, batch_size=256)
    short, plain = replace(one, steps=MIN_STEPS - 1), replace(one, cuda_graphs=False)
    assert needed(one) > needed(short) == needed(plain)
    assert needed(one, "recompute") == needed(plain, "recompute")
