"""What is asked of the planner, and whether it can be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.errors import PlanError
from weft.hardware.machine import Machine
from weft.plan.batches import batch_size
from weft.plan.graph import Graph
from weft.plan.tables import Training

STATES = {"sgd": 0.0, "momentum": 4.0, "adam": 8.0, "adamw": 8.0, "nadam": 8.0, "muon": 4.0}


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, beside the graph; None leaves a choice to the planner."""

    machine: Machine
    devices: int
    limit: float
    training: Training
    stages: int | None = None
    microbatches: int | None = None
    recompute: bool | None = None
    mesh: tuple[int, ...] | None = None
    keep: tuple[tuple[str, str], ...] = ()
    gap: float = 0.01
    seconds: float = 60.0


def check(graph: Graph, request: Request) -> None:
    size, count = batch_size(graph), request.microbatches
    if request.stages is not None and (request.stages < 1 or request.devices % request.stages):
        raise PlanError(f"{request.devices} devices cannot be {request.stages} equal stages")
    if count is not None and (count < 1 or (size and size % count)):
        raise PlanError(f"a batch of {size} is not {count} equal micro-batches")
    if request.mesh is not None and math.prod(request.mesh) * (request.stages or 1) != request.devices:
        raise PlanError(
            f"a mesh of {'x'.join(map(str, request.mesh))} in {request.stages or 1} stages is not "
            f"{request.devices} devices"
        )
