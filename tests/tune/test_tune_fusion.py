"""Fusion: fused trials end as trials alone do, in weights, optimizer, losses and values."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import objectives
import pytest
import torch
from networks import Between, CachesTable, Idle, Tied, between, conv, mlp, transformer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from trials import Killed, config_of, fit_of, run, run_fused, saved

from weft.errors import TuneError
from weft.runs import Checkpoints
from weft.tune.fusion.compatibility import fusion_key
from weft.tune.jobs import Fit
from weft.tune.recipe import TrialConfig
from weft.tune.training.memory_limit import OutOfMemory
from weft.tune.training.trainer import Result

TRIALS = 3


def configs_of(model: Any, optimizer: str = "sgd", least: float = 0.0, **fields: Any) -> list[TrialConfig]:
    """Trials of one shape with options, dropout and a seed of their own; ``least`` is the smallest momentum."""
    fields = {"lr_schedule": "cosine", "warmup_steps": 2, "optimizer_options": {}} | fields
    rate = 0.02 if optimizer == "sgd" else 0.002
    own = [
        {"lr": rate * (trial + 1), "weight_decay": 0.01 * trial, "seed": trial, "dropout": 0.2 * trial}
        | ({"momentum": least + 0.4 * trial} if optimizer == "sgd" else {})
        for trial in range(TRIALS)
    ]
    return [config_of(model, params, optimizer=optimizer, **fields) for params in own]


def run_alone(configs: list[TrialConfig], folder: Path, fit: Fit | None = None) -> list[Result]:
    return [run(one, folder / "alone" / str(trial), fit)[0] for trial, one in enumerate(configs)]


def check_checkpoints(folder: Path, trials: list[int], step: int | None = None, tolerance: float = 1e-5) -> None:
    """Every tensor of every checkpoint, each relative to its size."""
    for trial in trials:
        whole, fused = saved(folder / "alone" / str(trial), step), saved(folder / str(trial), step)
        alone = {name: tensor for name, tensor in whole.items() if not name.startswith("attributes.")}  # a cache
        assert alone.keys() == fused.keys()
        for name, tensor in alone.items():
            atol = tolerance * float(tensor.abs().max())
            torch.testing.assert_close(fused[name].double(), tensor.double(), rtol=tolerance, atol=atol, msg=name)


def check_equal(configs: list[TrialConfig], folder: Path, fit: Fit | None = None) -> None:
    """Weights at the end, the optimizer's state at step 8, losses and values."""
    alone, fused = run_alone(configs, folder, fit), run_fused(configs, folder, fit)
    for step in (None, 8):
        check_checkpoints(folder, list(range(len(configs))), step)
    for trial, result in enumerate(alone):
        assert fused[trial].losses == pytest.approx(result.losses, rel=1e-5)
        assert fused[trial].values == pytest.approx(result.values, rel=1e-5)
    assert len({round(result.losses[-1], 4) for result in alone}) == len(configs)  # they do differ


ADAM = {"betas": (0.8, 0.9), "eps": 1e-4}


@pytest.mark.parametrize(
    ("model", "optimizer", "options", "fit"),
    [
        (mlp, "sgd", {}, None),
        (conv, "sgd", {}, None),
        (transformer, "sgd", {}, None),
        (lambda _: Tied(), "sgd", {}, None),
        (mlp, "adam", ADAM, None),
        (mlp, "adamw", ADAM, None),
        (mlp, "sgd", {"nesterov": True}, None),
        (mlp, "sgd", {"dampening": 0.3}, None),
        (mlp, "sgd", {}, fit_of(6)),  # of 16: 6, 6 and 4
    ],
)
def test_fused_trials_end_as_the_same_trials_alone(
    model: Any, optimizer: str, options: dict[str, Any], fit: Fit | None, tmp_path: Path
) -> None:
    least = 0.1 if options.get("nesterov") else 0.0
    check_equal(configs_of(model, optimizer, least, optimizer_options=options), tmp_path, fit)


def test_trials_of_one_seed_share_their_batches_and_still_end_as_alone(tmp_path: Path) -> None:
    check_equal([config_of(mlp, {"lr": lr, "dropout": 0.2}, optimizer="sgd") for lr in (0.1, 0.01)], tmp_path)


def test_bf16_is_within_its_own_tolerance(tmp_path: Path) -> None:
    configs = configs_of(mlp, precision="bf16", steps=6)
    run_alone(configs, tmp_path)
    run_fused(configs, tmp_path)
    check_checkpoints(tmp_path, [0, 1, 2], tolerance=2e-2)


def test_a_pruned_trial_leaves_and_the_others_end_as_alone(tmp_path: Path) -> None:
    configs, seen = configs_of(conv), []

    def report(trial: int, step: int, values: tuple[float, ...]) -> bool:
        seen.append((trial, step))
        return (trial, step) in ((0, 4), (2, 8))

    alone = run_alone(configs, tmp_path)
    fused = run_fused(configs, tmp_path, report=report)
    assert (fused[0], fused[2]) == ("pruned", "pruned")
    assert fused[1].losses == pytest.approx(alone[1].losses, rel=1e-5)
    assert seen == [(0, 4), (1, 4), (2, 4), (1, 8), (2, 8), (1, 12)]
    check_checkpoints(tmp_path, [1])


def kill_at_12(trial: int, step: int, values: tuple[float, ...]) -> bool:
    if step == 12:
        raise Killed
    return False


def test_a_fused_training_goes_on_from_the_newest_step_that_all_trials_have(tmp_path: Path) -> None:
    configs = configs_of(mlp)
    run_alone(configs, tmp_path)
    with pytest.raises(Killed):
        run_fused(configs, tmp_path, report=kill_at_12)
    Checkpoints(tmp_path / "1" / "checkpoints").drop_after(4)  # as if killed between two trials' checkpoints
    steps: list[int] = []
    first = run_fused(configs, tmp_path, report=lambda trial, step, values: bool(steps.append(step)))
    assert sorted(set(steps)) == [8, 12]
    check_checkpoints(tmp_path, [0, 1, 2])
    again = run_fused(configs, tmp_path)  # all are done, and tell their values again
    assert {trial: r.values for trial, r in first.items()} == {trial: r.values for trial, r in again.items()}


@pytest.mark.parametrize("strategy", ["recompute", "offload"])
def test_trials_that_save_memory_another_way_are_refused(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(TuneError, match=f"'{strategy}' alone are not fused"):
        run_fused(configs_of(mlp), tmp_path, fit_of(strategy=strategy))


def test_fused_trials_that_want_too_much_memory_say_so(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory):
        run_fused(configs_of(mlp), tmp_path, memory=20_000)


def test_only_continuous_choices_leave_the_key_as_it_is() -> None:
    base = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "dropout": 0.1, "seed": 0}
    key = fusion_key(config_of(mlp, base, optimizer="sgd"))
    assert key is not None
    for name, value in (("lr", 0.2), ("weight_decay", 0.1), ("momentum", 0.9), ("dropout", 0.2), ("seed", 5)):
        assert fusion_key(config_of(mlp, {**base, name: value}, optimizer="sgd")) == key, name
    del base["momentum"]
    for name, other in (("width", 24), ("batch_size", 8), ("steps", 7), ("precision", "bf16"), ("optimizer", "adam")):
        assert fusion_key(config_of(mlp, {**base, name: other}, optimizer="sgd")) != key, name
    assert fusion_key(config_of(mlp, {"lr": 0.1}, optimizer="rmsprop")) is None  # has no form for fused trials


# Models that cannot be fused.


def scaled(model: Any, x: Tensor) -> Tensor:
    return x.relu() * model.scale


def dropped(model: Any, x: Tensor) -> Tensor:
    return nn.functional.dropout(x.relu(), model.dropout, model.training)


def rate(params: Mapping[str, Any]) -> float:
    return float(params["dropout"])


def drawn(params: Mapping[str, Any]) -> float:
    return float(np.random.rand())  # noqa: NPY002


def by_rate(params: Mapping[str, Any]) -> float:
    return float(1 + 10 * params["lr"])


Drops = between(dropped, dropout=rate)
ScalesByRate = between(scaled, scale=by_rate)
PlainTensor = between(lambda model, x: x.relu() * model.noise[0], noise=lambda params: [torch.randn(16)])


class NoKernel(Idle):
    """Fails for fused trials with a whole batch, as an operator does that a device has no batched kernel for."""

    def forward(self, image: Tensor) -> Tensor:
        if len(image) > 2 and torch._C._functorch.is_batchedtensor(image):
            raise RuntimeError("no kernel")
        return super().forward(image)


class ReplacesBuffer(Between):
    """A buffer that is replaced, and not written into."""

    def prepare(self, params: Mapping[str, Any]) -> None:
        self.register_buffer("mean", torch.zeros(16))

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return (x - self.mean).relu()


class Counts(Between):
    """Forwards, in Python."""

    seen = 0

    def between(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x.relu() * (1 + 0.1 * (self.seen % 2))


class ExtraState(Between):
    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (between(lambda model, x: x if x.mean() > 0 else -x), "DataDependent"),
        (between(lambda model, x: model.cells(x)[0], cells=lambda params: nn.LSTM(16, 16)), "lstm"),
        (lambda params: Idle(), "'spare.weight' gets no gradient"),
        (between(lambda model, x: x * drawn({})), "'a generator of the host'"),
        (between(scaled, scale=drawn), "generator"),
        (ReplacesBuffer, "'mean'"),
        (between(scaled, scale=lambda params: 1 - params["dropout"]), "'dropout'"),
        (between(lambda model, x: dropped(model, x) * (1 + model.dropout), dropout=rate), "'dropout'"),
        (ScalesByRate, "'lr'"),
        (between(lambda m, x: x * m.all["params"][0]["lr"], all=lambda params: {"params": [dict(params)]}), "'lr'"),
        (between(lambda m, x: m.late(x), late=lambda params: lambda x: x * by_rate(params)), "'lr'"),
        (PlainTensor, "'noise'"),
        (Counts, "'seen'"),
        (ExtraState, "'_extra_state'"),
    ],
)
def test_trials_whose_models_differ_in_more_than_weights_are_not_fused(
    model: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "weft.tune"):
        keys = [key for one in configs_of(model) if (key := fusion_key(one)) is not None]
    assert len(set(keys)) == len(keys)
    assert reason in caplog.text
    assert "not fused" in caplog.text


@pytest.mark.parametrize(
    "model", [lambda params: NoKernel(), ReplacesBuffer, ScalesByRate, PlainTensor, Counts, ExtraState]
)
def test_such_trials_train_one_by_one_where_they_are_fused_all_the_same(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configs = configs_of(model)
    alone = run_alone(configs, tmp_path)
    fused = run_fused(configs, tmp_path, report=lambda trial, step, values: (trial, step) == (1, 8))
    assert fused[1] == "pruned"
    assert [fused[trial].losses for trial in (0, 2)] == [alone[trial].losses for trial in (0, 2)]
    assert "train one after another" in caplog.text


# Models that can.


class WeightNorm(Between):
    """A weight that is made anew before every forward, as a plain tensor."""

    def prepare(self, params: Mapping[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has a newer kind, but models use this one
            nn.utils.weight_norm(self.enter)


class Hooked(Drops):
    """Holds a hook, and a part with attributes that do not differ."""

    def prepare(self, params: Mapping[str, Any]) -> None:
        super().prepare(params)
        self.inner, self.params = nn.Identity(), {"dropout": params["dropout"]}
        self.inner.scale, self.hook = 2.0, self.inner.register_forward_hook(lambda part, given, out: out * part.scale)

    def between(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(super().between(x))
        return out


# A dropout only where its rate is not 0.
LeavesOut = between(
    lambda model, x: model.drop(x.relu()),
    drop=lambda params: nn.Dropout(params["dropout"]) if params["dropout"] else nn.Identity(),
)


@pytest.mark.parametrize("model", [CachesTable, Hooked, WeightNorm, LeavesOut])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_models_that_differ_in_weights_and_dropout_alone_are_fused(model: Any, tmp_path: Path) -> None:
    configs = configs_of(model)
    whole = replace(configs[0], params={**configs[0].params, "dropout": 0})  # no dropout may be a whole number
    keys = {fusion_key(one) for one in (*configs, whole)}
    assert len(keys) == 1
    assert keys != {None}
    check_equal(configs, tmp_path)


class Hides(Between):
    """A buffer that no state_dict has and that is written into, and one that stays as it is."""

    def prepare(self, params: Mapping[str, Any]) -> None:
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(16), persistent=False)
        self.register_buffer("table", torch.ones(64, 64), persistent=False)

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0) * 0.1)
        return (x - self.mean).relu()


@pytest.mark.parametrize("goes_on", ["fused", "alone"])
def test_a_stopped_trial_goes_on_fused_or_alone_with_the_buffers_that_no_state_dict_has(
    goes_on: str, tmp_path: Path
) -> None:
    configs = configs_of(Hides, "adamw")
    alone = run_alone(configs, tmp_path)

    def report(trial: int, step: int, values: tuple[float, ...]) -> bool:
        kill_at_12(trial, step, values)
        return (trial, step) == (0, 4)  # what the others hold is moved together

    with pytest.raises(Killed):
        run_fused(configs, tmp_path, report=report)
    assert [name for name in saved(tmp_path / "1", 8) if name.startswith("buffers.")] == ["buffers.mean"]
    check_checkpoints(tmp_path, [1, 2], step=8)
    found = run_fused(configs, tmp_path)[2] if goes_on == "fused" else run(configs[2], tmp_path / "2")[0]
    assert found.losses == pytest.approx(alone[2].losses, rel=1e-5)


def test_fused_trials_leave_no_fake_tensor_in_what_a_model_caches(tmp_path: Path) -> None:
    objectives.causal.cache_clear()
    configs = [replace(one, params={**one.params, "width": 16}) for one in configs_of(objectives.remembers)]
    assert fusion_key(configs[0]) is not None
    check_equal(configs, tmp_path)
    assert type(objectives.causal(8)) is Tensor


@pytest.mark.parametrize(("train", "strict"), [(run_alone, True), (run_fused, False)])
def test_a_fake_tensor_that_a_trace_left_is_reported(train: Any, strict: bool, tmp_path: Path) -> None:
    objectives.causal.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=not strict):
        objectives.causal(8)
    try:
        with pytest.raises(TuneError, match="FakeTensor"):
            train(configs_of(lambda params: objectives.Remembers(16)), tmp_path)
    finally:
        objectives.causal.cache_clear()
