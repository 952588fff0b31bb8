"""Gradients of parameters that travel once a step: summed over the micro-batches where they come out, then moved.

This is for passages that move nothing forward, such as that of a parameter that is whole on every device and whose
gradients come out as summands. What is gathered forward is given back for each micro-batch, since its sum would take as
much memory as the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.plan.execute.recipe import Call, Pass, Recipe
from weft.plan.execute.wire import Wire


@dataclass(frozen=True, slots=True)
class Late:
    """The passages, each with the name of its parameter, and during a step what their targets hold."""

    passes: tuple[tuple[Pass, str], ...]
    _held: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: Recipe, names: Mapping[int, str]) -> Late:
        """``names``: the slot of a parameter -> its name."""
        found = [step for step in recipe.steps if isinstance(step, Pass) and step.source in names and not step.moves]
        return cls(tuple((step, names[step.source]) for step in found))

    def others(self, recipe: Recipe) -> tuple[Pass | Call, ...]:
        """The steps that each micro-batch takes."""
        ours = {id(step) for step, _ in self.passes}
        return tuple(step for step in recipe.steps if id(step) not in ours)

    def begin(self, module: nn.Module) -> None:
        """The parameters as they are in this step."""
        for step, name in self.passes:
            parameter: Any = module.get_parameter(name)
            for target in step.targets:
                self._held[target] = parameter.to_local().detach().requires_grad_(parameter.requires_grad)

    def fill(self, slots: list[Any]) -> None:
        for target, value in self._held.items():
            slots[target] = value

    def end(self, module: nn.Module, wire: Wire, mesh: DeviceMesh) -> None:
        """Brings the sums home, and adds them to what the parameters have."""
        for step, name in self.passes:
            parameter: Any = module.get_parameter(name)
            total = None if parameter.grad is None else parameter.grad.to_local()
            for target, back in zip(step.targets, step.backs, strict=True):
                gradient = self._held[target].grad
                if gradient is not None:
                    gradient = wire.carry(gradient, back)
                    total = gradient if total is None else total + gradient
            if total is not None:
                parameter.grad = DTensor.from_local(total, mesh, parameter.placements, run_check=False)
        self._held.clear()
