"""Costs of many subnets: counted at first, then read from tables, with the same figures."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import weft
from weft.errors import SearchError
from weft.search.cost_model import CostModel
from weft.search.scorer import MANY, Scorer, cost_lookup
from weft.space import Subnet
from weft.supernet import Chain


class Residual(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, x: object) -> object:
        return x + self.body(x)


def build() -> Chain:
    space = weft.Space()
    block = {"wide": lambda: Residual(32), "narrow": lambda: Residual(8), "skip": nn.Identity}
    blocks = [weft.Choice(space, f"block{i}", block) for i in range(4)]
    return weft.Chain(weft.Shared(nn.Flatten, "flat"), *blocks, weft.Shared(lambda: nn.Linear(64, 10), "head"))


class Counting(Scorer):
    """Remembers which subnets were counted."""

    counted: list[Subnet]

    def layers(self, subnet: Subnet) -> list[dict[str, object]]:
        self.counted.append(subnet)
        return super().layers(subnet)


@pytest.fixture
def scorer(tmp_path: Path) -> Counting:
    run = weft.train(build, weft.data.digits(), steps=1, folder=tmp_path, run="one")
    made = Counting(run)
    made.counted = []
    return made


def test_the_costs_of_many_subnets_come_from_tables_and_are_the_same(scorer: Counting) -> None:
    costs, every = cost_lookup(scorer, MANY), list(scorer.chain.space.enumerate())
    found = [costs(subnet) for subnet in every]
    assert not scorer.counted
    assert found == [scorer.cheap(subnet) for subnet in every]


def test_where_few_subnets_are_asked_for_or_there_are_no_tables_all_are_counted(
    scorer: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = list(itertools.islice(scorer.chain.space.enumerate(), 5))

    def refused(*args: Any) -> CostModel:
        raise SearchError("no tables")

    few = cost_lookup(scorer, MANY - 1)
    monkeypatch.setattr("weft.search.scorer.build_cost_model", refused)
    for costs in (few, cost_lookup(scorer, MANY)):
        scorer.counted.clear()
        scorer._costs.clear()
        assert [costs(subnet)["parameters"] for subnet in every] == [scorer.cheap(s)["parameters"] for s in every]
        assert scorer.counted == every
