"""Sends and receives between stages: one device's parts of values up, and of their gradients down.

Nothing can deadlock: sends do not wait, each stage receives in the order of its schedule, and what two stages send
each other goes in the order of micro-batches, of stages, and of values within. Values and gradients have process groups
of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.errors import PlanError
from weft.plan.runtime.stages import P2PTensor
from weft.plan.sharding import Mesh


class StageP2P:
    """Sends and receives the tensors of which one process is the source or the target."""

    def __init__(
        self, grid: ProcessGrid, device: torch.device, receives: Sequence[P2PTensor], sends: Sequence[P2PTensor]
    ) -> None:
        self.grid, self.device = grid, device
        self.receives, self.sends = tuple(receives), tuple(sends)
        self.gradients_in = tuple(each for each in self.sends if each.edge.gradient)
        self._going: list[tuple[Any, Tensor]] = []
        self._handshake()

    def receive_activations(self) -> list[Tensor]:
        """The values of the next micro-batch, from the stages before."""
        return self._receive([(each, each.edge.source) for each in self.receives], self.grid.forward)

    def send_activations(self, tensors: Sequence[Tensor]) -> None:
        self._send([(each, each.edge.target) for each in self.sends], tensors, self.grid.forward)

    def receive_gradients(self) -> list[Tensor]:
        """For each of ``gradients_in``, from the stages after."""
        return self._receive([(each, each.edge.target) for each in self.gradients_in], self.grid.backward)

    def send_gradients(self, tensors: Sequence[Tensor]) -> None:
        """For each value that was received and has one, to the stages before."""
        self._send([(e, e.edge.source) for e in self.receives if e.edge.gradient], tensors, self.grid.backward)

    def wait_for_sends(self) -> None:
        """Waits until everything has been taken."""
        for work, _ in self._going:
            work.wait()
        self._going.clear()

    def _receive(self, items: Sequence[tuple[P2PTensor, int]], group: Any) -> list[Tensor]:
        found, works = [], list[Any]()
        for item, stage in items:
            tensor = torch.empty(item.shape, dtype=item.dtype, device=self.device)
            if tensor.numel():
                works.append(dist.irecv(_plain(tensor), src=self.grid.rank(stage), group=group))
            found.append(tensor)
        for work in works:
            work.wait()
        return found

    def _send(self, items: Sequence[tuple[P2PTensor, int]], tensors: Sequence[Tensor], group: Any) -> None:
        self._going = [each for each in self._going if not each[0].is_completed()]
        for (item, stage), tensor in zip(items, tensors, strict=True):
            sent = _plain(tensor.detach().to(item.dtype).contiguous())
            if sent.numel():
                self._going.append((dist.isend(sent, dst=self.grid.rank(stage), group=group), sent))

    def _handshake(self) -> None:
        """One number each way between any two stages that talk, in one order for all: connections are made while
        nothing waits for anything else, and processes with different programs find out."""
        pairs = sorted({(each.edge.source, each.edge.target) for each in (*self.receives, *self.sends)})
        for source, target in pairs:
            both = [e for e in (*self.receives, *self.sends) if (e.edge.source, e.edge.target) == (source, target)]
            own = hashlib.blake2b(repr(both).encode(), digest_size=7).digest()
            digest = torch.tensor([int.from_bytes(own, "little")], device=self.device)
            for group, giver, taker in ((self.grid.forward, source, target), (self.grid.backward, target, source)):
                if self.grid.stage == giver:
                    dist.send(digest, dst=self.grid.rank(taker), group=group)
                    continue
                found = torch.empty_like(digest)
                dist.recv(found, src=self.grid.rank(giver), group=group)
                if not found.equal(digest):
                    raise PlanError(
                        f"stages {giver} and {taker} do not agree on what they send: their processes were given "
                        "different models, batches or plans"
                    )


def _plain(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor  # not every backend sends it


Stages = tuple[int, ...]


@dataclass(frozen=True)
class ProcessGrid:
    """Where this process stands: device ``device`` of stage ``stage``. ``ranks[stage, device]`` are all processes;
    values go up the stages in ``forward`` and gradients down in ``backward``, so that neither waits for the other;
    ``shared`` are the processes that hold the same device's part of a parameter in some stages."""

    ranks: torch.Tensor
    stage: int
    device: int
    device_mesh: DeviceMesh
    world: Any
    forward: Any
    backward: Any
    shared: dict[Stages, Any]

    @classmethod
    def of(
        cls, ranks: torch.Tensor, mesh: Mesh, kind: str, shared: Iterable[Stages], timeout: timedelta
    ) -> ProcessGrid:
        """Makes every group, for which all processes must call it alike. ``ranks`` has a row of processes for each
        stage; no operation of theirs waits longer than the timeout."""

        def group(members: Sequence[int]) -> Any:
            return dist.new_group(list(members), timeout=timeout)

        own = dist.get_rank()
        if own not in ranks:
            raise PlanError(f"process {own} is none of the plan's {ranks.numel()} processes")
        stage, device = (int(each) for each in (ranks == own).nonzero()[0])
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
            for number in range(mesh.devices):
                made = group(ranks[list(stages), number].tolist())
                if stage in stages and number == device:
                    ties[stages] = made
        names = tuple(f"axis{number}" for number in range(len(axes)))
        device_mesh = DeviceMesh.from_group(axes, kind, mesh=ranks[stage].view(mesh.sizes), mesh_dim_names=names)
        return cls(ranks, stage, device, device_mesh, world, forward, backward, ties)

    def rank(self, stage: int) -> int:
        """The process of the same device in another stage."""
        return int(self.ranks[stage, self.device])

    def first(self, stage: int) -> int:
        """The first process of a stage."""
        return int(self.ranks[stage, 0])


@contextmanager
def name_lost_peer(doing: Callable[[], object]) -> Iterator[None]:
    """Within the block a lost process is reported as such, with what was being done."""
    try:
        yield
    except RuntimeError as problem:
        signs = ("gloo", "nccl", "timed out", "timeout", "connection", "peer", "socket")
        if not isinstance(problem, dist.DistError) and not any(sign in str(problem).lower() for sign in signs):
            raise
        detail = str(problem).splitlines()[0] if str(problem) else repr(problem)
        raise PlanError(
            f"at {doing()} another process of the plan was lost, or did not answer in time ({detail}): start all of "
            "them again, or give them more time with timeout="
        ) from problem
