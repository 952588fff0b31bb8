"""The collectives of a mesh of devices, as moves of one device's part of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.plan.execute.passage import Kind, Move

# Renamed after torch 2.11; the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Wire:
    """This device's place in a mesh, and what it exchanges with the devices along each axis."""

    def __init__(self, mesh: DeviceMesh) -> None:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self.sizes = tuple(mesh.shape)
        self.coordinate = tuple(coordinate)
        self.device = _device(mesh.device_type)
        self._groups: list[Any] = [mesh.get_group(axis) for axis in range(len(self.sizes))]

    def carry(self, tensor: Tensor, moves: Sequence[Move]) -> Tensor:
        """The part that this device holds after the moves. Not differentiable."""
        for move in moves:
            tensor = self._carry(tensor, move)
        return tensor

    def total(self, tensor: Tensor, axes: Sequence[int]) -> Tensor:
        """The sum over the devices along the mesh axes, on each of them. Not differentiable."""
        if axes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        for axis in axes:
            self._all_reduce(tensor, axis)
        return tensor

    def cut(self, tensor: Tensor, axis: int, place: int) -> Tensor:
        """This device's part along a mesh axis of a tensor that is whole along it."""
        return tensor.tensor_split(self.sizes[axis], place)[self.coordinate[axis]]

    def part(self, axes: Sequence[int]) -> tuple[int, int]:
        """Which part this device holds of what the mesh axes cut, and of how many."""
        place, parts = 0, 1
        for axis in axes:
            place, parts = place * self.sizes[axis] + self.coordinate[axis], parts * self.sizes[axis]
        return place, parts

    def _carry(self, tensor: Tensor, move: Move) -> Tensor:
        size = self.sizes[move.axis]
        if move.kind is Kind.CUT:
            return self.cut(tensor, move.axis, move.new).contiguous()
        if move.kind is Kind.ALL_REDUCE:
            return self.total(tensor, (move.axis,))
        if move.kind is Kind.REDUCE_SCATTER:
            given = _stacked(tensor, move.new, size)
            taken = torch.empty_like(given[0])
            self._reduce_scatter(taken.view(-1), given.view(-1), move.axis)
            return taken
        if tensor.dtype == torch.bool:  # not every backend sends it
            return self._carry(tensor.view(torch.uint8), move).view(torch.bool)
        if move.kind is Kind.ALL_TO_ALL:
            given = _stacked(tensor, move.new, size)
            taken = torch.empty_like(given)
            self._all_to_all(taken.view(-1), given.view(-1), move.axis)
        else:
            given = tensor.contiguous()
            taken = given.new_empty((size, *given.shape))
            self._all_gather(taken.view(-1), given.view(-1), move.axis)
        return taken.movedim(0, move.old).flatten(move.old, move.old + 1).contiguous()

    def _all_reduce(self, tensor: Tensor, axis: int) -> None:
        dist.all_reduce(tensor, group=self._groups[axis])

    def _all_gather(self, taken: Tensor, given: Tensor, axis: int) -> None:
        _all_gather(taken, given, group=self._groups[axis])

    def _reduce_scatter(self, taken: Tensor, given: Tensor, axis: int) -> None:
        _reduce_scatter(taken, given, group=self._groups[axis])

    def _all_to_all(self, taken: Tensor, given: Tensor, axis: int) -> None:
        dist.all_to_all_single(taken, given, group=self._groups[axis])


class Dry(Wire):
    """A mesh without devices, through which only shapes go."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.coordinate = (0,) * len(sizes)
        self.device = torch.device("meta")

    def _all_reduce(self, tensor: Tensor, axis: int) -> None: ...
    def _all_gather(self, taken: Tensor, given: Tensor, axis: int) -> None: ...
    def _reduce_scatter(self, taken: Tensor, given: Tensor, axis: int) -> None: ...
    def _all_to_all(self, taken: Tensor, given: Tensor, axis: int) -> None: ...


def _stacked(tensor: Tensor, place: int, size: int) -> Tensor:
    """The parts along a tensor axis, one after the other."""
    shape = tensor.shape
    parts = tensor.reshape(*shape[:place], size, shape[place] // size, *shape[place + 1 :])
    return parts.movedim(place, 0).contiguous()


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())
