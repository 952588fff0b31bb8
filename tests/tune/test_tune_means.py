"""Micro-batches are for losses that are means over samples: others are refused, and no mean is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import Between, conv
from torch import Tensor, nn
from torch.nn import functional as F
from trials import config_of, few, fit_of, run, run_fused

from weft.engine.losses import cross_entropy
from weft.errors import TuneError
from weft.tune.recipe import TrialConfig
from weft.tune.training.loss_check import require_mean_loss
from weft.utils.rng import get_rng_state

Batch = Mapping[str, Tensor]
CPU = torch.device("cpu")


class Counting(Between):
    """Keeps count of its forwards."""

    def prepare(self, params: Mapping[str, Any]) -> None:
        self.norm, self.count = nn.LayerNorm(16), 0

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        out: Tensor = self.norm(x) * (1.0 + self.count % 2)
        return out


def ignored(batch: Batch) -> Tensor:
    """The labels below 6; the others do not count."""
    return torch.where(batch["label"] < 6, batch["label"], -100)


def entropy(weight: Tensor | None = None, reduction: str = "mean") -> Callable[[Tensor, Batch], Tensor]:
    return lambda outputs, batch: F.cross_entropy(outputs, batch["label"], weight, reduction=reduction)


def contrast(outputs: Tensor, batch: Batch) -> Tensor:
    """Each sample against the others of its batch."""
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


mean, summed, weighted = entropy(), entropy(reduction="sum"), entropy(3.0 ** torch.arange(10))


def of_some(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, ignored(batch))


def of_some_by_samples(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, ignored(batch), reduction="sum") / len(outputs)


def drawing(outputs: Tensor, batch: Batch) -> Tensor:
    """A mean over samples, each with noise of its own, as of a diffusion."""
    return (outputs + torch.randn_like(outputs)).square().mean()


def cancelling(outputs: Tensor, batch: Batch) -> Tensor:
    return ((outputs.sum(1) + 1e6) - 1e6).mean()


def trial(loss: Callable[..., Any], model: Any = conv, **params: Any) -> TrialConfig:
    return config_of(model, params, loss=loss, steps=3, report_every=None, microbatch_batchnorm=True)


@pytest.mark.parametrize(("loss", "micro"), [(summed, 1), (contrast, 3), (weighted, 4), (summed, 8), (of_some, 15)])
def test_a_loss_that_is_no_mean_over_samples_is_refused_where_a_batch_is_cut_and_nowhere_else(
    loss: Callable[..., Any], micro: int, tmp_path: Path
) -> None:
    with pytest.raises(TuneError, match=f"mean over samples where .* cut into micro-batches of {micro}"):
        run(trial(loss), tmp_path, fit_of(micro))
    assert len(run(trial(loss), tmp_path)[0].losses) == 3
    with pytest.raises(TuneError, match="must be a mean over samples"):
        run_fused([trial(loss)] * 2, tmp_path / "fused", fit_of(micro))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([mean, cross_entropy, of_some_by_samples, drawing, cancelling]),
    st.integers(1, 15),
    st.integers(0, 99),
    st.floats(1e-4, 1e4),
)
def test_no_mean_is_refused(loss: Callable[..., Any], micro: int, seed: int, scale: float) -> None:
    made = trial(loss, seed=seed)
    model = made.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    require_mean_loss(made, model, few().train, micro, CPU)


@pytest.mark.parametrize("model", [conv, Counting])
def test_looking_at_a_loss_moves_no_generator_and_changes_nothing_of_the_model(model: Any) -> None:
    made = trial(mean, model)
    module = made.build()
    before = torch.default_generator.get_state(), get_rng_state(), [t.clone() for t in module.state_dict().values()]
    require_mean_loss(made, module, few().train, 4, CPU)
    assert torch.equal(before[0], torch.default_generator.get_state())
    assert get_rng_state() == before[1]
    assert all(torch.equal(a, b) for a, b in zip(before[2], module.state_dict().values(), strict=True))
    assert all(part.training for part in module.modules())
    assert getattr(module, "count", 0) == 0
