"""A model that runs on a mesh of devices as a strategy says, each device computing its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.errors import PlanError
from weft.plan.capture import Captured
from weft.plan.execute.batch import data_axes, part
from weft.plan.execute.calling import Calling
from weft.plan.execute.check import executable
from weft.plan.execute.reading import Reading, Value
from weft.plan.execute.recipe import Pass, recipe
from weft.plan.execute.regather import Regather
from weft.plan.execute.seeds import compare_seeds
from weft.plan.execute.weights import gathered, placements, settle
from weft.plan.execute.wire import Wire
from weft.plan.layout import PARTIAL, REPLICATED, Layout, local_shape
from weft.plan.strategy import Strategy


def apply(
    captured: Captured,
    strategy: Strategy,
    device_mesh: DeviceMesh,
    *,
    weights: nn.Module | Mapping[str, Tensor] | None = None,
    local_batch: bool | Sequence[int] = False,
    gather: bool = True,
    regather: bool = False,
) -> Applied:
    """The captured model on a mesh, every process of which must make the same call.

    Values are those of ``weights`` (a model like the captured one, or its state), else those that the model was
    captured with; the first process's count. With ``local_batch`` each process gives its part of the batch, see
    ``Applied.batch_part`` (it may name the mesh axes that share the batch), else all give the whole. With ``gather``
    results are whole on every process, else those that are no scalars are DTensors, as they lie. With ``regather`` a
    parameter that is gathered for its readers is gathered once more for the backward instead of being kept. Raises
    PlanError where the strategy cannot be run.
    """
    if tuple(device_mesh.shape) != strategy.mesh.sizes:
        raise PlanError(
            f"the strategy is for a mesh of {strategy.mesh}, but the devices form one of "
            f"{'x'.join(map(str, device_mesh.shape))}; plan for these, or make a mesh of that shape"
        )
    if wrong := executable(captured, strategy):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise PlanError(f"the strategy cannot be run: {wrong[0]}{more}")
    return Applied(captured, strategy, device_mesh, weights, local_batch, gather, regather)


class Applied(nn.Module):
    """Parameters and buffers have the names of the model's own; parameters are DTensors, stored as the strategy says.

    It computes what was captured: inputs have the shapes of the captured batch, and training or evaluation is as it was
    then. Random operators draw what a single device would draw, for which all processes seed torch alike.
    """

    def __init__(
        self,
        captured: Captured,
        strategy: Strategy,
        device_mesh: DeviceMesh,
        weights: nn.Module | Mapping[str, Tensor] | None,
        local_batch: bool | Sequence[int],
        gather: bool,
        regather: bool,
    ) -> None:
        super().__init__()
        self.device_mesh, self.strategy = device_mesh, strategy
        self._wire = Wire(device_mesh)
        reading = Reading(captured, self._wire.device)
        self._calling = calling = Calling.of(captured, reading)
        self._weights = settle(self, reading, strategy, device_mesh, self._wire.device, weights)
        self._mutated = {name: reading.value(node) for node, name in captured.mutated.items()}
        axes = (
            tuple(local_batch)
            if not isinstance(local_batch, bool)
            else data_axes(captured, strategy)
            if local_batch
            else ()
        )
        laid = part(calling.inputs, axes, strategy.mesh)
        self.batch_part = self._wire.part(axes)
        self._shapes = [local_shape(each.shape, laid[each.value], strategy.mesh) for each in calling.inputs]
        results = [value for value in calling.outputs if isinstance(value, Value)]
        outputs = {value: captured.graph.operators[value.source].outputs[value.output] for value in results}
        self._lying = frozenset() if gather else frozenset(value for value, each in outputs.items() if each.shape)
        ends = (*results, *self._mutated.values())
        self._recipe = recipe(reading, strategy, {**self._weights.layouts, **laid}, ends, self._lying)
        owned = {self._recipe.given[value] for value in self._weights.parameters}
        self._gathers = self._recipe.gathers(owned) if regather else frozenset()
        self._seeded_alike = not self._recipe.random

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        made = self._recipe
        slots: list[Any] = [None] * made.slots
        self._fill(slots, self._calling.tensors(args, kwargs))
        if not self._seeded_alike:
            compare_seeds(self._wire)
            self._seeded_alike = True
        if self._gathers:
            with (again := Regather(self._wire)).hooks():
                self._run(slots, again)
        else:
            self._run(slots)
        for name, value in self._mutated.items():
            self.get_buffer(name).copy_(slots[made.results[value]].detach())
        return self._calling.result([self._result(each, slots) for each in self._calling.outputs])

    def _run(self, slots: list[Any], again: Regather | None = None) -> None:
        for number, step in enumerate(self._recipe.steps):
            step.run(slots, self._wire)
            if again is not None and number in self._gathers and isinstance(step, Pass):
                again.gathered(slots[step.targets[0]], slots[step.source], step.moves)
            for slot in step.frees:
                if again is not None and isinstance(slots[slot], Tensor):
                    again.dropped(slots[slot])
                slots[slot] = None

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's state with every tensor whole, on every process; all of them must call it."""
        return {name: self.whole(value).detach() for name, value in self.state_dict().items()}

    def unshard(self, model: nn.Module) -> nn.Module:
        """Writes the state into a plain model like the one that was captured; all processes must call it."""
        model.load_state_dict(self.full_state_dict())
        return model

    def whole(self, value: Tensor) -> Tensor:
        """A parameter or its gradient, whole on every process; all of them must call it."""
        return gathered(value, self._wire)

    def _fill(self, slots: list[Any], tensors: list[Any]) -> None:
        given = self._recipe.given
        for value, name in self._weights.parameters.items():
            parameter: Any = self.get_parameter(name)
            slots[given[value]] = parameter.to_local()
        for value, name in self._weights.buffers.items():
            # What the backward keeps must not change when the buffer does.
            buffer = self.get_buffer(name)
            slots[given[value]] = buffer.clone() if name in self._mutated else buffer
        place, parts = self.batch_part
        told = f", of which this process gives part {place + 1} of {parts}" if parts > 1 else ""
        for each, shape, tensor in zip(self._calling.inputs, self._shapes, tensors, strict=True):
            slots[given[each.value]] = each.check(tensor, shape, told).to(self._wire.device)

    def _result(self, value: Any, slots: list[Any]) -> Any:
        if not isinstance(value, Value):
            return value[0]
        tensor = slots[self._recipe.results[value]]
        if value not in self._lying:
            return tensor
        laid: Layout = tuple(REPLICATED if place == PARTIAL else place for place in self._recipe.layouts[value])
        return DTensor.from_local(tensor, self.device_mesh, placements(laid), run_check=False)
