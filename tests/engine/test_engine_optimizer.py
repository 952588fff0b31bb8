"""Schedules by name that end above 0, and weight decay for matrices alone."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.engine.optimizer import GlobalNorm, LayerOptimizer, Optimizer, is_named, make_schedule
from weft.errors import TrainError


def test_a_cosine_with_an_end_is_nanogpts_schedule() -> None:
    schedule = make_schedule("cosine:0.1", warmup_steps=100)
    for step in range(5000):
        if step < 100:
            wanted = 1e-3 * (step + 1) / 100
        else:
            part = (step - 100) / (5000 - 100)
            wanted = 1e-4 + 0.5 * (1.0 + math.cos(math.pi * part)) * (1e-3 - 1e-4)
        assert 1e-3 * schedule(step, 5000) == pytest.approx(wanted, rel=1e-12)


@given(
    end=st.floats(0, 1).filter(lambda end: "e" not in repr(end) or "e-" in repr(end)),
    kind=st.sampled_from(["cosine", "linear"]),
    steps=st.integers(1, 500),
)
def test_a_schedule_begins_at_1_never_rises_and_ends_where_it_says(end: float, kind: str, steps: int) -> None:
    schedule = make_schedule(f"{kind}:{end!r}")
    factors = [schedule(step, steps) for step in range(steps + 1)]
    assert factors[0] == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(end)
    assert all(later <= earlier + 1e-15 for earlier, later in pairwise(factors))
    plain = make_schedule(kind)
    assert all(f == end + (1.0 - end) * plain(step, steps) for step, f in enumerate(factors))


def test_a_schedule_says_in_its_name_where_it_ends() -> None:
    assert make_schedule("cosine:0.1", warmup_steps=3).__qualname__ == "cosine:0.1(warmup=3, floor=0.0)"
    assert all(is_named(text) for text in ("cosine", "cosine:0.1", "linear:1e-3"))
    assert not any(is_named(text) for text in ("mynet:schedule", "my.net:f"))


ENDS = [{"schedule": text} for text in ("cosine:", "cosine:.", "cosine:1.5", "constant:0.1")]
CLIPS = [{"clip": clip} for clip in ("global", "global:x", "norm:1", "global:0", 0.0, -1)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *((options, "write the part of the rate to go down to, 0 to 1") for options in ENDS),
        *((options, "clip=") for options in CLIPS),
        ({"schedule": "cosin:0.1"}, r"unknown schedule 'cosin:0\.1'; did you mean 'cosine'"),
        ({"kind": "adamww"}, "did you mean 'adamw'"),
        ({"kind": "lbfgs"}, "unknown optimizer"),
        ({"kind": "sgd", "weightdecay": 0.1}, "did you mean 'weight_decay'"),
        ({"groups": "matrixes"}, r"unknown groups 'matrixes' of parameters; did you mean 'matrices'"),
    ],
    ids=lambda value: ", ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_an_optimizer_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainError, match=words):
        Optimizer(**options)


@pytest.mark.parametrize(("text", "meaning"), [(None, None), (0.5, 0.5), ("0.5", 0.5), ("global:2", GlobalNorm(2.0))])
def test_what_clip_means(text: Any, meaning: Any) -> None:
    assert Optimizer(clip=text).clip == meaning


@pytest.mark.parametrize("kind", ["adamw", "sgd", "nadam"])
def test_weight_decay_of_matrices_leaves_biases_and_norms_alone(kind: str) -> None:
    parts = nn.ModuleDict({"in": nn.Embedding(3, 4), "norm": nn.LayerNorm(4), "conv": nn.Conv1d(4, 4, 2)})
    for parameter in parts.parameters():
        nn.init.constant_(parameter, 2.0)
    extra = {"decoupled_weight_decay": True} if kind == "nadam" else {}
    spec = Optimizer(kind, lr=0.1, weight_decay=0.5, groups="matrices", **extra)
    updater = LayerOptimizer(spec, dict(parts.named_parameters()))
    parameters = list(parts.parameters())
    updater.apply(parameters, [torch.zeros_like(p) for p in parameters], 1.0)
    for name, parameter in parts.named_parameters():
        wanted = 2.0 * (1 - 0.1 * 0.5) if parameter.dim() >= 2 else 2.0
        assert torch.equal(parameter, torch.full_like(parameter, wanted)), name


def test_groups_by_name_are_part_of_what_a_run_is_made_with() -> None:
    named = Optimizer("adamw", lr=0.1, groups="matrices")
    assert named.describe() == {"kind": "AdamW", "lr": 0.1, "groups": "matrices"}
    assert Optimizer("adamw", lr=0.1).describe() == {"kind": "AdamW", "lr": 0.1}
