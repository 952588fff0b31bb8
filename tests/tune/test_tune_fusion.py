"""Fusion: lanes end as trials alone do, in weights, optimizer, losses and values."""

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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from weft.data import Data, digits
from weft.errors import TuneError
from weft.runs import Checkpoints
from weft.tune.fusion.compatibility import shape_key, why_not
from weft.tune.fusion.trainer import train_fused
from weft.tune.jobs import Fit
from weft.tune.recipe import Recipe, TrialConfig, trial_config
from weft.tune.training.memory_limit import OutOfMemory
from weft.tune.training.trainer import Result, train

LANES = 3


def plain(params: Mapping[str, Any]) -> nn.Module:
    drop = nn.Dropout(params.get("dropout", 0.0))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, params.get("width", 24)), nn.ReLU(), drop, nn.Linear(24, 10))


def conv(params: Mapping[str, Any]) -> nn.Module:
    body = [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(), nn.Conv2d(4, 6, 3, 2)]
    return nn.Sequential(*body, nn.ReLU(), nn.Flatten(), nn.Linear(24, 10))


class Transformer(nn.Module):
    """Rows of the image as tokens; the head is tied to nothing, the positions are frozen."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.places = nn.Parameter(torch.randn(8, 16), requires_grad=False)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.enter(image.flatten(1, 2)) + self.places).mean(1))
        return out


def transformer(params: Mapping[str, Any]) -> nn.Module:
    return Transformer(params.get("dropout", 0.0))


class Tied(nn.Module):
    """The same weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 16)
        self.one = nn.Linear(16, 16)
        self.two = nn.Linear(16, 16)
        self.two.weight = self.one.weight
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.two(self.one(self.enter(image.flatten(1))).relu()))
        return out


class Chooses(nn.Module):
    """What it does depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = image.flatten(1)
        out: Tensor = self.head(x if x.mean() > 0 else -x)
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 10)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(image.flatten(1, 2))[0][:, -1])
        return out


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.spare = nn.Linear(64, 10), nn.Linear(3, 3)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(image.flatten(1))
        return out


class Noisy(nn.Module):
    """Draws on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(image.flatten(1)) * float(np.random.rand())  # noqa: NPY002
        return out


@pytest.fixture(scope="module")
def data() -> Data:
    return digits()


def chosen(
    data: Data, model: Any, optimizer: str = "sgd", dropout: bool = True, least: float = 0.0, **fields: Any
) -> list[TrialConfig]:
    fields = {"steps": 12, "batch_size": 16, "report_every": 4, "lr_schedule": "cosine", "warmup_steps": 2} | fields
    recipe = Recipe(
        model=model,
        data=data,
        metrics={"accuracy": weft.accuracy},
        objectives=("accuracy", "loss"),
        optimizer=optimizer,
        **fields,
    )
    own = [
        {
            "lr": 0.02 * (lane + 1) if optimizer == "sgd" else 0.002 * (lane + 1),
            "weight_decay": 0.01 * lane,
            "seed": lane,
        }
        | ({"momentum": least + 0.4 * lane} if optimizer == "sgd" else {})
        | ({"dropout": 0.2 * lane} if dropout else {})
        for lane in range(LANES)
    ]
    return [trial_config(recipe, params) for params in own]


def run_alone(settings: list[TrialConfig], folder: Path, fit: Fit | None = None) -> list[Result]:
    return [
        train(one, fit, device="cpu", directory=folder / f"alone{lane}", report=lambda *_: False)
        for lane, one in enumerate(settings)
    ]


def run_fused(settings: list[TrialConfig], folder: Path, fit: Fit | None = None, report: Any = None) -> dict[int, Any]:
    found: dict[int, Any] = {}
    train_fused(
        settings,
        fit,
        device="cpu",
        directories=[folder / f"fused{lane}" for lane in range(len(settings))],
        report=report or (lambda *_: False),
        ended=found.__setitem__,
    )
    return found


def check_equal(folder: Path, lanes: list[int], step: int | None = None, tolerance: float = 1e-5) -> None:
    """Every tensor of every checkpoint, each relative to its size."""
    for lane in lanes:
        whole = Checkpoints(folder / f"alone{lane}" / "checkpoints").load(step).tensors
        alone = {name: tensor for name, tensor in whole.items() if not name.startswith("attributes.")}  # a cache
        fused = Checkpoints(folder / f"fused{lane}" / "checkpoints").load(step).tensors
        assert alone.keys() == fused.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(
                fused[name].double(),
                tensor.double(),
                rtol=tolerance,
                atol=tolerance * float(tensor.abs().max()),
                msg=name,
            )


@pytest.mark.parametrize("model", [plain, conv, transformer])
def test_lanes_end_as_the_same_trials_alone(model: Any, data: Data, tmp_path: Path) -> None:
    settings = chosen(data, model)
    alone, fused = run_alone(settings, tmp_path), run_fused(settings, tmp_path)
    check_equal(tmp_path, [0, 1, 2])
    check_equal(tmp_path, [0, 1, 2], step=8)  # with the optimizer's state
    for lane, result in enumerate(alone):
        assert fused[lane].losses == pytest.approx(result.losses, rel=1e-5)
        assert fused[lane].values == pytest.approx(result.values, rel=1e-5)
    assert len({round(result.losses[-1], 4) for result in alone}) == LANES  # they do differ


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_over_lanes_computes_as_torch_does(optimizer: str, data: Data, tmp_path: Path) -> None:
    settings = chosen(data, plain, optimizer, optimizer_options={"betas": (0.8, 0.9), "eps": 1e-4})
    run_alone(settings, tmp_path)
    run_fused(settings, tmp_path)
    check_equal(tmp_path, [0, 1, 2])
    check_equal(tmp_path, [0, 1, 2], step=8)


@pytest.mark.parametrize("options", [{"nesterov": True}, {"dampening": 0.3}, {}])
def test_sgd_over_lanes_computes_as_torch_does(options: dict[str, Any], data: Data, tmp_path: Path) -> None:
    settings = chosen(data, plain, least=0.1 if options.get("nesterov") else 0.0, optimizer_options=options)
    run_alone(settings, tmp_path)
    run_fused(settings, tmp_path)
    check_equal(tmp_path, list(range(len(settings))))
    check_equal(tmp_path, list(range(len(settings))), step=8)


def test_weights_that_are_used_twice_stay_one(data: Data, tmp_path: Path) -> None:
    settings = chosen(data, lambda params: Tied(), dropout=False)
    run_alone(settings, tmp_path)
    run_fused(settings, tmp_path)
    check_equal(tmp_path, [0, 1, 2])


def test_lanes_of_one_seed_share_their_batches_and_still_end_as_alone(data: Data, tmp_path: Path) -> None:
    recipe = Recipe(model=plain, data=data, steps=6, batch_size=16, optimizer="sgd")
    settings = [trial_config(recipe, {"lr": lr, "dropout": 0.2}) for lr in (0.1, 0.01)]
    run_alone(settings, tmp_path)
    run_fused(settings, tmp_path)
    check_equal(tmp_path, [0, 1])


def test_a_batch_may_be_cut_into_micro_batches(data: Data, tmp_path: Path) -> None:
    fit = Fit("accumulate", 6, 3, 1, 0, None, "")  # of 16: 6, 6 and 4
    settings = chosen(data, plain)
    run_alone(settings, tmp_path, fit)
    run_fused(settings, tmp_path, fit)
    check_equal(tmp_path, [0, 1, 2])


@pytest.mark.parametrize("way", ["recompute", "offload"])
def test_trials_that_save_memory_another_way_are_refused(way: Any, data: Data, tmp_path: Path) -> None:
    with pytest.raises(TuneError, match=f"that fit by '{way}' alone are not fused"):
        run_fused(chosen(data, plain), tmp_path, Fit(way, 16, 1, 1, 0, None, ""))


def test_bf16_is_within_its_own_tolerance(data: Data, tmp_path: Path) -> None:
    settings = chosen(data, plain, precision="bf16", steps=6)
    run_alone(settings, tmp_path)
    run_fused(settings, tmp_path)
    check_equal(tmp_path, [0, 1, 2], tolerance=2e-2)


def test_a_pruned_lane_leaves_and_the_others_end_as_alone(data: Data, tmp_path: Path) -> None:
    settings, seen = chosen(data, conv), []

    def report(lane: int, step: int, values: tuple[float, ...]) -> bool:
        seen.append((lane, step))
        return (lane, step) in ((0, 4), (2, 8))

    alone = run_alone(settings, tmp_path)
    fused = run_fused(settings, tmp_path, report=report)
    assert (fused[0], fused[2]) == ("pruned", "pruned")
    assert fused[1].losses == pytest.approx(alone[1].losses, rel=1e-5)
    assert seen == [(0, 4), (1, 4), (2, 4), (1, 8), (2, 8), (1, 12)]
    check_equal(tmp_path, [1])


class Stop(Exception):
    pass


@pytest.mark.long
def test_a_fused_training_goes_on_from_the_newest_step_that_all_lanes_have(data: Data, tmp_path: Path) -> None:
    settings = chosen(data, conv)
    run_alone(settings, tmp_path)

    def report(lane: int, step: int, values: tuple[float, ...]) -> bool:
        if step == 12:
            raise Stop
        return False

    with pytest.raises(Stop):
        run_fused(settings, tmp_path, report=report)
    Checkpoints(tmp_path / "fused1" / "checkpoints").drop_after(4)  # as if killed between two lanes' checkpoints
    steps: list[int] = []
    run_fused(settings, tmp_path, report=lambda lane, step, values: bool(steps.append(step)))
    assert sorted(set(steps)) == [8, 12]
    check_equal(tmp_path, [0, 1, 2])


def test_a_lane_that_was_done_tells_its_values_again(data: Data, tmp_path: Path) -> None:
    settings = chosen(data, plain)
    first = run_fused(settings, tmp_path)
    second = run_fused(settings, tmp_path)
    assert {lane: r.values for lane, r in first.items()} == {lane: r.values for lane, r in second.items()}


def test_a_trial_that_was_fused_goes_on_alone(data: Data, tmp_path: Path) -> None:
    settings = chosen(data, plain, "adamw")
    alone = run_alone(settings, tmp_path)

    def report(lane: int, step: int, values: tuple[float, ...]) -> bool:
        if step == 12:
            raise Stop
        return False

    with pytest.raises(Stop):
        run_fused(settings, tmp_path, report=report)
    result = train(settings[1], None, device="cpu", directory=tmp_path / "fused1", report=lambda *_: False)
    assert result.losses == pytest.approx(alone[1].losses, rel=1e-5)


def test_lanes_that_want_too_much_memory_are_told_so(data: Data, tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory):
        train_fused(
            chosen(data, plain),
            None,
            device="cpu",
            memory=20_000,
            directories=[tmp_path / str(lane) for lane in range(LANES)],
            report=lambda *_: False,
            ended=lambda *_: None,
        )


class NoKernel(nn.Module):
    """Fails for lanes of a whole batch, as an operator does that a device has no batched kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        if len(image) > 2 and torch._C._functorch.is_batchedtensor(image):
            raise RuntimeError("no kernel")
        out: Tensor = self.head(image.flatten(1))
        return out


def test_lanes_that_cannot_run_together_after_all_run_one_by_one(data: Data, tmp_path: Path) -> None:
    settings = chosen(data, lambda params: NoKernel(), dropout=False)
    alone = run_alone(settings, tmp_path)
    fused = run_fused(settings, tmp_path, report=lambda lane, step, values: (lane, step) == (1, 8))
    assert fused[1] == "pruned"
    assert [fused[lane].losses for lane in (0, 2)] == [alone[lane].losses for lane in (0, 2)]


def test_only_continuous_choices_leave_the_shape_as_it_is(data: Data) -> None:
    recipe = Recipe(model=plain, data=data, optimizer="sgd")
    base = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "dropout": 0.1, "seed": 0}
    key = shape_key(trial_config(recipe, base))
    assert key is not None
    for name, value in (("lr", 0.2), ("weight_decay", 0.1), ("momentum", 0.9), ("dropout", 0.2), ("seed", 5)):
        assert shape_key(trial_config(recipe, {**base, name: value})) == key, name
    for name, other in (("width", 24), ("batch_size", 8), ("steps", 7), ("precision", "bf16"), ("optimizer", "adam")):
        params = {k: v for k, v in {**base, name: other}.items() if not (name == "optimizer" and k == "momentum")}
        assert shape_key(trial_config(recipe, params)) != key, name


@pytest.mark.parametrize(
    ("model", "optimizer", "reason"),
    [
        (lambda params: Chooses(), "sgd", "DataDependent"),
        (lambda params: Recurrent(), "sgd", "lstm"),
        (lambda params: Idle(), "sgd", "'spare.weight' gets no gradient"),
        (lambda params: Noisy(), "sgd", "its forward changes 'a generator of the host'"),
        (lambda params: plain({}), "rmsprop", "RMSprop has no form for lanes"),
    ],
)
def test_what_cannot_be_fused_has_no_shape_and_says_why(
    model: Any, optimizer: str, reason: str, data: Data, caplog: pytest.LogCaptureFixture
) -> None:
    one = trial_config(Recipe(model=model, data=data, optimizer=optimizer), {"lr": 0.1})
    with caplog.at_level("INFO", "weft.tune"):
        assert shape_key(one) is None
    assert reason in (why_not(one) or "")
    assert "not fused" in caplog.text


class Odd(nn.Module):
    """Two layers, and between them what a test makes of it."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.made(params)

    def made(self, params: Mapping[str, Any]) -> None: ...

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.between(self.enter(image.flatten(1))))
        return out


class Assigns(Odd):
    """A buffer that is replaced, and not written into."""

    def made(self, params: Mapping[str, Any]) -> None:
        self.register_buffer("mean", torch.zeros(16))

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return (x - self.mean).relu()


class Writes(Assigns):
    """The same, where it lies."""

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0) * 0.1)
        return (x - self.mean).relu()


class Hides(Writes):
    """A buffer that no state_dict has, and one that stays as it is."""

    def made(self, params: Mapping[str, Any]) -> None:
        self.register_buffer("mean", torch.zeros(16), persistent=False)
        self.register_buffer("table", torch.ones(64, 64), persistent=False)


class Keeps(Odd):
    """By the dropout."""

    def made(self, params: Mapping[str, Any]) -> None:
        self.scale = 1 - params["dropout"]

    def between(self, x: Tensor) -> Tensor:
        return x.relu() * self.scale


class Rated(Keeps):
    """By the learning rate."""

    def made(self, params: Mapping[str, Any]) -> None:
        self.scale = 1 + 10 * params["lr"]


class Configured(Keeps):
    """By the learning rate, in a configuration."""

    def made(self, params: Mapping[str, Any]) -> None:
        self.params = {"all": [dict(params)]}

    def between(self, x: Tensor) -> Tensor:
        return x.relu() * (1 + 10 * self.params["all"][0]["lr"])


class Closes(Keeps):
    """By the learning rate, in a function."""

    def made(self, params: Mapping[str, Any]) -> None:
        self.between = lambda x: x.relu() * (1 + 10 * params["lr"])  # type: ignore[method-assign]


class Drawn(Odd):
    """A plain tensor, drawn as the seed says."""

    def made(self, params: Mapping[str, Any]) -> None:
        self.noise = torch.randn(16)

    def between(self, x: Tensor) -> Tensor:
        return x.relu() * self.noise


class Fixed(Drawn):
    """A plain tensor that is the same in every trial."""

    def made(self, params: Mapping[str, Any]) -> None:
        self.noise = torch.arange(16) / 16


class Counts(Odd):
    """Forwards, in Python."""

    def made(self, params: Mapping[str, Any]) -> None:
        self.seen = 0

    def between(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x.relu() * (1 + 0.1 * (self.seen % 2))


class CountsInTensors(Odd):
    """Forwards, in a tensor that is no buffer."""

    def made(self, params: Mapping[str, Any]) -> None:
        self.seen = torch.zeros(())

    def between(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x.relu() / self.seen


class Caches(Odd):
    """A tensor that the first forward makes."""

    def made(self, params: Mapping[str, Any]) -> None:
        self.table: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 16, device=x.device)
        return x.relu() * self.table


class Drops(Odd):
    """By a function that is told how often."""

    def made(self, params: Mapping[str, Any]) -> None:
        self.dropout = params["dropout"]

    def between(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.relu(), self.dropout, self.training)


class DropsAndScales(Drops):
    def between(self, x: Tensor) -> Tensor:
        return super().between(x) * (1 + self.dropout)


class Extra(Fixed):
    """A state of its own kind."""

    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None: ...


class Aliases(Writes):
    """A buffer under a second name."""

    def made(self, params: Mapping[str, Any]) -> None:
        super().made(params)
        self.other = [self.mean]

    def between(self, x: Tensor) -> Tensor:
        super().between(x)
        return (x - self.other[0]).relu()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Assigns, "mean"),
        (Keeps, "scale"),
        (Rated, "scale"),
        (Configured, "params"),
        (Closes, "between"),
        (Drawn, "noise"),
        (Counts, "seen"),
        (CountsInTensors, "seen"),
        (DropsAndScales, "dropout"),
        (Aliases, "other"),
        (Extra, "_extra_state"),
    ],
)
def test_trials_whose_models_are_more_than_their_weights_are_not_fused(
    model: Any, name: str, data: Data, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "weft.tune"):
        shapes = [shape_key(one) for one in chosen(data, model)]
    assert len({shape for shape in shapes if shape is not None}) == len([one for one in shapes if one is not None])
    assert f"'{name}'" in caplog.text


@pytest.mark.parametrize("model", [Assigns, Keeps, Rated, Drawn, Counts, CountsInTensors, Aliases, Extra])
def test_such_trials_train_one_by_one_where_they_are_fused_all_the_same(
    model: Any, data: Data, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = chosen(data, model)
    alone, fused = run_alone(settings, tmp_path), run_fused(settings, tmp_path)
    assert [fused[lane].losses for lane in range(LANES)] == [result.losses for result in alone]
    assert "train one after another" in caplog.text


class Normed(Fixed):
    """A weight that is made anew before every forward, as a plain tensor."""

    def made(self, params: Mapping[str, Any]) -> None:
        super().made(params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has a newer kind, but models use this one
            nn.utils.weight_norm(self.enter)


@pytest.mark.parametrize("model", [Writes, Hides, Fixed, Caches, Drops, Normed])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_lanes_can_share_or_have_each_for_itself_is_fused(model: Any, data: Data, tmp_path: Path) -> None:
    settings = chosen(data, model)
    assert len({shape_key(one) for one in settings}) == 1
    assert shape_key(settings[0]) is not None
    alone, fused = run_alone(settings, tmp_path), run_fused(settings, tmp_path)
    check_equal(tmp_path, [0, 1, 2])
    for lane, result in enumerate(alone):
        assert fused[lane].losses == pytest.approx(result.losses, rel=1e-5)


@pytest.mark.parametrize("goes_on", ["fused", "alone"])
def test_a_buffer_that_no_state_dict_has_is_kept_of_every_lane(goes_on: str, data: Data, tmp_path: Path) -> None:
    settings = chosen(data, Hides)
    alone = run_alone(settings, tmp_path)

    def report(lane: int, step: int, values: tuple[float, ...]) -> bool:
        if step == 12:
            raise Stop
        return (lane, step) == (0, 4)  # what the others hold is moved together

    with pytest.raises(Stop):
        run_fused(settings, tmp_path, report=report)
    names = Checkpoints(tmp_path / "fused1" / "checkpoints").names(8)
    assert [name for name in names if name.startswith("buffers.")] == ["buffers.mean"]
    check_equal(tmp_path, [1, 2], step=8)
    if goes_on == "fused":
        found = run_fused(settings, tmp_path)[2]
    else:
        found = train(settings[2], None, device="cpu", directory=tmp_path / "fused2", report=lambda *_: False)
    assert found.losses == pytest.approx(alone[2].losses, rel=1e-5)


def test_a_model_that_leaves_out_a_dropout_of_rate_0_is_of_the_shape_of_the_others(data: Data, tmp_path: Path) -> None:
    def model(params: Mapping[str, Any]) -> nn.Module:
        drop = nn.Dropout(params["dropout"]) if params["dropout"] else nn.Identity()
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), drop, nn.Linear(16, 10))

    settings = chosen(data, model)
    whole = replace(settings[0], params={**settings[0].params, "dropout": 0})  # no dropout may be a whole number
    assert len({shape_key(one) for one in (*settings, whole)}) == 1
    run_alone(settings, tmp_path)
    run_fused(settings, tmp_path)
    check_equal(tmp_path, [0, 1, 2])


class Hooked(Drops):
    """Holds a hook, and a part with attributes that do not differ."""

    def made(self, params: Mapping[str, Any]) -> None:
        super().made(params)
        self.inner, self.params = nn.Identity(), {"dropout": params["dropout"]}
        self.inner.scale, self.hook = 2.0, self.inner.register_forward_hook(lambda part, given, out: out * part.scale)

    def between(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(super().between(x))
        return out


def test_what_does_not_differ_is_seen_as_the_same(data: Data) -> None:
    settings = chosen(data, Hooked)
    assert len({shape_key(one) for one in settings}) == 1
    assert shape_key(settings[0]) is not None
    zero = replace(settings[0], params={**settings[0].params, "dropout": 0})
    assert shape_key(zero) == shape_key(settings[0])


def test_lanes_leave_no_fake_tensor_in_what_a_model_caches(data: Data, tmp_path: Path) -> None:
    settings = chosen(data, lambda params: objectives.Remembers(16), dropout=False)
    objectives.causal.cache_clear()
    fused = run_fused(settings, tmp_path)
    assert type(objectives.causal(8)) is Tensor
    alone = run_alone(settings, tmp_path)
    for lane, result in enumerate(alone):
        assert fused[lane].losses == pytest.approx(result.losses, rel=1e-5)


@pytest.mark.parametrize("run", [run_alone, run_fused])
@pytest.mark.parametrize("strict", [True, False])
def test_a_fake_tensor_that_a_trace_left_is_told_of(run: Any, strict: bool, data: Data, tmp_path: Path) -> None:
    objectives.causal.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=not strict):
        objectives.causal(8)
    try:
        with pytest.raises(TuneError, match="the model computes with a FakeTensor"):
            run(chosen(data, lambda params: objectives.Remembers(16), dropout=False), tmp_path)
    finally:
        objectives.causal.cache_clear()
