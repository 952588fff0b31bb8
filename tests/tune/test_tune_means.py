"""Micro-batches are for losses that are means over samples: others are refused, and no mean is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from weft.data import Data, Tensors
from weft.engine.losses import cross_entropy
from weft.errors import TuneError
from weft.tune.fusion.trainer import train_fused
from weft.tune.jobs import Fit
from weft.tune.recipe import Recipe, TrialConfig, trial_config
from weft.tune.training.loss_check import require_mean_loss
from weft.tune.training.trainer import train
from weft.utils.rng import generator, get_rng_state

Batch = Mapping[str, Tensor]
CPU = torch.device("cpu")


class Counting(nn.Module):
    """Keeps count of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.count = nn.Linear(6, 3), nn.LayerNorm(3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        out: Tensor = self.norm(self.layer(x)) * (1.0 + self.count % 2)
        return out


def linear(params: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def blobs() -> Data:
    drawn = generator(0, "means")
    label = torch.tensor(drawn.integers(0, 3, 64))
    ignored = torch.where(torch.arange(64) % 3 > 0, label, -100)
    x = torch.tensor(drawn.normal(size=(64, 6)), dtype=torch.float32) + label[:, None]
    part = Tensors(x=x, label=label, ignored=ignored)
    return Data("blobs", part, part)


def mean(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, batch["label"])


def summed(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, batch["label"], reduction="sum")


def contrast(outputs: Tensor, batch: Batch) -> Tensor:
    """Each sample against the others of its batch."""
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def of_some(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, batch["ignored"])


def weighted(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, batch["label"], weight=torch.tensor([1.0, 9.0, 81.0]))


def of_some_by_samples(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, batch["ignored"], reduction="sum") / len(outputs)


def drawing(outputs: Tensor, batch: Batch) -> Tensor:
    """A mean over samples, each with noise of its own, as of a diffusion."""
    return (outputs + torch.randn_like(outputs)).square().mean()


def cancelling(outputs: Tensor, batch: Batch) -> Tensor:
    return ((outputs.sum(1) + 1e6) - 1e6).mean()


def trial(loss: Callable[..., Any], model: Any = linear) -> TrialConfig:
    recipe = Recipe(
        model=model, data=blobs, loss=loss, model_inputs=("x",), steps=3, batch_size=16, microbatch_batchnorm=True
    )
    return trial_config(recipe, {"lr": 0.01})


def cut(micro: int) -> Fit:
    return Fit("accumulate", micro, -(-16 // micro), 1, 0, None, "a test says so")


@pytest.mark.parametrize(("loss", "micro"), [(summed, 1), (contrast, 3), (weighted, 4), (summed, 8)])
def test_a_loss_that_is_no_mean_over_samples_is_refused_where_a_batch_is_cut_and_nowhere_else(
    loss: Callable[..., Any], micro: int, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"device": "cpu", "directory": tmp_path, "report": lambda step, values: False}
    with pytest.raises(TuneError, match=f"mean over samples where .* cut into micro-batches of {micro}"):
        train(trial(loss), cut(micro), **given)
    assert len(train(trial(loss), None, **given).losses) == 3


def test_a_mean_over_those_samples_that_count_is_no_mean_over_samples() -> None:
    model, source = trial(of_some).build(), blobs().train
    with pytest.raises(TuneError, match="tokens"):
        require_mean_loss(trial(of_some), model, source, 15, CPU)
    require_mean_loss(trial(of_some_by_samples), model, source, 15, CPU)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([mean, cross_entropy, of_some_by_samples, drawing, cancelling]),
    st.integers(1, 15),
    st.integers(0, 99),
    st.floats(1e-4, 1e4),
)
def test_no_mean_is_refused(loss: Callable[..., Any], micro: int, seed: int, scale: float) -> None:
    made = trial_config(Recipe(model=linear, data=blobs, loss=loss, model_inputs=("x",), batch_size=16), {"seed": seed})
    model = made.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    require_mean_loss(made, model, blobs().train, micro, CPU)


def test_looking_at_a_loss_moves_no_generator_and_changes_nothing_of_the_model() -> None:
    for model in (linear, lambda params: Counting()):
        made = trial(mean, model)
        module = made.build()
        before = torch.default_generator.get_state(), get_rng_state(), [t.clone() for t in module.state_dict().values()]
        require_mean_loss(made, module, blobs().train, 4, CPU)
        assert torch.equal(before[0], torch.default_generator.get_state())
        assert get_rng_state() == before[1]
        assert all(torch.equal(a, b) for a, b in zip(before[2], module.state_dict().values(), strict=True))
        assert all(part.training for part in module.modules())
        assert getattr(module, "count", 0) == 0


def test_fused_trials_that_are_cut_refuse_such_a_loss_too(tmp_path: Path) -> None:
    given: dict[str, Any] = {"device": "cpu", "report": lambda *_: False, "ended": lambda *_: None}
    with pytest.raises(TuneError, match="must be a mean over samples"):
        train_fused([trial(summed)] * 2, cut(8), directories=[tmp_path / "0", tmp_path / "1"], **given)
