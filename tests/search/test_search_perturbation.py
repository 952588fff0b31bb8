"""The choice by perturbation: each option counts by the loss without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_supernets import layered
from torch import Tensor, nn

import weft
from weft.data import Data, Tensors
from weft.elastic import Mixture
from weft.errors import SearchError
from weft.search.discretize import _without, by_perturbation, most_probable_subnet
from weft.search.gradient import search_gradient
from weft.search.gradient.methods import Darts, default_pick, make_gradient_method
from weft.supernet import initialise
from weft.trainer.api import TrainedRun
from weft.trainer.config import Execution, TrainConfig, resolve
from weft.zoo import digits_mlp

BLOCKS = partial(digits_mlp, 2, 16)


class Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0 * x


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def doubled() -> Data:
    """To double the input is what is to be learned; nothing has to be trained for it."""
    rows = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    return Data("doubled", Tensors(x=rows, y=4 * rows), Tensors(x=rows, y=4 * rows))


def build() -> weft.Chain:
    space = weft.Space()
    options = {"zero": Zero, "once": nn.Identity, "twice": Twice}
    return weft.Chain(*[weft.Choice(space, f"block{i}", options) for i in range(2)])


class Misspelt(Darts):
    pick = "mised"


def off(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (outputs - batch["y"]).square().mean()


def as_trained(chain: weft.Chain, data: Data, **options: Any) -> TrainedRun:
    """The chain as it is, as if a run had trained it."""
    config = TrainConfig(stream="iid", **options)
    run: Any = None  # nothing is read from its folder
    return TrainedRun(run, chain.eval(), data, config, Execution(), resolve(config, chain), chain)


def chosen(chain: weft.Chain, mixture: Mixture, data: Data) -> weft.Subnet:
    return by_perturbation(as_trained(chain, data, steps=8, batch_size=16, loss=off), mixture)


def test_an_unlikely_option_whose_removal_raises_the_loss_most_is_kept() -> None:
    chain = initialise(build, 0)
    rows = {f"block{i}": torch.tensor([0.6, 0.1, 0.3]) for i in range(2)}
    mixture = Mixture(chain.space, rows)
    assert most_probable_subnet(mixture) == chain.space.subnet(block0="zero", block1="zero")
    assert chosen(chain, mixture, doubled()) == chain.space.subnet(block0="twice", block1="twice")


def test_without_a_certain_option_the_others_are_equally_probable() -> None:
    assert _without(torch.tensor([0.5, 0.4, 0.1]), 0).tolist() == pytest.approx([0.0, 0.8, 0.2])
    assert _without(torch.tensor([0.0, 1.0, 0.0]), 1).tolist() == [0.5, 0.0, 0.5]


def test_an_option_that_breaks_the_network_alone_is_not_kept() -> None:
    """Without `off`, of which the mixture has a little, the others are too much; by itself it is nothing."""
    space = weft.Space()
    options = {"once": nn.Identity, "twice": Twice, "off": Zero}
    chain = initialise(weft.Chain(weft.Choice(space, "block", options)), 0)
    rows = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    part = Tensors(x=rows, y=0.9 * rows)
    mixture = Mixture(space, {"block": torch.tensor([0.5, 0.2, 0.3])})
    assert chosen(chain, mixture, Data("less", part, part)) == space.subnet(block="once")


def test_sizes_are_the_likeliest(tmp_path: Path) -> None:
    found = search_gradient(layered, weft.data.digits(), method="darts", steps=8, batch_size=32, folder=tmp_path)
    assert (found.subnet, found.pick) == (most_probable_subnet(found.mixture), "likeliest")
    assert by_perturbation(found.trained, found.mixture) == found.subnet


def test_the_pick_of_a_search_is_that_of_its_mixture_and_can_be_another_after_a_resume(tmp_path: Path) -> None:
    def run(**more: Any) -> Any:
        given = {"steps": 4, "batch_size": 32, "folder": tmp_path, "method": "darts", "run": "one", **more}
        return search_gradient(BLOCKS, weft.data.digits(), **given)

    one = run()
    assert (one.pick, one.subnet) == ("perturbation", by_perturbation(one.trained, one.mixture))
    assert default_pick(make_gradient_method("drnas")) == "perturbation"
    assert default_pick(make_gradient_method("gdas")) == "likeliest"
    other = run(resume=True, pick="likeliest")
    assert (other.pick, other.subnet) == ("likeliest", most_probable_subnet(one.mixture))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pick": "best"}, "pick is 'likeliest' or 'perturbation', not 'best'"),
        ({"pick": "perturbation", "method": "spos"}, "'spos' learns no mixture to pick from"),
        ({"pick": "perturbation", "targets": "parameters=650"}, "ignores what a subnet costs"),
        ({"method": Misspelt()}, "pick of 'darts' is 'likeliest' or 'perturbation', not 'mised'"),
    ],
)
def test_a_pick_that_is_not_known_is_refused(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    given = {"method": "darts", "steps": 20, "folder": tmp_path, **wrong}
    with pytest.raises(SearchError, match=said):
        search_gradient(BLOCKS, weft.data.digits(), **given)
    assert not any(tmp_path.iterdir())
