"""weft.plan: from a model, a batch and a machine to the fastest plan that fits."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import PlanError, nearest
from weft.hardware.machine import Machine
from weft.hardware.machine import machine as machine_of
from weft.plan.baselines import compare_with_others
from weft.plan.configurations import (
    SECONDS,
    NotFaster,
    ParallelConfig,
    SolvedConfig,
    least_of_stage,
    lightest_memory,
    parallel_configs,
    price_assignment,
    solve_config,
    solve_stages,
)
from weft.plan.costs import SplitFilter, TrainingSpec, tables
from weft.plan.graph import Graph, microbatch
from weft.plan.options import PlanOptions, PlanRequest
from weft.plan.plan import Plan
from weft.plan.saved import SavedPlan, read_plan, read_splits
from weft.plan.sharding import REPLICATED, Mesh, OpSplit
from weft.plan.solver import OverLimit
from weft.utils.units import format_bytes

_TRYING = 0.75  # the part of the time in which configurations are tried; the rest is for solving them better
_EACH = 1.5  # seconds for one configuration of several stages
_FINALISTS = 8  # the most configurations of several stages whose stages are solved again

if TYPE_CHECKING:
    from torch import nn

    from weft.plan.capture import CapturedModel


def plan(
    model: nn.Module,
    batch: Any,
    machine: str | Path | Machine = "h100",
    *,
    devices: int,
    loss: Any = None,
    options: PlanOptions | None = None,
    **fields: Any,
) -> Plan:
    """The fastest way to train the model with this batch on so many devices, as far as the machine's figures tell.

    ``batch`` is a tensor, a tuple or a mapping, as the model takes it; nothing is computed, so model and batch may be
    on the meta device. ``loss(output, batch)`` makes the loss part of the plan. ``fields`` are those of `PlanOptions`,
    and go before those of ``options``. Where fewer devices are faster, since nothing can be divided among all,
    ``Plan.unused_devices`` says how many are left. ``Plan.untried_configs`` says how many configurations might have
    been better when the time was up.

    Raises PlanError where nothing fits, by how much, and with what would.
    """
    from weft.plan.capture import capture

    chosen = PlanOptions.of(options, fields)
    return plan_captured(capture(model, batch, loss=loss), machine, devices=devices, options=chosen)


def plan_captured(
    captured: CapturedModel,
    machine: str | Path | Machine = "h100",
    *,
    devices: int,
    options: PlanOptions | None = None,
    **fields: Any,
) -> Plan:
    """``plan`` for a model that is captured already."""
    request = PlanRequest.of(captured.graph, machine, devices, PlanOptions.of(options, fields))
    best, untried = _search(captured.graph, request)
    return _plan_of(captured, request, best, untried)


def load(
    source: str | Path | Mapping[str, Any],
    model: nn.Module,
    batch: Any,
    loss: Any = None,
    *,
    machine: str | Path | Machine | None = None,
    compare: bool = True,
) -> Plan:
    """A saved plan, bound to the model again and priced anew.

    ``source`` is a file that ``Plan.save`` wrote, or what ``Plan.to_json`` gave; its splits may be edited by hand.
    ``batch`` and ``loss`` are as for `plan`. ``machine`` is the one that the plan was made for, if it is not given.
    Raises PlanError where the plan is not one of this model.
    """
    from weft.plan.capture import capture

    return load_captured(source, capture(model, batch, loss=loss), machine=machine, compare=compare)


def load_captured(
    source: str | Path | Mapping[str, Any],
    captured: CapturedModel,
    *,
    machine: str | Path | Machine | None = None,
    compare: bool = True,
) -> Plan:
    """``load`` for a model that is captured already."""
    saved = SavedPlan.of(source if isinstance(source, Mapping) else read_plan(source))
    own = Machine.from_json(saved.machine_spec) if saved.machine_spec else saved.machine
    found = machine_of(own if machine is None else machine)
    training = TrainingSpec(**(saved.training or {}))
    limit = found.device.capacity if saved.limit is None else saved.limit
    request = PlanRequest(found, saved.devices + saved.idle, limit, training, PlanOptions(compare=compare))
    training = replace(training, recompute=saved.recompute, microbatches=saved.microbatches)
    mesh = Mesh(tuple(saved.mesh))
    config = ParallelConfig(
        microbatch(captured.graph, saved.microbatches), mesh, saved.devices // mesh.devices, training
    )
    made = tables(config.graph, mesh, found, training, stages=config.stages)
    wanted = read_splits(config.graph, mesh, saved.splits)
    assignment = tuple(own.index(split) for own, split in zip(made.splits, wanted, strict=True))
    return _plan_of(captured, request, price_assignment(config, found, made, assignment, math.inf), 0)


def _plan_of(captured: CapturedModel, request: PlanRequest, best: SolvedConfig, untried: int) -> Plan:
    from weft.plan.runtime import capture_microbatch

    used = best.config.stages * best.config.mesh.devices
    microbatches = best.config.training.microbatches
    program, problem = None, ""
    try:
        program = captured if microbatches == 1 else capture_microbatch(captured, microbatches)
    except PlanError as error:
        problem = f"a micro-batch of the plan cannot be run: {error}"
    compared = request.options.compare
    rows = tuple(compare_with_others(captured.graph, replace(request, devices=used))) if compared else ()
    return Plan(
        model=captured.graph.name,
        machine=request.machine.name,
        devices=used,
        unused_devices=request.devices - used,
        graph=best.config.graph,
        mesh=best.config.mesh,
        splits=best.tables.chosen(best.assignment),
        stage=best.stage_cut.stage,
        microbatches=microbatches,
        recompute=best.config.training.recompute,
        cost=best.cost,
        memory_limit=request.memory_limit,
        training=best.config.training,
        comparisons=rows,
        untried_configs=untried,
        captured=program,
        not_captured=problem,
        machine_spec=request.machine,
    )


def _search(graph: Graph, request: PlanRequest) -> tuple[SolvedConfig, int]:
    """The fastest configuration, and how many might have been faster when the time was up.

    Those of a single stage are proven to be within the tolerance. Those of several stages are cut by dynamic
    programming, and each stage of the fastest ones is then solved again within its own memory.
    """
    tolerance = request.options.tolerance
    allowed, started = split_filter(graph, request.options.constraints or {}), time.monotonic()
    deadline = started + request.options.time_limit
    best: SolvedConfig | None = None
    found: list[SolvedConfig] = []
    roomy: set[tuple[int, Mesh, int]] = set()  # configurations that more memory would not make faster
    untried = 0
    for least, config in parallel_configs(graph, request):
        beat = math.inf if best is None else best.cost.step_time
        shape = (config.stages, config.mesh, config.training.microbatches)
        if least >= beat or (best is not None and _needless(config, best)):
            continue
        if config.training.recompute and shape in roomy:
            continue  # it saves memory alone
        if best is not None and time.monotonic() > started + _TRYING * request.options.time_limit:
            untried += 1
            continue
        seconds = SECONDS if config.stages == 1 else _EACH
        try:
            solved = solve_config(config, request.machine, request.memory_limit, allowed, tolerance, beat, seconds)
        except NotFaster as slower:
            roomy |= {shape} if slower.always else set()
        except OverLimit:
            pass
        else:
            found.append(solved)
            best = solved if solved.cost.step_time < beat else best
            roomy |= set() if solved.memory_bound else {shape}
    if best is None:
        raise PlanError(_nothing_fits(graph, request))
    best = _proven(best, request, allowed, deadline - time.monotonic())
    best = _best_staged(best, found, request, deadline)
    near = best.cost.step_time / (1 + tolerance)
    loose = sum(
        each.config.stages == 1 and each.config is not best.config and each.cost.lower_bound < near for each in found
    )
    return best, untried + loose


def _proven(best: SolvedConfig, request: PlanRequest, allowed: SplitFilter | None, seconds: float) -> SolvedConfig:
    """A configuration of one stage again with the time that is left, where it was not solved to the tolerance."""
    tolerance, cost = request.options.tolerance, best.cost
    near = cost.step_time <= cost.lower_bound * (1 + tolerance)
    if best.config.stages > 1 or near or seconds <= SECONDS:
        return best
    again = solve_config(best.config, request.machine, request.memory_limit, allowed, tolerance, seconds=seconds)
    bound = max(cost.lower_bound, again.cost.lower_bound)
    better = again if again.cost.step_time < cost.step_time else best
    return replace(better, cost=replace(better.cost, lower_bound=bound))


def _best_staged(best: SolvedConfig, found: list[SolvedConfig], request: PlanRequest, deadline: float) -> SolvedConfig:
    """The best once each stage of the fastest configurations of several stages is solved again."""
    staged = [each for each in found if each.config.stages > 1 and each.memory_bound]
    for each in sorted(staged, key=lambda one: one.cost.step_time)[:_FINALISTS]:
        if time.monotonic() > deadline or each.cost.lower_bound >= best.cost.step_time:
            continue
        better = solve_stages(each, request.machine, request.memory_limit, request.options.tolerance, deadline)
        best = better if better.cost.step_time < best.cost.step_time else best
    return best


def _needless(config: ParallelConfig, best: SolvedConfig) -> bool:
    """Whether the configuration saves memory, in more parts of a batch or by recomputing, where one stage need not save
    any."""
    if best.memory_bound or config.stages > 1 or best.config.stages > 1:
        return False
    other = best.config.training
    return config.training.microbatches > other.microbatches or (config.training.recompute and not other.recompute)


def split_filter(graph: Graph, constraints: Mapping[str, str]) -> SplitFilter | None:
    """Which splits a user's constraints on modules or parameters allow; PlanError where a pattern names none."""
    if not constraints:
        return None
    rules: dict[int, set[int]] = {}
    for pattern, words in constraints.items():
        ops = [at for at, o in enumerate(graph.operators) if _named(pattern, o.module) or _named(pattern, o.name)]
        if not ops:
            names = sorted({o.module for o in graph.operators if o.module})
            raise PlanError(f"no module or operator is called '{pattern}'{nearest(pattern, names)}")
        wanted = [] if words == "replicated" else [word.strip() for word in words.split(",")]
        dims = sorted({dim.name for op in ops for dim in graph.operators[op].dims})
        if wrong := [word for word in wanted if word not in dims]:
            raise PlanError(f"'{pattern}' has no dimension '{wrong[0]}': it has {', '.join(dims) or 'none'}")
        for op in ops:
            names = [dim.name for dim in graph.operators[op].dims]
            rules[op] = {names.index(word) for word in wanted if word in names}

    def allowed(op: int, split: OpSplit) -> bool:
        return op not in rules or all(dim == REPLICATED or dim in rules[op] for dim in split)

    return allowed


def _named(pattern: str, name: str) -> bool:
    return bool(name) and (fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*"))


def _nothing_fits(graph: Graph, request: PlanRequest) -> str:
    """By how much nothing fits, and what would."""
    configs = parallel_configs(graph, request)
    limit, options = request.memory_limit, request.options
    least = min((least_of_stage(config) for _, config in configs), default=math.inf)
    message = (
        f"no plan fits on {request.devices} devices of {format_bytes(limit)}: each needs at least {format_bytes(least)}"
    )
    message += ", and no cut into stages is so even, with the weights that it gathers. " if least <= limit else ". "
    # What needs least: recomputing, in the smallest micro-batches.
    pieces = options.microbatches or max((p.training.microbatches for _, p in configs if p.stages == 1), default=1)
    recompute = options.recompute is not False
    thrifty = replace(options, recompute=recompute, microbatches=pieces, stages=1, mesh=None)
    for devices in (request.devices * 2**k for k in range(1, 8)):
        more = replace(request, devices=devices, options=thrifty)
        needed = min((lightest_memory(config) for _, config in parallel_configs(graph, more)), default=math.inf)
        if needed <= limit:
            return f"{message}On {devices} devices {format_bytes(needed)} would do; else use a smaller batch or model."
    return f"{message}More devices will not help: use a smaller batch or model."
