"""Redistribution of tensors over a mesh: the collectives from placements to others, with their gradients.

``redistribution_steps`` says which collectives lead from placements to others, ``MeshCollectives`` runs them, and
``redistribute`` makes them differentiable. ``ReshardAfterForward`` frees gathered parameters until the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from weft.plan.sharding import PARTIAL, REPLICATED, Mesh, Placements


class Collective(StrEnum):
    """What a step does, from the one that makes later steps cheapest to the one that makes them most expensive."""

    CUT = "cut"  # whole -> cut: each keeps its part, nothing is sent
    REDUCE_SCATTER = "reduce_scatter"  # partial sums -> cut
    ALL_REDUCE = "all_reduce"  # partial sums -> whole
    ALL_TO_ALL = "all_to_all"  # cut along one tensor axis -> cut along another
    ALL_GATHER = "all_gather"  # cut -> whole


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """One collective among the devices along one mesh axis; ``old`` and ``new`` are placements."""

    kind: Collective
    axis: int
    old: int
    new: int


CollectiveSteps = tuple[CollectiveStep, ...]


def redistribution_steps(held: Placements, wanted: Placements, mesh: Mesh) -> CollectiveSteps:
    """The steps from placements to others that are not partial.

    A tensor axis that several mesh axes cut is cut by the outer one first, so an inner cut can be made or undone only
    while the outer ones are as they will be, or stay as they are.

    >>> [str(step.kind) for step in redistribution_steps((PARTIAL, 0), (0, REPLICATED), Mesh((2, 2)))]
    ['all_gather', 'reduce_scatter']
    """
    current, steps = list(held), []
    while tuple(current) != wanted:
        step = next(
            step for kind in Collective for axis in range(len(current)) if (step := _legal(kind, axis, current, wanted))
        )
        current[step.axis] = step.new
        if mesh.sizes[step.axis] > 1:
            steps.append(step)
    return tuple(steps)


def _legal(kind: Collective, axis: int, current: list[int], wanted: Placements) -> CollectiveStep | None:
    """The step of this kind along this mesh axis, where it can be made now and brings the placements nearer."""
    old, new = current[axis], wanted[axis]

    def outer_axes_done(tensor_axis: int) -> bool:
        """The outer mesh axes cut this tensor axis as they shall in the end."""
        return all((current[outer] == tensor_axis) == (wanted[outer] == tensor_axis) for outer in range(axis))

    def innermost(tensor_axis: int) -> bool:
        return tensor_axis not in current[axis + 1 :]

    can_cut = new >= 0 and outer_axes_done(new) and innermost(new)
    cut_inside = old >= 0 and innermost(old)
    fits = {
        Collective.CUT: old == REPLICATED and can_cut,
        Collective.REDUCE_SCATTER: old == PARTIAL and can_cut,
        Collective.ALL_REDUCE: old == PARTIAL and new == REPLICATED,
        Collective.ALL_TO_ALL: cut_inside and old != new and can_cut,
        Collective.ALL_GATHER: cut_inside and (old != new or not outer_axes_done(old)),
    }
    after = REPLICATED if kind is Collective.ALL_GATHER else new
    return CollectiveStep(kind, axis, old, after) if fits[kind] else None


# Renamed after torch 2.11; the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class MeshCollectives:
    """This device's coordinate in a mesh, and what it exchanges with the devices along each axis."""

    def __init__(self, mesh: DeviceMesh) -> None:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self.sizes = tuple(mesh.shape)
        self.coordinate = tuple(coordinate)
        self.device = torch.device(mesh.device_type)
        if self.device.type != "cpu":
            self.device = torch.device(self.device.type, torch.get_device_module(self.device).current_device())
        self._groups: list[Any] = [mesh.get_group(axis) for axis in range(len(self.sizes))]

    def move(self, tensor: Tensor, steps: Sequence[CollectiveStep]) -> Tensor:
        """The part that this device holds after the steps. Not differentiable."""
        for step in steps:
            tensor = self._move(tensor, step)
        return tensor

    def all_reduce(self, tensor: Tensor, axes: Sequence[int]) -> Tensor:
        """The sum over the devices along the mesh axes, on each of them. Not differentiable."""
        if axes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        for axis in axes:
            self._run(Collective.ALL_REDUCE, tensor, tensor, axis)
        return tensor

    def shard(self, tensor: Tensor, axis: int, tensor_axis: int) -> Tensor:
        """This device's part along a mesh axis of a tensor that is whole along it."""
        return tensor.tensor_split(self.sizes[axis], tensor_axis)[self.coordinate[axis]]

    def _move(self, tensor: Tensor, step: CollectiveStep) -> Tensor:
        size = self.sizes[step.axis]
        if step.kind is Collective.CUT:
            return self.shard(tensor, step.axis, step.new).contiguous()
        if step.kind is Collective.ALL_REDUCE:
            return self.all_reduce(tensor, (step.axis,))
        if tensor.dtype == torch.bool:  # not every backend sends it
            return self._move(tensor.view(torch.uint8), step).view(torch.bool)
        if step.kind is Collective.ALL_GATHER:
            given = tensor.contiguous()
            taken = given.new_empty((size, *given.shape))
        else:
            given = _stacked(tensor, step.new, size)
            taken = torch.empty_like(given[0] if step.kind is Collective.REDUCE_SCATTER else given)
        self._run(step.kind, taken.view(-1), given.view(-1), step.axis)
        if step.kind is Collective.REDUCE_SCATTER:
            return taken
        return taken.movedim(0, step.old).flatten(step.old, step.old + 1).contiguous()

    def _run(self, kind: Collective, taken: Tensor, given: Tensor, axis: int) -> None:
        group = self._groups[axis]
        if kind is Collective.ALL_REDUCE:  # in place
            dist.all_reduce(taken, group=group)
        elif kind is Collective.ALL_TO_ALL:
            dist.all_to_all_single(taken, given, group=group)
        else:
            (_all_gather if kind is Collective.ALL_GATHER else _reduce_scatter)(taken, given, group=group)


class ShapeOnlyCollectives(MeshCollectives):
    """A mesh without devices, through which only shapes go."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.coordinate = (0,) * len(sizes)
        self.device = torch.device("meta")

    def _run(self, kind: Collective, taken: Tensor, given: Tensor, axis: int) -> None: ...


def _stacked(tensor: Tensor, axis: int, size: int) -> Tensor:
    """The parts along a tensor axis, one after the other."""
    shape = tensor.shape
    parts = tensor.reshape(*shape[:axis], size, shape[axis] // size, *shape[axis + 1 :])
    return parts.movedim(axis, 0).contiguous()


def redistribute(
    tensor: Tensor, collectives: MeshCollectives, steps: CollectiveSteps, grad_steps: Sequence[CollectiveSteps]
) -> tuple[Tensor, ...]:
    """The tensor after the steps, once for each of ``grad_steps``.

    Readers that want the same placements may leave gradients of different ones: whole, or as partial sums. Each of
    ``grad_steps`` brings one of them to the placements of the tensor itself, where they are added.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()) or not (steps or any(grad_steps)):
        return (collectives.move(tensor, steps),) * len(grad_steps)
    outcome: tuple[Tensor, ...] = _Redistribute.apply(tensor, collectives, steps, tuple(grad_steps))  # type: ignore[no-untyped-call]
    return outcome


def all_reduce(tensor: Tensor, collectives: MeshCollectives, axes: Sequence[int]) -> Tensor:
    """The sum over the devices along the mesh axes, on each of them; each of them uses it for its own part."""
    steps = tuple(CollectiveStep(Collective.ALL_REDUCE, axis, PARTIAL, REPLICATED) for axis in axes)
    # Each device's gradient says how its own part of the result depends on the sum: they are summed alike.
    return redistribute(tensor, collectives, steps, (steps,))[0]


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        collectives: MeshCollectives,
        steps: CollectiveSteps,
        grad_steps: tuple[CollectiveSteps, ...],
    ) -> tuple[Tensor, ...]:
        ctx.collectives, ctx.grad_steps = collectives, grad_steps
        ctx.set_materialize_grads(False)
        moved = collectives.move(tensor, steps)
        return tuple(moved.view_as(moved) for _ in grad_steps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        total = None
        for gradient, steps in zip(gradients, ctx.grad_steps, strict=True):
            if gradient is not None:
                gradient = ctx.collectives.move(gradient, steps)
                total = gradient if total is None else total + gradient
        return total, None, None, None


class ReshardAfterForward:
    """Frees gathered parameters after their last use in a forward, as FSDP does; the backward gathers them again.

    It knows which gathered parameters are alive. Where autograd would keep one of them, or a view of it, for the
    backward, this device's part is kept instead.
    """

    def __init__(self, collectives: MeshCollectives) -> None:
        self._collectives = collectives
        self._alive: dict[int, tuple[Tensor, CollectiveSteps, torch.dtype]] = {}  # by the address of what was gathered

    def hooks(self) -> AbstractContextManager[Any]:
        """The context in which the forward runs."""
        return torch.autograd.graph.saved_tensors_hooks(
            self._pack, lambda kept: kept if isinstance(kept, Tensor) else kept()
        )

    def gathered(self, whole: Tensor, part: Tensor, steps: CollectiveSteps) -> None:
        """``whole`` was gathered from ``part``. It counts as alive until its memory is freed."""
        storage = whole.untyped_storage()
        address = storage.data_ptr()
        self._alive[address] = (part.detach(), steps, whole.dtype)
        weakref.finalize(storage, self._alive.pop, address, None).atexit = False

    def _pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        found = self._alive.get(tensor.untyped_storage().data_ptr()) if self._alive else None
        if found is None or found[2] != tensor.dtype:
            return tensor
        part, steps, _ = found
        view = tensor.shape, tensor.stride(), tensor.storage_offset()  # of what is gathered again
        return lambda: self._collectives.move(part, steps).as_strided(*view)
