"""The ways to use so many devices (stages, meshes, micro-batches, recomputing), the most promising first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from weft.hardware.machine import Machine
from weft.plan.batches import batch_size, microbatch
from weft.plan.candidate import Shape, launches
from weft.plan.graph import PARAMETER, Graph
from weft.plan.layout import Mesh
from weft.plan.redistribution import meshes
from weft.plan.request import Request

_MANY = 16  # beyond so many devices in a stage meshes have two axes at most


def shapes(graph: Graph, request: Request) -> list[tuple[float, Shape]]:
    """Every way that was not ruled out, each with seconds that no plan of it is below, the most promising first."""
    small = lru_cache(maxsize=None)(lambda count: microbatch(graph, count))
    found = []
    for stages, mesh, count, recompute in _ways(graph, request):
        training = replace(request.training, recompute=recompute, microbatches=count)
        shape = Shape(small(count), mesh, stages, training)
        found.append((floor(shape, request.machine), shape))

    def promise(one: tuple[float, Shape]) -> tuple[float, int, int, int]:
        least, shape = one
        likely = least + _exchange(shape, request.machine)
        # Among equals the simplest: few stages, few micro-batches, few axes.
        return likely, shape.stages, shape.training.microbatches, len(shape.mesh.sizes)

    return sorted(found, key=promise)


def _exchange(shape: Shape, machine: Machine) -> float:
    """Seconds that the gradients of all parameters take among the devices of their stage, if they are exchanged."""
    count, sizes = shape.mesh.devices, (shape.stages, *shape.mesh.sizes)
    if count == 1:
        return 0.0
    slowest = min(machine.axis_link(sizes, axis)[0] for axis in range(1, len(sizes)) if sizes[axis] > 1)
    size = sum(o.outputs[0].bytes for o in shape.graph.operators if o.kind == PARAMETER)
    return 2 * size * (count - 1) / count / shape.stages / slowest


def _ways(graph: Graph, request: Request) -> Iterator[tuple[int, Mesh, int, bool]]:
    size = batch_size(graph)
    again = [False, True] if request.recompute is None else [request.recompute]
    settled = bool(request.stages or request.mesh)
    counts = [request.devices] if settled else _counts(graph, request.devices)
    for stages, share in ((stages, n // stages) for n in counts for stages in _divisors(n)):
        if request.stages not in (None, stages):
            continue
        if request.mesh is not None:
            grids = [Mesh(request.mesh)] if math.prod(request.mesh) == share else []
        else:
            grids = meshes(share, 3 if share <= _MANY else 2)
        for count in [request.microbatches] if request.microbatches else _pieces(size, stages):
            for mesh in grids:
                for recompute in again:
                    yield stages, mesh, count, recompute


def _counts(graph: Graph, devices: int) -> list[int]:
    """How many devices are worth using: all; the most that most of the work can be divided among, which a batch of 48
    cannot among 7; and the largest power of two, which suits most dimensions."""
    work: dict[int, float] = {}
    for operator in graph.operators:
        parts = math.prod(dim.parts for dim in operator.dims)
        work[parts] = work.get(parts, 0.0) + operator.flops
    half = sum(work.values()) / 2
    divided = next(
        (n for n in range(devices, 0, -1) if sum(flops for parts, flops in work.items() if parts % n == 0) >= half), 1
    )
    return sorted({devices, divided, 2 ** (devices.bit_length() - 1)}, reverse=True)


def _pieces(size: int, stages: int) -> list[int]:
    """How many micro-batches are worth trying: on several stages about one to eight for each."""
    if stages == 1:
        return [count for count in (1, 2, 4, 8, 16) if count == 1 or (size and size % count == 0)]
    whole = _divisors(size) or [1]
    return sorted({max(count for count in whole if count <= times * stages) for times in (1, 2, 4, 8)}, reverse=True)


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def floor(shape: Shape, machine: Machine) -> float:
    """Seconds that no plan of the shape is below: every operator split over all devices of its stage, nothing sent,
    and stages that are equal; or the hosts start kernels all the time."""
    training, share = shape.training, shape.mesh.devices
    own = [o for o in shape.graph.operators if o.kind != PARAMETER]
    flops = np.array([o.flops for o in own]) / share
    moved = np.array([o.moved * (training.width(o.outputs[0]) if o.outputs else 1.0) for o in own])
    back = np.array([o.backward if any(t.gradient for t in o.outputs) else 0.0 for o in own])
    forward = machine.compute_seconds(flops, moved / share, training.dtype)
    backward = machine.compute_seconds(back * flops, back * moved / share, training.dtype)
    again = np.where(back > 0, 2.0 if training.recompute else 1.0, 1.0)
    once = float((again * forward + backward).sum())
    total = max(once * training.microbatches, launches(shape, machine))
    return total / training.microbatches * (training.microbatches + shape.stages - 1) / shape.stages
