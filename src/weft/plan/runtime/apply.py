"""From a plan to the processes that run it, or every reason why they cannot, before anything runs.

The plan's graph of a micro-batch is derived from that of the whole batch. A program of fewer samples may still differ:
a model may treat a single sample apart in what has no gradient, and an axis of one is no dimension of a reshape. So the
planner captures one micro-batch by itself, and the plan's splits are transferred to its program.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.errors import PlanError
from weft.plan.capture import CapturedModel, capture
from weft.plan.graph import Graph, Operator, batch_size
from weft.plan.runtime.local_ops import local_kernel
from weft.plan.runtime.module import ParallelModule, StepOptions
from weft.plan.runtime.p2p import ProcessGrid, Stages, name_lost_peer
from weft.plan.runtime.parameters import storage_owners
from weft.plan.runtime.program import (
    CannotShard,
    CapturedProgram,
    LocalKernel,
    Operand,
    ShardedCall,
    ValueRef,
    leaves,
    replace_leaves,
    split_batch,
)
from weft.plan.runtime.redistribute import ShapeOnlyCollectives
from weft.plan.runtime.stages import StageGraph
from weft.plan.sharding import REPLICATED, Mesh, OpSplit, ShardingStrategy, local_shape, splits

if TYPE_CHECKING:
    from weft.plan.plan import Plan


def parallelize(
    captured: CapturedModel,
    strategy: ShardingStrategy,
    stage: Sequence[int | None] | None = None,
    options: StepOptions | None = None,
    *,
    weights: nn.Module,
    mesh: DeviceMesh | None = None,
    timeout: float = 300.0,
) -> ParallelModule:
    """A captured model on processes, all of which make the same call. ``captured`` is of one micro-batch, and ``stage``
    says where each of its operators runs, if not all in one stage.

    Device d of stage s, counted along the strategy's mesh, is process s * devices + d, or as a ``mesh`` says that has
    the stages as its first axis. Values are those of ``weights``, a model like the captured one; those of a parameter
    come from the first process of the first stage that holds it. A process that does not answer for ``timeout`` seconds
    is taken for lost. Raises PlanError where the strategy cannot be run.
    """
    options, stage = options or StepOptions(), stage or [0] * len(captured.graph)
    if wrong := unsupported_operators(captured, strategy):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise PlanError(f"this plan cannot be run: {wrong[0]}{more}")
    program = CapturedProgram(captured)
    whole_steps = max(each or 0 for each in stage) > 0 or options.microbatches > 1
    stage_graph = StageGraph.of(program, strategy, stage, whole_steps)
    ranks = _ranks(len(stage_graph.sections), strategy, mesh)
    kind = next((each.device.type for each in weights.parameters()), "cpu") if mesh is None else mesh.device_type
    tied = _tied(program, stage_graph, weights)
    with name_lost_peer(lambda: "the start"):
        grid = ProcessGrid.of(ranks, strategy.mesh, kind, tied.values(), timedelta(seconds=timeout))
        return ParallelModule(program, strategy, stage_graph, grid, weights, tied, options)


def _ranks(stages: int, strategy: ShardingStrategy, mesh: DeviceMesh | None) -> torch.Tensor:
    """The processes, a row for each stage."""
    devices = strategy.mesh.devices
    wanted = (stages, *strategy.mesh.sizes)
    if mesh is not None:
        if tuple(mesh.shape) != wanted and (stages > 1 or tuple(mesh.shape) != wanted[1:]):
            raise PlanError(
                f"the plan is for {stages} stages of a mesh of {strategy.mesh}, but the devices form one of "
                f"{'x'.join(map(str, mesh.shape))}; make one of {'x'.join(map(str, wanted))}, or give none"
            )
        return mesh.mesh.cpu().reshape(stages, devices)
    if not dist.is_initialized():
        raise PlanError("no processes: call torch.distributed.init_process_group first, for example under torchrun")
    if dist.get_world_size() != stages * devices:
        raise PlanError(
            f"the plan is for {stages * devices} processes ({stages} stages of a mesh of {strategy.mesh}), and there "
            f"are {dist.get_world_size()}"
        )
    return torch.arange(stages * devices).reshape(stages, devices)


def _tied(program: CapturedProgram, stage_graph: StageGraph, weights: nn.Module) -> dict[ValueRef, Stages]:
    """The parameters that several stages hold, with these stages."""
    holders: dict[ValueRef, set[int]] = {}
    for value, owner in storage_owners(program, weights).items():
        found = holders.setdefault(owner, set())
        found.update(number for number, each in enumerate(stage_graph.sections) if value.source in each.leaves)
    return {owner: tuple(sorted(stages)) for owner, stages in holders.items() if len(stages) > 1}


def capture_microbatch(whole: CapturedModel, count: int) -> CapturedModel:
    """One of ``count`` equal micro-batches of what was captured, captured by itself."""
    first = split_batch(whole.batch, batch_size(whole.graph), count)[0]
    return capture(whole.model, first, loss=whole.loss, name=whole.graph.name)


def program_of(plan: Plan) -> tuple[CapturedModel, ShardingStrategy, tuple[int | None, ...]]:
    """What the processes of a plan run: a micro-batch as it was captured, and its splits and stages. PlanError where
    the plan has none."""
    if plan.captured is None:
        raise PlanError(plan.not_captured)
    if plan.microbatches == 1:
        return plan.captured, plan.strategy, plan.stage
    splits, stage = transfer_splits(plan.graph, plan.splits, plan.stage, plan.captured.graph, plan.mesh)
    return plan.captured, ShardingStrategy(plan.mesh, splits), stage


def transfer_splits(
    planned: Graph, old_splits: Sequence[OpSplit], stage: Sequence[int], found: Graph, mesh: Mesh
) -> tuple[tuple[OpSplit, ...], tuple[int | None, ...]]:
    """The split and the stage of each operator of ``found``. Operators through which gradients flow must be those of
    the plan in its order, else PlanError; others are found by their names, and have no stage where the plan lacks
    them."""
    ours = [op for op, each in enumerate(found.operators) if each.has_gradient]
    theirs = [op for op, each in enumerate(planned.operators) if each.has_gradient]
    for own, other in zip(ours, theirs, strict=False):
        mine, wanted = found.operators[own], planned.operators[other]
        if mine.target != wanted.target:
            raise PlanError(
                f"a micro-batch runs '{mine.name}' ({mine.target}) where the plan has '{wanted.name}' "
                f"({wanted.target}): plan with microbatches=1, or with micro-batches of more samples"
            )
    if len(ours) != len(theirs):
        raise PlanError(
            f"a micro-batch of '{planned.name}' has {len(ours)} operators with gradients, and the plan {len(theirs)}: "
            "plan with microbatches=1, or with micro-batches of more samples"
        )
    pairs = dict(zip(ours, theirs, strict=True))
    named = {(each.name, each.target): op for op, each in enumerate(planned.operators) if not each.has_gradient}
    whole: OpSplit = (REPLICATED,) * len(mesh.sizes)
    new: list[OpSplit] = []
    stages: list[int | None] = []
    for op, operator in enumerate(found.operators):
        old = pairs.get(op, named.get((operator.name, operator.target)))
        stages.append(None if old is None else stage[old])
        new.append(whole if old is None else _split(planned.operators[old], operator, old_splits[old], mesh))
    return tuple(new), tuple(stages)


def _split(old: Operator, new: Operator, split: OpSplit, mesh: Mesh) -> OpSplit:
    """The split of the same axes; a mesh axis that cannot cut them is left out."""
    if [dim.name for dim in old.dims] != [dim.name for dim in new.dims]:
        split = tuple(_dim(old, new, dim) if dim >= 0 else dim for dim in split)
    for axis in reversed(range(len(split))):
        if split in splits(new, mesh):
            break
        split = (*split[:axis], REPLICATED, *split[axis + 1 :])
    return split


def _dim(old: Operator, new: Operator, dim: int) -> int:
    """The dimension that cuts the same axis of a tensor."""
    before = (*old.outputs, *(read.tensor for read in old.reads))
    after = (*new.outputs, *(read.tensor for read in new.reads))
    for mine, other in zip(before, after, strict=False):
        if dim in mine.dims and len(mine.dims) == len(other.dims):
            found = other.dims[mine.dims.index(dim)]
            if found is not None:
                return found
    return REPLICATED


def unsupported(
    captured: CapturedModel,
    strategy: ShardingStrategy,
    stage: Sequence[int | None] | None = None,
    whole_steps: bool = False,
) -> list[str]:
    """Why a strategy cannot be run; empty if it can. ``stage`` says where each operator runs, if not in one stage; with
    ``whole_steps`` the program must have a loss, as stages, micro-batches and recomputation need."""
    if found := unsupported_operators(captured, strategy):
        return found
    try:
        StageGraph.of(CapturedProgram(captured), strategy, stage or [0] * len(captured.graph), whole_steps)
    except PlanError as problem:
        return [str(problem)]
    return []


def unsupported_operators(captured: CapturedModel, strategy: ShardingStrategy) -> list[str]:
    """A reason for each operator that cannot be run."""
    found, seen = list[str](), dict[str, str | None]()
    program = CapturedProgram(captured)
    for op, node in program.calls():
        call = program.call(op, node, strategy.splits[op], strategy.mesh)
        reason = None
        try:
            made = local_kernel(call)
            if call.is_split:
                key = _fingerprint(call, made)  # equal layers are checked once
                reason = seen[key] if key in seen else seen.setdefault(key, _wrong_shape(call, made))
        except CannotShard as problem:
            reason = str(problem)
        if reason:
            found.append(f"operator '{call.operator.name}' ({call.operator.target}): {reason}")
    return found


def _wrong_shape(call: ShardedCall, made: LocalKernel) -> str | None:
    """Computes the part without data: it must come out as the part of the result that it should be."""

    def empty_part(operand: Operand) -> torch.Tensor:
        shape = local_shape(operand.tensor.shape, call.operand_placements(operand), call.mesh)
        return torch.empty(shape, dtype=operand.dtype, device="meta")

    try:
        with torch.no_grad():
            parts = replace_leaves([made.args, made.kwargs], Operand, empty_part)
            got = made.run(ShapeOnlyCollectives(call.mesh.sizes), *parts)
    except Exception as problem:
        return f"its kernel does not take parts ({str(problem).splitlines()[0] if str(problem) else problem!r})"
    for output, result in enumerate(got if isinstance(got, (tuple, list)) else (got,)):
        used = isinstance(result, torch.Tensor) and output in call.used_outputs
        if used and tuple(result.shape) != call.shape(output):
            return f"its part has the shape {tuple(result.shape)}, not {call.shape(output)}"
    return None


def _fingerprint(call: ShardedCall, made: LocalKernel) -> str:
    """All that the shapes of a part depend on."""
    shapes = [
        (local_shape(each.tensor.shape, call.operand_placements(each), call.mesh), str(each.dtype))
        for each in leaves([made.args, made.kwargs], Operand)
    ]
    results = [call.shape(output) for output in sorted(call.used_outputs)]
    plain = replace_leaves([made.args, made.kwargs], Operand, lambda operand: None)
    return repr((str(call.target), shapes, results, plain, call.split))
