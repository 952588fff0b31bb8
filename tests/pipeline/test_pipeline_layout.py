"""How images and filters lie in memory: what a run that is not told does, and that what it is told is kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.cli.build import train_parts
from weft.config import make_config
from weft.errors import ConfigError, RunError
from weft.supernet import Chain, Choice, Shared, initialise
from weft.trainer.config import prefers_channels_last
from weft.zoo import digits_conv, digits_mlp

Layers = dict[str, Callable[[], nn.Module]]
OPTIONS: dict[str, Any] = {"steps": 2, "batch_size": 8, "stream": "iid"}


def pictures() -> Chain:
    """A convolution in one candidate of one block, and nowhere else."""
    layers: Layers = {"conv": partial(nn.Conv2d, 2, 2, 3, padding=1), "skip": nn.Identity}
    head = partial(nn.Linear, 32, 3)
    return Chain(Choice(weft.Space(), "b", layers), Shared(nn.Flatten, "flat"), Shared(head, "head"))


def volumes() -> Chain:
    """Filters of images and of volumes in one chain, which torch cannot lay out with the channels innermost."""
    layers: Layers = {"image": partial(nn.Conv2d, 2, 2, 1), "volume": partial(nn.Conv3d, 2, 2, 1)}
    return Chain(Choice(weft.Space(), "b", layers))


def held_volume() -> nn.Module:
    convolution = nn.Conv2d(2, 2, 1)
    convolution.register_buffer("volume", torch.zeros(1, 1, 1, 1, 1))
    return convolution


def data() -> weft.Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(24, 2, 4, 4, generator=generator)
    return weft.Data("pictures", weft.Tensors(image=images, label=torch.arange(24) % 3))


def preferred(build: Callable[[], Chain], device: str) -> bool:
    return prefers_channels_last(initialise(build), device)


@pytest.mark.parametrize("build", [pictures, volumes, digits_conv, digits_mlp])
def test_a_run_that_is_not_told_keeps_channels_first_on_a_cpu(build: Callable[[], Chain]) -> None:
    assert preferred(build, "cpu") is False


@pytest.mark.parametrize(
    ("build", "last"),
    [
        (pictures, True),
        (digits_conv, True),
        (partial(Chain, Shared(partial(nn.ConvTranspose2d, 2, 2, 2), "up")), True),
        (digits_mlp, False),
        (partial(Chain, Shared(partial(nn.Conv1d, 2, 2, 3), "line")), False),
        (volumes, False),
        (partial(Chain, Shared(held_volume, "b")), False),
    ],
    ids=["one candidate", "digits-conv", "transposed", "digits-mlp", "lines", "images and volumes", "volume held"],
)
def test_a_run_that_is_not_told_puts_channels_last_where_images_are_convolved_on_a_gpu(
    build: Callable[[], Chain], last: bool
) -> None:
    assert preferred(build, "cuda") is last
    assert preferred(build, "cuda:1") is last


def test_torch_still_refuses_to_lay_out_volumes_as_images() -> None:
    for module in (nn.Conv3d(2, 2, 1), held_volume()):
        with pytest.raises(RuntimeError, match="rank 4"):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@pytest.mark.parametrize(("told", "last"), [(None, False), (False, False), (True, True)])
def test_the_manifest_says_how_the_filters_of_a_run_lie_and_they_lie_so(
    tmp_path: Path, told: bool | None, last: bool
) -> None:
    trained = weft.train(pictures, data(), channels_last=told, folder=tmp_path, **OPTIONS)
    assert trained.run.manifest["train_config"]["channels_last"] is last
    assert trained.chain.state_dict()["b.conv.weight"].is_contiguous(memory_format=torch.channels_last) is last


def test_the_layout_is_part_of_what_a_resumed_run_must_have_in_common(tmp_path: Path) -> None:
    one = weft.train(pictures, data(), run="x", folder=tmp_path, **OPTIONS)
    again = weft.train(pictures, data(), run="x", folder=tmp_path, resume=True, channels_last=False, **OPTIONS)
    assert one.fingerprint == again.fingerprint
    with pytest.raises(RunError, match=r"channels_last = False, now it is True"):
        weft.train(pictures, data(), run="x", folder=tmp_path, resume=True, channels_last=True, **OPTIONS)


@pytest.mark.parametrize("told", [None, True])
def test_retraining_keeps_the_layout_unless_it_is_told_another(tmp_path: Path, told: bool | None) -> None:
    trained = weft.train(pictures, data(), channels_last=told, folder=tmp_path, **OPTIONS)
    subnet = trained.chain.largest()
    again = weft.retrain(trained, subnet)
    assert again.run.manifest["train_config"]["channels_last"] is bool(told)
    other = weft.retrain(trained, subnet, run="other", channels_last=not told)
    assert other.run.manifest["train_config"]["channels_last"] is (not told)


@pytest.mark.parametrize(
    ("overrides", "given"),
    [([], None), (["--execution.channels_last=true"], True), (["--execution.channels-last=false"], False)],
)
def test_a_config_hands_the_layout_to_the_run(tmp_path: Path, overrides: list[str], given: bool | None) -> None:
    config = make_config({"supernet": "digits-conv"}, overrides)
    assert train_parts(config, tmp_path)[1].channels_last is given


def test_a_config_takes_no_number_for_the_layout() -> None:
    with pytest.raises(ConfigError, match=r"'execution.channels_last' must be bool or nothing, not int"):
        make_config({"supernet": "digits-conv"}, ["--execution.channels_last=1"])
