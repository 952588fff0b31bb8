"""What is asked of the planner: the options that a user gives, and the same once they are checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from weft.errors import PlanError, nearest
from weft.hardware.machine import Machine
from weft.hardware.machine import machine as machine_of
from weft.plan.costs import TrainingSpec
from weft.plan.graph import Graph, batch_size
from weft.utils.units import format_bytes, parse_bytes

OPTIMIZER_BYTES = {"sgd": 0.0, "momentum": 4.0, "adam": 8.0, "adamw": 8.0, "nadam": 8.0, "muon": 4.0}
"""Bytes of state that an optimizer keeps for each element of a parameter."""

_RENAMED = {
    "keep": "'constraints'",
    "gap": "'tolerance'",
    "seconds": "'time_limit'",
    "load": "weft.plan.load(path, model, batch)",
}


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of `weft.plan`; None leaves a choice to the planner.

    ``memory`` is what each device has (``"80GiB"``; by default the machine's). ``optimizer`` is one of sgd, momentum,
    adam, adamw, nadam and muon. ``dtype`` is that of matrix products (float32 by default). ``stages``,
    ``microbatches``, ``recompute`` and ``mesh`` fix what is chosen otherwise. ``constraints`` maps patterns of module
    or parameter names to the dimensions that may be split: ``{"*.wte": "replicated"}`` or ``{"lm_head": "n"}``. The
    solver may stop at a plan that is at most ``tolerance`` from the best. After ``time_limit`` seconds no further
    configuration is tried. ``compare`` adds what data parallelism, FSDP and an expert would take.
    """

    memory: str | float | None = None
    optimizer: str = "adamw"
    dtype: str | None = None
    stages: int | None = None
    microbatches: int | None = None
    recompute: bool | None = None
    mesh: tuple[int, ...] | None = None
    constraints: Mapping[str, str] | None = None
    tolerance: float = 0.01
    time_limit: float = 60.0
    compare: bool = True

    @classmethod
    def of(cls, options: PlanOptions | None, given: Mapping[str, Any]) -> PlanOptions:
        """The options with these fields in place of their own; PlanError for one that is unknown."""
        names = [each.name for each in fields(cls)]
        for name in given:
            if name in _RENAMED:
                raise PlanError(f"'{name}' is now {_RENAMED[name]}")
            if name not in names:
                raise PlanError(f"weft.plan has no option '{name}'{nearest(name, names)}")
        return replace(options or cls(), **given)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked for, beside the graph: ``memory_limit`` is bytes of a device."""

    machine: Machine
    devices: int
    memory_limit: float
    training: TrainingSpec
    options: PlanOptions

    @classmethod
    def of(cls, graph: Graph, machine: str | Path | Machine, devices: int, options: PlanOptions) -> PlanRequest:
        """The request for a graph; PlanError for what cannot be."""
        found = machine_of(machine)
        if devices < 1:
            raise PlanError(f"a plan is for at least 1 device, not {devices}")
        if found.devices is not None and devices > found.devices:
            raise PlanError(f"machine '{found.name}' has {found.devices} devices, and {devices} are asked for")
        if options.optimizer not in OPTIMIZER_BYTES:
            raise PlanError(f"unknown optimizer '{options.optimizer}'{nearest(options.optimizer, OPTIMIZER_BYTES)}")
        peaks = found.device.peak
        dtype = options.dtype or ("float32" if "float32" in peaks else next(iter(peaks)))
        if dtype not in peaks:
            raise PlanError(f"machine '{found.name}' has no peak for '{dtype}'{nearest(dtype, peaks)}")
        limit = found.device.capacity if options.memory is None else _bytes(options.memory)
        training = TrainingSpec(dtype, OPTIMIZER_BYTES[options.optimizer])
        size, stages, count, mesh = batch_size(graph), options.stages, options.microbatches, options.mesh
        if stages is not None and (stages < 1 or devices % stages):
            raise PlanError(f"{devices} devices cannot be {stages} equal stages")
        if count is not None and (count < 1 or (size and size % count)):
            raise PlanError(f"a batch of {size} is not {count} equal micro-batches")
        if mesh is not None and math.prod(mesh) * (stages or 1) != devices:
            raise PlanError(f"a mesh of {'x'.join(map(str, mesh))} in {stages or 1} stages is not {devices} devices")
        return cls(found, devices, limit, training, options)


def _bytes(memory: str | float) -> float:
    """The memory that a user gave; text without a unit that is hardly meant in bytes is refused."""
    found = parse_bytes(memory, PlanError)
    if isinstance(memory, str) and memory.strip()[-1:].isdigit() and found < 2**20:
        raise PlanError(f"a memory of '{memory}' is {format_bytes(found)}: say {memory.strip()}GiB?")
    return found
