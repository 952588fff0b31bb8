"""How many files of weft a reader has to open to follow a plan from `Plan.apply` through one step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import start_processes

import weft
import weft.plan.runtime  # what is imported is not entered
from weft.plan.planner import plan

SOURCES = str(Path(weft.__file__).parent)


class Net(nn.Module):
    """Layers with dropout and batch normalisation, so that every kind of kernel takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 16))
                for _ in range(4)
            )
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


@contextmanager
def entered() -> Iterator[set[str]]:
    """The files of weft whose functions are called."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            found.add(str(Path(frame.f_code.co_filename).relative_to(SOURCES)))

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_a_plan_in_stages_and_micro_batches_is_followed_through_at_most_fifteen_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(8, 16), torch.randn(8, 16))
    made = plan(model, batch, "cpu", devices=2, stages=2, microbatches=4, recompute=True, mesh=(1,), compare=False)
    start_processes(_walk, (made, model, batch, tmp_path), nprocs=2, start_method="fork")
    for rank in range(2):
        files = (tmp_path / f"files{rank}").read_text().split()
        assert {"plan/plan.py", "plan/runtime/module.py", "plan/runtime/p2p.py"} <= set(files)
        assert len(files) <= 15, files


def _walk(rank: int, made: Any, model: nn.Module, batch: Any, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    try:
        with entered() as files:
            made.apply(model).step(batch)
        (folder / f"files{rank}").write_text("\n".join(sorted(files)))
    finally:
        dist.destroy_process_group()
