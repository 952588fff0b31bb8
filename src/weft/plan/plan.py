"""A plan: where every operator of a model goes, what that costs, and what it was compared with."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import PlanError
from weft.hardware.machine import Machine
from weft.plan.baselines import Comparison
from weft.plan.costs import PlanCost, TrainingSpec
from weft.plan.graph import Graph
from weft.plan.saved import COST_KEYS, FORMAT, operators
from weft.plan.sharding import REPLICATED, Mesh, OpSplit, ShardingStrategy
from weft.utils.files import disk_errors, write_json

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from weft.plan.capture import CapturedModel
    from weft.plan.runtime import ParallelModule


_UNBOUND = "the plan is not bound to a model: plan it, or load it with the model"


@dataclass(frozen=True, slots=True)
class Plan:
    """A strategy for one stage of devices, the stage of every operator, and the costs.

    ``graph`` is of one micro-batch. ``mesh`` is of the devices of one stage. ``devices`` are those that it uses;
    ``unused_devices`` more were to be had.
    """

    model: str
    machine: str
    devices: int
    graph: Graph
    mesh: Mesh
    splits: tuple[OpSplit, ...]
    stage: tuple[int, ...]
    microbatches: int
    recompute: bool
    cost: PlanCost
    memory_limit: float
    training: TrainingSpec = TrainingSpec()
    comparisons: tuple[Comparison, ...] = ()
    untried_configs: int = 0
    """Configurations that might have been faster, but were not tried, or not proven slower, when the time was up."""
    unused_devices: int = 0
    captured: CapturedModel | None = field(default=None, repr=False, compare=False)
    """One micro-batch, which the processes of the plan run; None where there is none, for the reason that follows."""
    not_captured: str = field(default=_UNBOUND, repr=False, compare=False)
    machine_spec: Machine | None = field(default=None, repr=False, compare=False)

    @property
    def stages(self) -> int:
        return max(self.stage) + 1

    @property
    def strategy(self) -> ShardingStrategy:
        return ShardingStrategy(self.mesh, self.splits)

    @property
    def gap(self) -> float:
        """How far the plan may be from the best of its configuration, relative to it: 0 is proven best. With several
        stages the bound is a loose one, that of all stages within their memory together."""
        return max(0.0, self.cost.step_time / self.cost.lower_bound - 1) if self.cost.lower_bound else 0.0

    def names(self, op: int) -> tuple[str, ...]:
        """The split of an operator, as the name of a dimension for each mesh axis; '-' where it is not split."""
        dims = self.graph.operators[op].dims
        return tuple("-" if dim == REPLICATED else dims[dim].name for dim in self.splits[op])

    def unsupported(self) -> list[str]:
        """Why weft cannot run this plan; empty where it can."""
        from weft.plan.runtime import program_of, unsupported

        try:
            captured, strategy, stage = program_of(self)
        except PlanError as problem:
            return [str(problem)]
        return unsupported(captured, strategy, stage, whole_steps=self.stages > 1 or self.microbatches > 1)

    def apply(
        self,
        model: nn.Module,
        mesh: DeviceMesh | None = None,
        *,
        timeout: float = 300.0,
    ) -> ParallelModule:
        """The model, itself unchanged, on the devices of the plan; every process makes the same call.

        The module's ``step(batch)`` gives the loss and leaves the gradients. Where the plan has one stage and one
        micro-batch, it may be called with a batch as well, and gives what the model does. ``mesh`` has the shape of the
        plan's, with several stages these as its first axis; without it, all processes are used in order. A process that
        does not answer for ``timeout`` seconds is taken for lost. Raises PlanError where the plan cannot be run.
        """
        from weft.plan.runtime import StepOptions, parallelize, program_of

        options = StepOptions(self.microbatches, self.recompute)
        return parallelize(*program_of(self), options, weights=model, mesh=mesh, timeout=timeout)

    def to_json(self) -> dict[str, Any]:
        """Plain values. ``splits`` may be edited by hand: for each operator the dimension that each mesh axis cuts."""
        names = [operator.name for operator in self.graph.operators]
        return {
            "format": FORMAT,
            "model": self.model,
            "machine": self.machine,
            "devices": self.devices,
            "idle": self.unused_devices,
            "mesh": list(self.mesh.sizes),
            "stages": self.stages,
            "microbatches": self.microbatches,
            "recompute": self.recompute,
            "untried": self.untried_configs,
            "limit": None if math.isinf(self.memory_limit) else self.memory_limit,
            "training": {"dtype": self.training.dtype, "optimizer_bytes": self.training.optimizer_bytes},
            "cost": {COST_KEYS.get(name, name): value for name, value in asdict(self.cost).items()},
            "splits": {name: list(self.names(op)) for op, name in enumerate(names)},
            "stage": dict(zip(names, self.stage, strict=True)) if self.stages > 1 else {},
            "compared": [
                {
                    "name": row.name,
                    "mesh": row.mesh,
                    "why": row.why,
                    "step": row.cost.step_time if row.cost else None,
                    "memory": row.cost.memory if row.cost else None,
                }
                for row in self.comparisons
            ],
        }

    def to_saved(self) -> dict[str, Any]:
        """What ``save`` writes: the plain values, and a row for each operator, which ``weft serve`` shows."""
        machine = {} if self.machine_spec is None else {"machine_spec": self.machine_spec.to_json()}
        return {**self.to_json(), **machine, "operators": operators(self)}

    def save(self, path: Path | str) -> None:
        """Writes the plan as JSON, atomically; `weft.plan.load` reads it."""
        path = Path(path)
        with disk_errors(path, 0):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.to_saved())
