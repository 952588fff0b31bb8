"""weft.plan: from a model, a batch and a machine to the fastest plan that fits."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import PlanError, nearest
from weft.hardware.machine import Machine
from weft.hardware.machine import machine as machine_of
from weft.plan.batches import microbatch
from weft.plan.candidate import SECONDS, Candidate, Shape, Slower, least_memory, least_of_stage, priced, solved
from weft.plan.comparison import compared
from weft.plan.graph import Graph
from weft.plan.keeping import keeping
from weft.plan.layout import Mesh
from weft.plan.plan import Plan
from weft.plan.request import STATES, Request, check
from weft.plan.rivals import decided
from weft.plan.saved import checked, read_plan, read_splits
from weft.plan.shapes import shapes
from weft.plan.solve import OverLimit
from weft.plan.tables import Allowed, Training, tables
from weft.utils.units import format_bytes, parse_bytes

_TRYING = 0.75  # the part of the time in which ways are tried; the rest is for those of several stages
_EACH = 1.5  # seconds for one way of several stages, which may become better yet

if TYPE_CHECKING:
    from torch import nn

    from weft.plan.capture import Captured


def plan(
    model: nn.Module,
    batch: Any,
    machine: str | Path | Machine = "h100",
    *,
    devices: int,
    memory: str | float | None = None,
    loss: Any = None,
    optimizer: str = "adamw",
    dtype: str | None = None,
    stages: int | None = None,
    microbatches: int | None = None,
    recompute: bool | None = None,
    mesh: tuple[int, ...] | None = None,
    keep: Mapping[str, str] | None = None,
    overlap: float = 0.0,
    load: str | Path | Mapping[str, Any] | None = None,
    compare: bool = True,
    gap: float = 0.01,
    seconds: float = 60.0,
) -> Plan:
    """The fastest way to train the model with this batch on so many devices, as far as the machine's figures tell.

    ``batch`` is a tensor, a tuple or a mapping, as the model takes it; nothing is computed, so model and batch may be
    on the meta device. ``loss(output, batch)`` makes the loss part of the plan. ``memory`` is what each device has
    (``"80GiB"``; the machine's by default), ``dtype`` that of matrix products (float32 by default). ``stages``,
    ``microbatches``, ``recompute`` and ``mesh`` settle what is chosen otherwise. ``keep`` maps patterns of module or
    parameter names to the dimensions that may be split: ``{"*.wte": "replicated"}`` or ``{"lm_head": "n"}``. ``load``
    reads a plan that was saved, or takes what ``to_json`` gave, perhaps edited, and prices it anew. Where fewer devices
    are faster, since nothing can be divided among all, ``Plan.idle`` says how many are not used. After ``seconds``
    no further way to use the devices is tried; ``Plan.untried`` says how many might have been better.

    Raises PlanError where nothing fits, by how much, and with what would.
    """
    from weft.plan.capture import capture

    captured = capture(model, batch, loss=loss)
    return plan_captured(
        captured,
        machine,
        devices=devices,
        memory=memory,
        optimizer=optimizer,
        dtype=dtype,
        stages=stages,
        microbatches=microbatches,
        recompute=recompute,
        mesh=mesh,
        keep=keep,
        overlap=overlap,
        load=load,
        compare=compare,
        gap=gap,
        seconds=seconds,
    )


def plan_captured(
    captured: Captured,
    machine: str | Path | Machine = "h100",
    *,
    devices: int,
    memory: str | float | None = None,
    optimizer: str = "adamw",
    dtype: str | None = None,
    overlap: float = 0.0,
    load: str | Path | Mapping[str, Any] | None = None,
    compare: bool = True,
    keep: Mapping[str, str] | None = None,
    **choices: Any,
) -> Plan:
    """``plan`` for a model that is captured already."""
    computer = machine if isinstance(machine, Machine) else machine_of(machine)
    if devices < 1:
        raise PlanError(f"a plan is for at least 1 device, not {devices}")
    if computer.devices is not None and devices > computer.devices:
        raise PlanError(f"machine '{computer.name}' has {computer.devices} devices, and {devices} are asked for")
    if optimizer not in STATES:
        raise PlanError(f"unknown optimizer '{optimizer}'{nearest(optimizer, STATES)}")
    if not 0 <= overlap <= 1:
        raise PlanError(f"overlap is a part from 0 to 1, not {overlap}")
    kind = dtype or ("float32" if "float32" in computer.device.peak else next(iter(computer.device.peak)))
    if kind not in computer.device.peak:
        known = computer.device.peak
        raise PlanError(f"machine '{computer.name}' has no peak for '{kind}'{nearest(kind, known)}")
    limit = computer.device.capacity if memory is None else _bytes(memory)
    training = Training(kind, STATES[optimizer], overlap)
    request = Request(computer, devices, limit, training, keep=tuple((keep or {}).items()), **choices)
    check(captured.graph, request)
    best, untried = (_loaded(captured.graph, request, load), 0) if load else _best(captured.graph, request)
    used = best.shape.stages * best.shape.mesh.devices
    rows = tuple(compared(captured.graph, replace(request, devices=used))) if compare else ()
    return Plan(
        model=captured.graph.name,
        machine=computer.name,
        devices=used,
        idle=devices - used,
        graph=best.shape.graph,
        mesh=best.shape.mesh,
        splits=tuple(s[k] for s, k in zip(best.tables.splits, best.pick, strict=True)),
        stage=best.cutting.stage,
        microbatches=best.shape.training.microbatches,
        recompute=best.shape.training.recompute,
        cost=best.cost,
        limit=limit,
        training=best.shape.training,
        rows=rows,
        untried=untried,
        within=None if load else request.gap,
        captured=captured,
        computer=computer,
    )


def _bytes(memory: str | float) -> float:
    """The memory that a user said; text without a unit that is hardly meant in bytes is refused."""
    found = parse_bytes(memory, PlanError)
    if isinstance(memory, str) and memory.strip()[-1:].isdigit() and found < 2**20:
        raise PlanError(f"a memory of '{memory}' is {format_bytes(found)}: say {memory.strip()}GiB?")
    return found


def _best(graph: Graph, request: Request) -> tuple[Candidate, int]:
    """The fastest candidate, and how many ways were left untried when the time was up."""
    best: Candidate | None = None
    rivals: list[Candidate] = []  # of several stages: they may become faster yet
    singles: list[Candidate] = []
    rule, started = keeping(graph, request.keep), time.monotonic()
    deadline = started + request.seconds
    roomy: set[tuple[int, Mesh, int]] = set()  # ways that more memory would not make faster
    untried = 0
    for least, shape in shapes(graph, request):
        beat = math.inf if best is None else best.cost.step
        way = (shape.stages, shape.mesh, shape.training.microbatches)
        if least >= beat or (best is not None and _needless(shape, best)):
            continue
        if shape.training.recompute and way in roomy:
            continue  # it saves memory alone
        if best is not None and time.monotonic() > started + _TRYING * request.seconds:
            untried += 1
            continue
        seconds = SECONDS if shape.stages == 1 else _EACH
        try:
            found = solved(shape, request.machine, request.limit, rule, request.gap, beat, seconds)
        except Slower as slower:
            roomy |= {way} if slower.always else set()
        except OverLimit:
            pass
        else:
            best = found if found.cost.step < beat else best
            (rivals if shape.stages > 1 else singles).append(found)
            roomy |= set() if found.pressed else {way}
    if best is None:
        raise PlanError(_nothing_fits(graph, request))
    best = _proven(best, request, rule, deadline - time.monotonic())
    best, open_still = decided(best, rivals, request, deadline)
    near = best.cost.step / (1 + request.gap)
    loose = sum(each.shape is not best.shape and each.cost.bound < near for each in singles)
    return best, untried + open_still + loose


def _proven(best: Candidate, request: Request, rule: Allowed | None, seconds: float) -> Candidate:
    """The candidate again with the time that is left, where a single stage was not solved to the gap in its own."""
    if best.shape.stages > 1 or best.cost.step <= best.cost.bound * (1 + request.gap) or seconds <= SECONDS:
        return best
    again = solved(best.shape, request.machine, request.limit, rule, request.gap, seconds=seconds)
    bound = max(best.cost.bound, again.cost.bound)
    better = again if again.cost.step < best.cost.step else best
    return replace(better, cost=replace(better.cost, bound=bound))


def _needless(shape: Shape, best: Candidate) -> bool:
    """Whether the shape saves memory, in more parts of a batch or by recomputing, where one stage need not save any."""
    if best.pressed or shape.stages > 1 or best.shape.stages > 1:
        return False
    other = best.shape.training
    return shape.training.microbatches > other.microbatches or (shape.training.recompute and not other.recompute)


def _loaded(graph: Graph, request: Request, path: str | Path | Mapping[str, Any]) -> Candidate:
    found = checked(path) if isinstance(path, Mapping) else read_plan(path)
    if found["devices"] + found.get("idle", 0) != request.devices:
        raise PlanError(f"the plan is for {found['devices']} devices, and {request.devices} are asked for")
    mesh, count = Mesh(tuple(found["mesh"])), int(found["microbatches"])
    stages = int(found["devices"]) // mesh.devices
    training = replace(request.training, recompute=bool(found["recompute"]), microbatches=count)
    shape = Shape(microbatch(graph, count), mesh, stages, training)
    made = tables(shape.graph, mesh, request.machine, training, stages=stages)
    wanted = read_splits(shape.graph, mesh, found["splits"])
    pick = tuple(own.index(split) for own, split in zip(made.splits, wanted, strict=True))
    return priced(shape, request.machine, made, pick, math.inf)


def _nothing_fits(graph: Graph, request: Request) -> str:
    """By how much nothing fits, and what would."""
    ways = shapes(graph, request)
    least = min((least_of_stage(shape) for _, shape in ways), default=math.inf)
    message = (
        f"no plan fits on {request.devices} devices of {format_bytes(request.limit)}: each needs at least "
        f"{format_bytes(least)}"
    )
    message += ", and no cut into stages is so even. " if least <= request.limit else ". "
    # What needs least: recomputing, in the smallest micro-batches.
    pieces = request.microbatches or max((p.training.microbatches for _, p in ways if p.stages == 1), default=1)
    thrifty = replace(request, recompute=request.recompute is not False, microbatches=pieces)
    for devices in (request.devices * 2**k for k in range(1, 8)):
        more = replace(thrifty, devices=devices, stages=1, mesh=None)
        needed = min((least_memory(shape) for _, shape in shapes(graph, more)), default=math.inf)
        if needed <= request.limit:
            return f"{message}On {devices} devices {format_bytes(needed)} would do; else use a smaller batch or model."
    return f"{message}More devices will not help: use a smaller batch or model."
