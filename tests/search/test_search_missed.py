"""The pick by what is missed: options are worth what a mixture loses without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from elastics import layered
from torch import Tensor, nn

import weft
from weft.data import Data, Tensors
from weft.errors import SearchError
from weft.pipeline.settings import make_settings
from weft.search.expected import measure_expected
from weft.search.gradient import gradient_search
from weft.search.gradient.missed import _without, most_missed
from weft.search.pick import likeliest
from weft.search.target import Penalty
from weft.supernet import initialise
from weft.supernet.elastic import Mixture


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


def off(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (outputs - batch["y"]).square().mean()


def settled(chain: weft.Chain, mixture: Mixture, data: Data, **more: Any) -> weft.Subnet:
    return most_missed(chain.eval(), mixture, data, make_settings(chain, steps=8, batch_size=16, loss=off), **more)


def test_an_option_that_is_unlikely_but_cannot_be_done_without_is_kept() -> None:
    chain = initialise(build, 0)
    rows = {f"block{i}": torch.tensor([0.6, 0.1, 0.3]) for i in range(2)}
    mixture = Mixture(chain.space, rows)
    assert likeliest(mixture) == chain.space.subnet(block0="zero", block1="zero")
    assert settled(chain, mixture, doubled()) == chain.space.subnet(block0="twice", block1="twice")


def test_what_is_left_when_a_certain_option_is_taken_away_are_the_others_alike() -> None:
    assert _without(torch.tensor([0.5, 0.4, 0.1]), 0).tolist() == pytest.approx([0.0, 0.8, 0.2])
    assert _without(torch.tensor([0.0, 1.0, 0.0]), 1).tolist() == [0.5, 0.0, 0.5]


def test_under_a_target_the_likeliest_subnet_that_meets_it_is_picked(tmp_path: Path) -> None:
    given: dict[str, Any] = {"steps": 8, "batch_size": 32, "runs": tmp_path, "targets": "parameters=4146"}
    found = gradient_search(layered, weft.data.digits(), method="darts", **given)
    assert found.scores["parameters"] == pytest.approx(4146, rel=0.02)


def test_what_costs_is_missed_less() -> None:
    digits = weft.data.digits()
    chain = initialise(layered, 0)
    batch = digits.train.take([0])
    settings = make_settings(chain, steps=100, batch_size=32)
    expected = measure_expected(chain.eval(), batch, "parameters")
    mixture = Mixture.uniform(chain.space)
    cheap = most_missed(chain, mixture, digits, settings, penalties=[Penalty(expected, 1e3)])
    dear = most_missed(chain, mixture, digits, settings, penalties=[Penalty(expected, 0.0)])
    sizes = [sum(p.numel() for p in weft.extract(chain, one, batch).parameters()) for one in (cheap, dear)]
    assert sizes[0] == expected.low
    assert sizes[0] < sizes[1]


def test_darts_picks_so_unless_told_otherwise_and_repeats_it_on_two_stages(tmp_path: Path) -> None:
    def run(**more: Any) -> Any:
        given = {"steps": 8, "batch_size": 32, "microbatches": 2, "runs": tmp_path, **more}
        return gradient_search(layered, weft.data.digits(), method="darts", **given)

    one, two, likely = run(), run(stages=2), run(pick="likeliest")
    assert one.subnet == two.subnet
    assert (one.pick, likely.pick) == ("missed", "likeliest")
    assert likely.subnet == likeliest(one.mixture)
    plain = one.trained
    assert one.subnet == most_missed(plain.chain, one.mixture, plain.data, plain.settings)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pick": "best"}, "pick is 'likeliest' or 'missed', not 'best'"),
        ({"pick": "missed", "method": "spos"}, "'spos' learns no mixture to pick from"),
        ({"pick": "missed", "targets": "parameters=4146"}, "does not look at what a subnet costs"),
    ],
)
def test_a_pick_that_is_not_known_is_refused(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    given = {"method": "darts", "steps": 20, "runs": tmp_path, **wrong}
    with pytest.raises(SearchError, match=said):
        gradient_search(layered, weft.data.digits(), **given)
