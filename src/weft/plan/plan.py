"""A plan: where every operator of a model goes, what that costs, and what it was compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from weft.plan.runtime import ParallelModule


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
        from weft.plan.runtime import unsupported

        return unsupported(
            self.captured, self.strategy, self.stage, whole_steps=self.stages > 1 or self.microbatches > 1
        )

    def apply(
        self,
        model: nn.Module,
        batch: Any = None,
        loss: Any = None,
        mesh: DeviceMesh | None = None,
        *,
        timeout: float = 300.0,
    ) -> ParallelModule:
        """The model, itself unchanged, on the devices of the plan; every process makes the same call.

        The module's ``step(batch)`` gives the loss and leaves the gradients. Where the plan has one stage and one
        micro-batch, it may be called with a batch as well, and gives what the model does. With micro-batches, ``batch``
        and ``loss`` are those that it was planned with, since one micro-batch is captured anew. ``mesh`` has the shape
        of the plan's, with several stages these as its first axis; without it, all processes are used in order. A
        process that does not answer for ``timeout`` seconds is taken for lost. Raises PlanError where the plan cannot
        be run.
        """
        from weft.plan.runtime import apply_plan

        return apply_plan(self, model, batch, loss, mesh, timeout)

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
