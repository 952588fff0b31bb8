"""Losses, metrics, and in-place distillation, in which the largest subnet of a step teaches the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_supernets import layered
from stages import KINDS, Task, in_stages, sequentially
from torch import Tensor

import weft
from weft.data import open_data
from weft.engine.losses import accuracy, counted, follow
from weft.errors import TrainError
from weft.trainer.config import TrainConfig, resolve


def test_a_metric_is_a_sum_and_a_count() -> None:
    batch = {"label": torch.tensor([0, 1, 1])}
    total, count = counted("accuracy", accuracy(torch.eye(2)[[0, 0, 1]], batch))
    assert (int(total), count) == (2, 3)


@pytest.mark.parametrize("found", [torch.tensor(0.5), 0.5, (1, 2, 3), None])
def test_what_is_no_sum_and_count_is_refused_with_the_name_of_the_metric(found: Any) -> None:
    with pytest.raises(TrainError, match=r"metric 'mine' returned \w+ and must return \(sum, count\)"):
        counted("mine", found)


# Distillation in place: the largest subnet of a sandwich teaches the others of its step.


OPTIONS: dict[str, Any] = {"batch_size": 16, "microbatches": 3, "stream": "sandwich:1", "distill": True}


def test_all_but_the_largest_learn_from_what_the_largest_gave(tmp_path: Path) -> None:
    seen: list[tuple[str, Tensor, Tensor | None]] = []

    def follow(outputs: Tensor, taught: Tensor, batch: dict[str, Tensor]) -> Tensor:
        seen.append(("follow", outputs.detach(), taught))
        return (outputs - taught).square().mean()

    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        seen.append(("loss", outputs.detach(), None))
        return weft.cross_entropy(outputs, batch)

    options = {**OPTIONS, "distill": follow, "loss": loss, "folder": tmp_path}
    weft.train(layered, open_data("digits"), steps=2, **options)
    assert [kind for kind, *_ in seen] == ["loss", "follow", "follow"] * 2
    for step in (0, 3):
        largest = seen[step][1]
        assert len(largest) == 16  # all micro-batches see the whole batch
        for _, outputs, taught in seen[step + 1 : step + 3]:
            assert taught is not None
            assert torch.equal(taught, largest)
            assert not torch.equal(outputs, largest)
            assert not taught.requires_grad


def test_a_sandwich_with_its_teacher_has_the_same_bits_on_any_number_of_stages() -> None:
    config = TrainConfig(steps=6, batch_size=4, microbatches=3, stream="sandwich:1", distill=True)
    task = Task("text", resolve(config, KINDS["text"][0]()))
    alone = sequentially(task)
    for cut, seed in (((2,), 0), ((1, 3, 4), 1)):
        found, _ = in_stages(task, cut, 6, seed)
        assert (found.layers, found.losses) == (alone.layers, alone.losses)


@pytest.mark.parametrize(("distill", "share"), [(follow, 1 / 3), (True, 2 / 3)])
def test_following_yourself_is_learning_nothing(distill: Any, share: float, tmp_path: Path) -> None:
    # With one subnet in the space the students are their teacher: the gradient of the soft cross-entropy is zero there.
    def one() -> weft.Chain:
        return layered(1, (8,), (2,))

    options = {"optimizer": weft.Optimizer("sgd", lr=0.1, schedule="constant"), "folder": tmp_path, "batch_size": 16}
    data = open_data("digits")
    taught = weft.train(one, data, steps=3, microbatches=3, stream="sandwich:1", distill=distill, **options)
    # The gradient of a step is the mean over its micro-batches, so a third of the rate is what the largest gets, and as
    # much the two others together where half of what they learn is the labels.
    options["optimizer"] = weft.Optimizer("sgd", lr=0.1 * share, schedule="constant")
    alone = weft.train(one, data, steps=3, stream="iid", **options)
    for name, p in taught.chain.state_dict().items():
        torch.testing.assert_close(p, alone.chain.state_dict()[name], rtol=1e-5, atol=1e-6)
