"""Costs of many subnets: counted at first, then read from tables, with the same figures."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.errors import SearchError
from weft.search.cost_model import CostModel
from weft.search.scorer import MANY, Scorer, cost_lookup
from weft.space import Subnet
from weft.zoo import digits_mlp


class Counting(Scorer):
    """Remembers which subnets were counted."""

    counted: list[Subnet]

    def layers(self, subnet: Subnet) -> list[dict[str, object]]:
        self.counted.append(subnet)
        return super().layers(subnet)


@pytest.fixture
def scorer(tmp_path: Path) -> Counting:
    run = weft.train(partial(digits_mlp, 3, 16), weft.data.digits(), steps=1, folder=tmp_path, run="one")
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
