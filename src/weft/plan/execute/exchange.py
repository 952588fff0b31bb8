"""What goes between stages: one device's parts of values up, and of their gradients down, as plain tensors.

Nothing can deadlock: sends do not wait, each stage receives in the order of its schedule, and what two stages send
each other goes in the order of micro-batches, of stages, and of values within. Values and gradients have groups of
their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import PlanError
from weft.plan.execute.grid import Grid
from weft.plan.execute.sections import Crossing


@dataclass(frozen=True, slots=True)
class Parcel:
    """One device's part of a value that crosses from stage to stage."""

    crossing: Crossing
    shape: tuple[int, ...]
    dtype: torch.dtype


class Exchange:
    """Sends and receives the parcels of one process, of which it is the source or the target."""

    def __init__(self, grid: Grid, device: torch.device, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> None:
        self.grid, self.device = grid, device
        self.receives, self.sends = tuple(receives), tuple(sends)
        self.gradients_out = tuple(each for each in self.receives if each.crossing.gradient)
        self.gradients_in = tuple(each for each in self.sends if each.crossing.gradient)
        self._going: list[tuple[Any, Tensor]] = []
        self._greet()

    def take_values(self) -> list[Tensor]:
        """The values of the next micro-batch, from the stages before."""
        return self._take([(each, each.crossing.source) for each in self.receives], self.grid.forward)

    def give_values(self, tensors: Sequence[Tensor]) -> None:
        self._give([(each, each.crossing.target) for each in self.sends], tensors, self.grid.forward)

    def take_gradients(self) -> list[Tensor]:
        """For each of ``gradients_in``, from the stages after."""
        return self._take([(each, each.crossing.target) for each in self.gradients_in], self.grid.backward)

    def give_gradients(self, tensors: Sequence[Tensor]) -> None:
        """For each of ``gradients_out``, to the stages before."""
        self._give([(each, each.crossing.source) for each in self.gradients_out], tensors, self.grid.backward)

    def finish(self) -> None:
        """Waits until everything has been taken."""
        while self._going:
            work, _ = self._going.pop(0)
            work.wait()

    def _take(self, parcels: Sequence[tuple[Parcel, int]], group: Any) -> list[Tensor]:
        found, works = [], []
        for parcel, stage in parcels:
            tensor = torch.empty(parcel.shape, dtype=parcel.dtype, device=self.device)
            if tensor.numel():
                works.append(dist.irecv(_plain(tensor), src=self.grid.rank(stage), group=group))
            found.append(tensor)
        for work in works:
            assert work is not None
            work.wait()
        return found

    def _give(self, parcels: Sequence[tuple[Parcel, int]], tensors: Sequence[Tensor], group: Any) -> None:
        self._going = [each for each in self._going if not each[0].is_completed()]
        for (parcel, stage), tensor in zip(parcels, tensors, strict=True):
            sent = _plain(tensor.detach().to(parcel.dtype).contiguous())
            if sent.numel():
                self._going.append((dist.isend(sent, dst=self.grid.rank(stage), group=group), sent))

    def _greet(self) -> None:
        """One number each way between any two stages that talk, in one order for all: connections are made while
        nothing waits for anything else, and processes with different programs find out."""
        pairs = sorted({(each.crossing.source, each.crossing.target) for each in (*self.receives, *self.sends)})
        for source, target in pairs:
            both = [each for each in (*self.receives, *self.sends) if _ends(each) == (source, target)]
            digest = torch.tensor([_digest(both)], device=self.device)
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


def _ends(parcel: Parcel) -> tuple[int, int]:
    return parcel.crossing.source, parcel.crossing.target


def _digest(parcels: Sequence[Parcel]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parcels).encode(), digest_size=7).digest(), "little")


def _plain(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor  # not every backend sends it
