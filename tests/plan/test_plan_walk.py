"""How many files of weft a reader has to open to follow a plan from `Plan.apply` through one step."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from plan_models import on_processes
from torch import Tensor, nn

import weft
import weft.plan.runtime  # what is imported is not entered

SOURCES = str(Path(weft.__file__).parent)


def squared(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def test_a_plan_in_stages_and_micro_batches_is_followed_through_at_most_fifteen_files(tmp_path: Path) -> None:
    def layer() -> nn.Module:  # so that every kind of kernel takes part
        return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 16))

    model, batch = nn.Sequential(*(layer() for _ in range(4))), torch.randn(8, 16)
    ways: dict[str, Any] = {"stages": 2, "microbatches": 4, "recompute": True, "mesh": (1,), "compare": False}
    made = weft.plan(model, batch, "cpu", devices=2, loss=squared, **ways)

    def work(rank: int) -> None:
        files: set[str] = set()

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
                files.add(str(Path(frame.f_code.co_filename).relative_to(SOURCES)))

        torch.manual_seed(1)
        sys.setprofile(profile)
        made.apply(model).step(batch)
        sys.setprofile(None)
        assert {"plan/plan.py", "plan/runtime/module.py", "plan/runtime/p2p.py"} <= files
        assert len(files) <= 15, files

    on_processes(2, tmp_path, work)
