"""Cuts of supernets for the subnets that are to come."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from weft.errors import PlanError
from weft.plan import plan_chain
from weft.supernet import Chain
from weft.trainer.config import TrainConfig, resolve
from weft.trainer.partitioning import workload_of

WIDTH = 32
BATCH = {"x": torch.zeros(16, WIDTH)}


def wide(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH))


def build() -> Chain:
    """Six blocks, each cheap or dear."""
    space = weft.Space()
    blocks = [weft.Choice(space, f"b{k}", {"cheap": wide(16), "dear": wide(4096)}) for k in range(6)]
    return weft.Chain(*blocks)


def test_a_cut_is_the_best_for_the_expected_costs() -> None:
    chain = weft.initialise(build, 0)
    found = plan_chain(chain, BATCH, "cpu", devices=3)
    stages = [max(sum(found.blocks[a:b]) for a, b in pairwise((0, *cut, 6))) for cut in combinations(range(1, 6), 2)]
    assert max(found.seconds) == pytest.approx(min(stages))
    assert sum(found.seconds) == pytest.approx(sum(found.blocks))
    weights = sum(p.numel() for p in chain.parameters()) * 16
    assert sum(found.memory) == pytest.approx(weights)


def test_a_search_that_narrows_is_cut_anew() -> None:
    chain = weft.initialise(build, 0)
    front = {f"b{k}": [0.0, 1.0] if k < 3 else [1.0, 0.0] for k in range(6)}
    back = {name: row[::-1] for name, row in front.items()}
    first, last = (plan_chain(chain, BATCH, "cpu", devices=2, mixture=mixture) for mixture in (front, back))
    assert first.cut[0] < 3 <= last.cut[0]
    assert first.balance > 0.6
    assert last.balance > 0.6


def test_what_cannot_be_is_refused() -> None:
    chain = weft.initialise(build, 0)
    with pytest.raises(PlanError, match="6 blocks are cut into 1 to 6 stages, not 7"):
        plan_chain(chain, BATCH, devices=7)
    with pytest.raises(PlanError, match="choice 'b0' has 2 options"):
        plan_chain(chain, BATCH, devices=2, mixture={"b0": [0.2, 0.3, 0.5]})
    with pytest.raises(PlanError, match="no choice 'c0'"):
        plan_chain(chain, BATCH, devices=2, mixture={"c0": [1.0]})


def test_a_resumed_run_is_cut_for_the_steps_ahead(tmp_path: Path) -> None:
    """The stream has dear blocks in front for ten steps, and behind from then on."""
    chain = weft.initialise(build, 0)
    steps = [{f"b{k}": "dear" if (k < 3) == (step < 10) else "cheap" for k in range(6)} for step in range(20)]
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(json.dumps(chain.space.subnet(step).to_json()) + "\n" for step in steps))
    config = TrainConfig(loss=nn.functional.mse_loss, steps=20, batch_size=4, stream=str(file))
    settings = resolve(config, chain)
    costs = {layer: (1.0, 2.0) if "dear" in layer else (0.1, 0.2) for layer in chain.layers}
    begun, resumed = (workload_of(chain, settings, costs, first).expected_costs() for first in (0, 10))
    assert begun == pytest.approx([3.3 * 10] * 6)
    assert resumed == pytest.approx([0.3 * 10] * 3 + [3.0 * 10] * 3)
