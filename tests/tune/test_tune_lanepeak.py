"""What a lane takes of a CPU: traced on fake tensors, it is what lanes take when they train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.data import Data, digits
from weft.tune.fit.fit import BEYOND, TINY, Requirements, requirements
from weft.tune.fit.fused_memory import lane_peak
from weft.tune.fusion.trainer import train_fused
from weft.tune.jobs import Fit
from weft.tune.recipe import Recipe, TrialConfig, trial_config
from weft.tune.training.memory_limit import OutOfMemory
from weft.tune.training.run_job import StudySpec

BATCH = 128


def mlp(params: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 10))


def conv(params: Mapping[str, Any]) -> nn.Module:
    body = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(288, 10))


def transformer(params: Mapping[str, Any]) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), nn.Linear(8, 32), layer, nn.Flatten(), nn.Linear(256, 10))


@pytest.fixture(scope="module")
def data() -> Data:
    return digits()


def lanes(model: Any, data: Data, count: int, **given: Any) -> list[TrialConfig]:
    recipe = Recipe(model=model, data=data, steps=3, checkpoint_every=1, **{"batch_size": BATCH, **given})
    return [trial_config(recipe, {"lr": 0.01, "dropout": 0.1, "seed": lane}) for lane in range(count)]


def peak(settings: list[TrialConfig], folder: Path, memory: int, fit: Fit | None = None) -> int:
    found: dict[int, Any] = {}
    train_fused(
        settings,
        fit,
        device="cpu",
        memory=memory,
        directories=[folder / str(lane) for lane in range(len(settings))],
        report=lambda *_: False,
        ended=found.__setitem__,
    )
    return int(found[0].peak)


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (mlp, {"batch_size": 16}),
        (conv, {"precision": "bf16"}),
        (transformer, {"precision": "bf16", "optimizer": "sgd"}),
    ],
)
def test_lanes_take_what_was_traced_however_many_they_are(
    model: Any, given: dict[str, Any], data: Data, tmp_path: Path
) -> None:
    for count in (2, 5):
        settings = lanes(model, data, count, **given)
        traced = lane_peak(settings[0], settings[0].batch_size)
        assert traced is not None
        assert peak(settings, tmp_path / str(count), 2**40) == pytest.approx(traced * count, rel=1e-4)


def test_lanes_in_micro_batches_take_what_was_traced_and_less_than_whole(data: Data, tmp_path: Path) -> None:
    settings = lanes(transformer, data, 3)
    whole, traced = (lane_peak(settings[0], micro) for micro in (BATCH, 48))
    assert whole is not None
    assert traced is not None
    assert traced < 0.7 * whole
    assert peak(settings, tmp_path, 2**40, Fit("accumulate", 48, 3, 1, 0, None, "")) == pytest.approx(
        3 * traced, rel=1e-4
    )


def test_a_trial_that_can_be_fused_needs_what_its_lane_takes_and_no_multiple_of_itself(
    data: Data, tmp_path: Path
) -> None:
    recipe = Recipe(model=transformer, data=data, steps=3, batch_size=BATCH)
    found = requirements(StudySpec(recipe, ("loss",), 0), {"lr": 0.01}, 2**30, 1, "cpu", True)
    traced = lane_peak(trial_config(recipe, {"lr": 0.01}), BATCH)
    assert traced is not None
    assert found.lane == int(traced * (1 + BEYOND)) + TINY
    assert found.of_lanes(4) == 4 * found.lane
    settings = [trial_config(recipe, {"lr": 0.01, "seed": lane}) for lane in range(4)]
    assert peak(settings, tmp_path / "all", found.of_lanes(4)) <= found.of_lanes(4)
    with pytest.raises(OutOfMemory):
        peak(settings, tmp_path / "less", found.of_lanes(3))


class Views(nn.Module):
    """Judged by the mean over views of each sample, and trained with one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.body(x) if self.training else self.body(torch.cat([x] * 16)).view(16, len(x), 10).mean(0)


def views(params: Mapping[str, Any]) -> nn.Module:
    return Views()


@pytest.mark.parametrize("report", [None, 1])
def test_lanes_that_take_more_while_they_are_judged_need_that(report: int | None, data: Data, tmp_path: Path) -> None:
    for count in (2, 4):
        settings = lanes(views, data, count, report_every=report)
        traced = lane_peak(settings[0], BATCH)
        assert traced is not None
        assert 0.8 * count * traced <= peak(settings, tmp_path / str(count), 2**40) <= count * traced + TINY


def test_what_was_not_traced_is_taken_to_need_twice_what_it_needs_alone() -> None:
    assert [Requirements(10).of_lanes(1), Requirements(10).of_lanes(3), Requirements(10, lane=12).of_lanes(1)] == [
        10,
        60,
        10,
    ]
    assert Requirements(10, lane=12).of_lanes(3) == 36
