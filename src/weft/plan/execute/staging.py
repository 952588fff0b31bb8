"""From a plan with stages or micro-batches to the processes that run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.errors import PlanError
from weft.plan.capture import Captured
from weft.plan.execute.grid import Grid, Stages, patience
from weft.plan.execute.outline import Outline, staged_reasons
from weft.plan.execute.reading import Reading, Value
from weft.plan.execute.stages import Staged
from weft.plan.execute.weights import owners
from weft.plan.strategy import Strategy


def apply_stages(
    captured: Captured,
    strategy: Strategy,
    stage: Sequence[int | None],
    microbatches: int,
    *,
    weights: nn.Module | Mapping[str, Tensor] | None = None,
    recompute: bool = False,
    mesh: DeviceMesh | None = None,
    timeout: float = 300.0,
) -> Staged:
    """A model in stages; ``captured`` is of one micro-batch, and ``stage`` says where each of its operators runs.

    All processes make the same call. Device d of stage s, counted along the strategy's mesh, is process s * devices +
    d, or as a ``mesh`` says that has the stages as its first axis. The values of a parameter are those of the first
    process of the first stage that holds it. With ``recompute`` the forward of each layer runs again in the backward. A
    process that does not answer for ``timeout`` seconds is taken for lost. Raises PlanError where the plan cannot be
    run.
    """
    if wrong := staged_reasons(captured, strategy, stage):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise PlanError(f"the plan cannot be run: {wrong[0]}{more}")
    outline = Outline.of(captured, strategy, stage)
    ranks = _ranks(len(outline.sections), strategy, mesh)
    kind = mesh.device_type if mesh is not None else _kind(weights)
    ties = _ties(Reading(captured), outline, weights)
    with patience(lambda: "the start"):
        grid = Grid.of(ranks, strategy.mesh, kind, ties.values(), timedelta(seconds=timeout))
        return Staged(captured, strategy, outline, microbatches, grid, weights, ties, recompute)


def _ranks(stages: int, strategy: Strategy, mesh: DeviceMesh | None) -> torch.Tensor:
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


def _kind(weights: nn.Module | Mapping[str, Tensor] | None) -> str:
    tensors = weights.parameters() if isinstance(weights, nn.Module) else (weights or {}).values()
    return next((tensor.device.type for tensor in tensors), "cpu")


def _ties(reading: Reading, outline: Outline, weights: nn.Module | Mapping[str, Tensor] | None) -> dict[Value, Stages]:
    """The parameters that several stages hold, with these stages."""
    holders: dict[Value, set[int]] = {}
    for value, owner in owners(reading, weights).items():
        found = holders.setdefault(owner, set())
        found.update(number for number, each in enumerate(outline.sections) if value.source in each.leaves)
    return {owner: tuple(sorted(stages)) for owner, stages in holders.items() if len(stages) > 1}
