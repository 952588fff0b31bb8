"""Losses and metrics: what a metric must give, and what is said where it gives something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from weft.data import digits
from weft.engine.losses import accuracy, counted
from weft.errors import TrainError
from weft.zoo import digits_conv


def test_a_metric_is_a_sum_and_a_count() -> None:
    batch = {"label": torch.tensor([0, 1, 1])}
    total, count = counted("accuracy", accuracy(torch.eye(2)[[0, 0, 1]], batch))
    assert (int(total), count) == (2, 3)


@pytest.mark.parametrize("found", [torch.tensor(0.5), 0.5, (1, 2, 3), None])
def test_what_is_no_sum_and_count_is_refused_with_the_name_of_the_metric(found: Any) -> None:
    with pytest.raises(TrainError, match=r"metric 'mine' returned \w+ and must return \(sum, count\)"):
        counted("mine", found)


def test_a_run_with_such_a_metric_says_so(tmp_path: Any) -> None:
    def mine(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return outputs.mean()

    with pytest.raises(TrainError, match="metric 'mine' returned Tensor"):
        weft.train(digits_conv, digits(), steps=1, batch_size=4, metrics={"mine": mine}, folder=tmp_path)
