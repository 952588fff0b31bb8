"""Whether a strategy can be run: every reason why not, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from weft.errors import PlanError
from weft.plan.capture import CapturedModel
from weft.plan.graph import Operator
from weft.plan.runtime.local_ops import local_kernel
from weft.plan.runtime.program import (
    CannotShard,
    CapturedProgram,
    LocalKernel,
    Operand,
    ShardedCall,
    fill_operands,
    operands,
)
from weft.plan.runtime.redistribute import ShapeOnlyCollectives
from weft.plan.runtime.stages import StageGraph
from weft.plan.sharding import Mesh, OpSplit, ShardingStrategy, local_shape


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
    graph, mesh = captured.graph, strategy.mesh
    found = [
        f"operator '{each.name}' ({each.target}): {reason}"
        for each, split in zip(graph.operators, strategy.splits, strict=True)
        if (reason := invalid_split(each, split, mesh))
    ]
    if found:
        return found
    program = CapturedProgram(captured)
    seen: dict[str, str | None] = {}
    for op, node in program.calls():
        call = program.call(op, node, strategy.splits[op], mesh)
        if reason := _cannot_shard(call, seen):
            found.append(f"operator '{call.operator.name}' ({call.operator.target}): {reason}")
    return found


def invalid_split(operator: Operator, split: OpSplit, mesh: Mesh) -> str | None:
    """Why a split is none of this operator on this mesh."""
    if len(split) != len(mesh.sizes):
        return f"the split {split} has {len(split)} entries for the {len(mesh.sizes)} axes of the mesh {mesh}"
    for dim in set(split):
        if dim < 0:
            continue
        if dim >= len(operator.dims):
            return f"the split {split} names dimension {dim} of {len(operator.dims)}"
        parts = math.prod(size for size, each in zip(mesh.sizes, split, strict=True) if each == dim)
        named = operator.dims[dim]
        if named.parts % parts:
            return f"'{named.name}' cannot be split into {parts} equal parts, whose number must divide {named.parts}"
        for tensor in (*(read.tensor for read in operator.reads), *operator.outputs):
            for size, has in zip(tensor.shape, tensor.dims, strict=True):
                if has == dim and size % parts:
                    return f"an axis of {size} cannot be cut into {parts} equal parts along '{named.name}'"
    return None


def _cannot_shard(call: ShardedCall, seen: dict[str, str | None]) -> str | None:
    try:
        made = local_kernel(call)
    except CannotShard as problem:
        return str(problem)
    if not call.is_split:
        return None
    key = _fingerprint(call, made)
    if key not in seen:
        seen[key] = _wrong_shape(call, made)
    return seen[key]


def _wrong_shape(call: ShardedCall, made: LocalKernel) -> str | None:
    """Computes the part without data: it must come out as the part of the result that it should be."""

    def empty_part(operand: Operand) -> torch.Tensor:
        shape = local_shape(operand.tensor.shape, call.operand_placements(operand), call.mesh)
        return torch.empty(shape, dtype=operand.dtype, device="meta")

    try:
        with torch.no_grad():
            got = made.run(
                ShapeOnlyCollectives(call.mesh.sizes),
                fill_operands(made.args, empty_part),
                fill_operands(made.kwargs, empty_part),
            )
    except Exception as problem:
        return f"its kernel does not take parts ({str(problem).splitlines()[0] if str(problem) else problem!r})"
    for output, result in enumerate(got if isinstance(got, (tuple, list)) else (got,)):
        if (
            isinstance(result, torch.Tensor)
            and output in call.used_outputs
            and tuple(result.shape) != call.shape(output)
        ):
            return f"its part has the shape {tuple(result.shape)}, not {call.shape(output)}"
    return None


def _fingerprint(call: ShardedCall, made: LocalKernel) -> str:
    """All that the shapes of a part depend on, so that equal layers are checked once."""
    shapes = [
        (local_shape(each.tensor.shape, call.operand_placements(each), call.mesh), str(each.dtype))
        for each in operands([made.args, made.kwargs])
    ]
    results = [call.shape(output) for output in sorted(call.used_outputs)]
    plain = fill_operands([made.args, made.kwargs], lambda operand: None)
    return repr((str(call.target), shapes, results, plain, call.split))
