"""The processes of a plan in stages: which stage and device each one is, and the groups in which they talk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.errors import PlanError
from weft.plan.layout import Mesh

Stages = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """This process's place. ``ranks[stage, device]`` are all processes; values go up the stages in ``forward`` and
    gradients down in ``backward``, so that neither waits for the other; ``shared`` are the processes that hold the same
    device's part of a parameter in some stages."""

    ranks: torch.Tensor
    stage: int
    place: int
    device_mesh: DeviceMesh
    world: Any
    forward: Any
    backward: Any
    shared: dict[Stages, Any]

    @classmethod
    def of(cls, ranks: torch.Tensor, mesh: Mesh, kind: str, shared: Iterable[Stages], timeout: timedelta) -> Grid:
        """Makes every group, for which all processes must call it alike. ``ranks`` has a row of processes for each
        stage; no operation of theirs waits longer than the timeout."""

        def group(members: Sequence[int]) -> Any:
            return dist.new_group(list(members), timeout=timeout)

        own = dist.get_rank()
        if own not in ranks:
            raise PlanError(f"process {own} is none of the plan's {ranks.numel()} processes")
        stage, place = (int(each) for each in (ranks == own).nonzero()[0])
        everyone = ranks.flatten().tolist()
        world, forward, backward = (group(everyone) for _ in range(3))
        axes: list[Any] = [None] * len(mesh.sizes)
        for row in ranks:
            devices = row.view(mesh.sizes)
            for axis, size in enumerate(mesh.sizes):
                for line in devices.movedim(axis, -1).reshape(-1, size).tolist():
                    made = group(line)
                    axes[axis] = made if own in line else axes[axis]
        ties: dict[Stages, Any] = {}
        for stages in sorted(set(shared)):
            for device in range(mesh.devices):
                made = group(ranks[list(stages), device].tolist())
                if stage in stages and device == place:
                    ties[stages] = made
        return cls(
            ranks, stage, place, _mesh(axes, kind, ranks[stage].view(mesh.sizes)), world, forward, backward, ties
        )

    def rank(self, stage: int) -> int:
        """The process with this one's place in another stage."""
        return int(self.ranks[stage, self.place])

    def first(self, stage: int) -> int:
        """The first process of a stage."""
        return int(self.ranks[stage, 0])


def _mesh(groups: list[Any], kind: str, ranks: torch.Tensor) -> DeviceMesh:
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], kind)
    names = tuple(f"axis{number}" for number in range(len(groups)))
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)


@contextmanager
def patience(doing: Callable[[], object]) -> Iterator[None]:
    """Within the block a lost process is told as such, with what was being done."""
    try:
        yield
    except RuntimeError as problem:
        if not _is_lost(problem):
            raise
        told = str(problem).splitlines()[0] if str(problem) else repr(problem)
        raise PlanError(
            f"at {doing()} another process of the plan was lost, or did not answer in time ({told}): start all of them "
            "again, or give them more time with timeout="
        ) from problem


def _is_lost(problem: RuntimeError) -> bool:
    """Whether an error means that another process is gone, or has not answered in time."""
    if isinstance(problem, dist.DistError):
        return True
    signs = ("gloo", "nccl", "timed out", "timeout", "connection", "peer", "socket")
    return any(sign in str(problem).lower() for sign in signs)
