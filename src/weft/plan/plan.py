"""A plan: where every operator of a model goes, what that costs, and what it was compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import PlanError
from weft.hardware.machine import Machine
from weft.plan.graph import Graph
from weft.plan.layout import REPLICATED, Mesh, Split
from weft.plan.saved import FORMAT
from weft.plan.strategy import Strategy
from weft.plan.tables import Training
from weft.utils.files import disk_errors, write_json

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from weft.plan.capture import Captured
    from weft.plan.execute import Applied, Staged


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step as predicted, and bytes of the fullest device. ``bound`` is below every plan with this mesh,
    these stages and micro-batches."""

    step: float
    compute: float
    communication: float
    bubble: float
    memory: float
    parameters: float
    activations: float
    bound: float


@dataclass(frozen=True, slots=True)
class Row:
    """Another strategy beside the plan; ``cost`` is None where it does not apply, and ``why`` says so."""

    name: str
    cost: Cost | None
    mesh: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A strategy for one stage of devices, the stage of every operator, and the costs.

    ``graph`` is of one micro-batch. ``mesh`` is of the devices of one stage. ``devices`` are those that it uses;
    ``idle`` more were to be had.
    """

    model: str
    machine: str
    devices: int
    graph: Graph
    mesh: Mesh
    splits: tuple[Split, ...]
    stage: tuple[int, ...]
    microbatches: int
    recompute: bool
    cost: Cost
    limit: float
    training: Training = Training()
    rows: tuple[Row, ...] = ()
    untried: int = 0
    within: float | None = None
    """No other way to use the devices is faster by more than this part, unless it is among the ``untried``, which
    counts those too that were not proven slower in time; None where others were not looked at."""
    idle: int = 0
    captured: Captured | None = field(default=None, repr=False, compare=False)
    computer: Machine | None = field(default=None, repr=False, compare=False)  # what ``machine`` is the name of

    @property
    def stages(self) -> int:
        return max(self.stage) + 1

    @property
    def strategy(self) -> Strategy:
        return Strategy(self.mesh, self.splits)

    @property
    def gap(self) -> float:
        """How far the plan may be from the best with its mesh and stages, relative to it: 0 is proven best."""
        return max(0.0, self.cost.step / self.cost.bound - 1) if self.cost.bound else 0.0

    def names(self, place: int) -> tuple[str, ...]:
        """The split of an operator, as the name of a dimension for each mesh axis; '-' where it is not split."""
        dims = self.graph.operators[place].dims
        return tuple("-" if dim == REPLICATED else dims[dim].name for dim in self.splits[place])

    def reasons(self) -> list[str]:
        """Why weft cannot run this plan; empty where it can."""
        if self.captured is None:
            return ["the plan is not bound to a model: plan it, or load it with the model"]
        if self.in_steps:
            from weft.plan.execute import staged_reasons

            return staged_reasons(self.captured, self.strategy, self.stage)
        from weft.plan.execute import executable

        return executable(self.captured, self.strategy)

    @property
    def in_steps(self) -> bool:
        """Whether it has stages or micro-batches, or recomputes: then whole steps are run, not single forwards."""
        return self.stages > 1 or self.microbatches > 1 or self.recompute

    def apply(
        self, model: nn.Module, mesh: DeviceMesh | None = None, *, batch: Any = None, loss: Any = None, **options: Any
    ) -> Applied | Staged:
        """The model, unchanged, on the devices of a mesh; every process makes the same call.

        A plan with stages, micro-batches or recomputation gives a ``Staged`` module, whose ``step(batch)`` leaves the
        gradients; ``mesh`` then has the stages as its first axis, or is made. With micro-batches, ``batch`` and
        ``loss`` are those that it was planned with, since one micro-batch is captured anew. A plan without any of them
        gives an ``Applied`` module, to be called as the model is, or ``Staged`` where ``batch`` is given. Options are
        those of ``execute.apply_stages`` and ``execute.apply``.
        """
        if reasons := self.reasons():
            raise PlanError(f"this plan cannot be run: {reasons[0]}")
        assert self.captured is not None
        if self.in_steps or batch is not None:
            from weft.plan.execute import apply_stages, microbatch_of

            found, strategy, stage = microbatch_of(self, self.captured, model, batch, loss)
            chosen = {"weights": model, "recompute": self.recompute, "mesh": mesh, **options}
            return apply_stages(found, strategy, stage, self.microbatches, **chosen)
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from weft.plan.execute import apply

        if mesh is None:
            if (world := dist.get_world_size()) != self.devices:
                raise PlanError(f"the plan is for {self.devices} processes, and there are {world}")
            kind = next((p.device.type for p in model.parameters()), "cpu")
            mesh = init_device_mesh(kind, self.mesh.sizes)
        return apply(self.captured, self.strategy, mesh, weights=model, **options)

    def to_json(self) -> dict[str, Any]:
        """Plain values. ``splits`` may be edited by hand: for each operator the dimension that each mesh axis cuts."""
        return {
            "format": FORMAT,
            "model": self.model,
            "machine": self.machine,
            "devices": self.devices,
            "idle": self.idle,
            "mesh": list(self.mesh.sizes),
            "stages": self.stages,
            "microbatches": self.microbatches,
            "recompute": self.recompute,
            "untried": self.untried,
            "within": self.within,
            "limit": None if self.limit == float("inf") else self.limit,
            "cost": {name: getattr(self.cost, name) for name in Cost.__slots__},
            "splits": {operator.name: list(self.names(place)) for place, operator in enumerate(self.graph.operators)},
            "stage": {operator.name: self.stage[place] for place, operator in enumerate(self.graph.operators)}
            if self.stages > 1
            else {},
            "compared": [
                {
                    "name": row.name,
                    "mesh": row.mesh,
                    "why": row.why,
                    "step": row.cost.step if row.cost else None,
                    "memory": row.cost.memory if row.cost else None,
                }
                for row in self.rows
            ],
        }

    def save(self, path: Path | str) -> None:
        """Writes the plan as JSON, atomically, with its operators and their costs, which ``weft serve`` shows."""
        path = Path(path)
        with disk_errors(path, 0):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.to_saved())

    def to_saved(self) -> dict[str, Any]:
        """What ``save`` writes: the plain values of the plan, and a row for each operator."""
        from weft.plan.operators import operators

        return {**self.to_json(), "operators": operators(self)}
