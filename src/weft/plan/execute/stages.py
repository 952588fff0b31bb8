"""A model whose steps run in stages and micro-batches: each process computes its part of one stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from weft.errors import PlanError
from weft.plan.batches import batch_size
from weft.plan.capture import Captured
from weft.plan.capture.batch import Batch
from weft.plan.execute.batch import arguments, microbatches
from weft.plan.execute.calling import Calling
from weft.plan.execute.course import Course
from weft.plan.execute.exchange import Exchange
from weft.plan.execute.grid import Grid, Stages, patience
from weft.plan.execute.outline import Outline
from weft.plan.execute.reading import Reading, Value
from weft.plan.execute.schedule import schedule
from weft.plan.execute.seeds import refuse_other_seeds, state_digest
from weft.plan.execute.weights import gathered, owners, persistent, settle
from weft.plan.execute.wire import Wire
from weft.plan.strategy import Strategy


@dataclass(frozen=True, slots=True)
class _Flight:
    """A micro-batch between its forward and its backward: what came in, what goes out by value, and the loss."""

    came: list[Tensor]
    went: dict[Value, Tensor]
    loss: Tensor | None


class Staged(nn.Module):
    """The parameters and buffers of one stage under the model's own names; parameters are DTensors.

    Micro-batches are equal parts of the batch, in order, and the loss is the mean of theirs: where a loss weighs
    samples unequally, such as by labels that are ignored, this is not quite the loss of the whole. Batch normalisation
    sees each micro-batch by itself, as on a single device that accumulates gradients. Random operators draw what such a
    device would draw, for which all processes seed torch alike. A parameter that several stages read is held by each of
    them, with the same gradient. ``ops`` is what this stage does in a step.
    """

    def __init__(
        self,
        captured: Captured,
        strategy: Strategy,
        outline: Outline,
        microbatches: int,
        grid: Grid,
        weights: nn.Module | Mapping[str, Tensor] | None,
        ties: Mapping[Value, Stages],
        recompute: bool,
    ) -> None:
        super().__init__()
        self.grid, self.strategy, self.microbatches = grid, strategy, microbatches
        self.stage, self.ops = grid.stage, schedule(grid.stage, len(outline.sections), microbatches)
        self._captured, self._outline = captured, outline
        self._section = outline.sections[grid.stage]
        self._wire = wire = Wire(grid.device_mesh)
        reading = Reading(captured, wire.device)
        self._calling, self._rows = Calling.of(captured, reading), batch_size(captured.graph) * microbatches
        self._weights = settle(self, reading, strategy, grid.device_mesh, wire.device, weights, self._section.leaves)
        owner_of = owners(reading, weights)
        names = {owner_of[value]: name for value, name in self._weights.parameters.items()}
        self._tied = {names[owner]: stages for owner, stages in ties.items() if owner in names}
        for name, stages in self._tied.items():
            self._first_has_the_say(name, stages)
        self._course = Course.of(reading, strategy, outline, grid.stage, self._calling, self._weights, recompute)
        self._exchange = Exchange(grid, wire.device, self._course.receives, self._course.sends)
        self.changing = tuple(outline.changes)
        """The buffers that steps change, of all stages, also those that are no part of the model's state."""
        self._changes = {name: value for name, value in outline.changes.items() if value in self._section.ends}
        self._seeded_alike = not self._course.recipe.random

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError("a model in stages runs whole steps: call step(batch), which gives the loss and the gradients")

    def step(self, batch: Batch, before: Callable[[int], None] | None = None) -> Tensor:
        """Forward and backward of a batch: gives the loss, the same on every process, and leaves its gradients, and
        none from before, in the parameters of this stage, which an optimizer may then step. Every process calls it with
        the whole batch. ``before`` is called ahead of the forward of each micro-batch with its number, to seed what it
        draws. Raises PlanError where another process is lost."""
        parts = microbatches(batch, self._rows, self.microbatches)
        self.zero_grad(set_to_none=True)
        flights: dict[int, _Flight] = {}
        total = torch.zeros((), device=self._wire.device, dtype=torch.float64)
        at: object = "the beginning"
        with torch.enable_grad(), patience(lambda: at):
            if not self._seeded_alike and before is None:
                self._compare_seeds()
            self._course.late.begin(self)
            for op in self.ops:
                at = op
                if op.kind == "F":
                    if before is not None:
                        before(op.microbatch)
                    flight = flights[op.microbatch] = self._forward(parts[op.microbatch])
                    if flight.loss is not None:
                        total += flight.loss.detach().reshape(()) / self.microbatches
                else:
                    self._backward(flights.pop(op.microbatch))
            at = "the end"
            self._exchange.finish()
            self._course.late.end(self, self._wire, self.grid.device_mesh)
            self._add_up_ties()
            return self._told(total)

    def clip(self, limit: float) -> Tensor:
        """Scales the gradients of all stages so that their norm, which it gives, is at most the limit. Every process
        calls it. (torch's own clipping would know this stage's gradients only.)"""
        total = torch.zeros((), device=self._wire.device, dtype=torch.float64)
        found = [(name, value.grad) for name, value in self.named_parameters() if value.grad is not None]
        holders = {id(self.get_parameter(name)): len(stages) for name, stages in self._tied.items()}
        for name, gradient in found:
            placed = zip(gradient.placements, self._wire.sizes, strict=True)  # type: ignore[attr-defined]
            copies = math.prod(size for each, size in placed if isinstance(each, Replicate))
            local = gradient.to_local().double()  # type: ignore[attr-defined]
            total += local.square().sum() / (copies * holders.get(id(self.get_parameter(name)), 1))
        with patience(lambda: "clipping"):
            dist.all_reduce(total, group=self.grid.world)
        norm = total.sqrt()
        for _, gradient in found:
            gradient.to_local().mul_(min(1.0, limit / (float(norm) + 1e-6)))  # type: ignore[attr-defined]
        return norm

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's state with every tensor whole, on every process; all of them must call it."""
        kept = persistent(self._captured)
        names = (
            *self._captured.parameters.values(),
            *(name for name in self._captured.buffers.values() if name in kept),
        )
        own = self.state_dict()
        return self.everywhere(names, lambda name: self.whole(own[name]))

    def everywhere(self, names: Iterable[str], own: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Tensors like the parameters and buffers of these names, from the stage that holds each, whose processes are
        asked for their ``own``, to every process; all of them must call it."""
        nodes = {name: node for node, name in (*self._captured.parameters.items(), *self._captured.buffers.items())}
        like = {node.name: node.meta["val"] for node in self._captured.nodes.nodes if "val" in node.meta}
        found: dict[str, Tensor] = {}
        with patience(lambda: "gathering the state"):
            for name in names:
                node = nodes[name]
                place = self._captured.places[self._captured.tied.get(node, node)]
                holder = next(s for s, section in enumerate(self._outline.sections) if place in section.leaves)
                value = torch.empty(like[node].shape, dtype=like[node].dtype, device=self._wire.device)
                if self.stage == holder:
                    value.copy_(own(name))
                dist.broadcast(value, src=self.grid.first(holder), group=self.grid.world)
                found[name] = value
        return found

    def unshard(self, model: nn.Module) -> nn.Module:
        """Writes the state into a plain model like the one that was captured; all processes must call it."""
        model.load_state_dict(self.full_state_dict())
        return model

    def whole(self, value: Tensor) -> Tensor:
        """A parameter of this stage or its gradient, whole on every process of the stage; all of them must call it."""
        return gathered(value.detach(), self._wire)

    def _forward(self, part: Batch) -> _Flight:
        recipe = self._course.recipe
        slots: list[Any] = [None] * recipe.slots
        self._fill(slots, self._calling.tensors(*arguments(part)))
        came = self._exchange.take_values()
        for parcel, tensor in zip(self._course.receives, came, strict=True):
            slots[recipe.given[parcel.crossing.value]] = tensor.requires_grad_(parcel.crossing.gradient)
        for span in self._course.spans:
            span.run(slots, self._wire)
        for name, value in self._changes.items():
            self.get_buffer(name).copy_(slots[recipe.results[value]].detach())
        went = {parcel.crossing.value: slots[recipe.results[parcel.crossing.value]] for parcel in self._course.sends}
        self._exchange.give_values([went[parcel.crossing.value] for parcel in self._course.sends])
        loss = self._outline.loss
        return _Flight(came, went, slots[recipe.results[loss]] if loss in self._section.ends else None)

    def _backward(self, flight: _Flight) -> None:
        gradients: dict[Value, Tensor] = {}
        for parcel, gradient in zip(self._exchange.gradients_in, self._exchange.take_gradients(), strict=True):
            value = parcel.crossing.value
            gradients[value] = gradients[value] + gradient if value in gradients else gradient
        roots = [(flight.went[value], gradient) for value, gradient in gradients.items()]
        if flight.loss is not None:
            roots.append((flight.loss, torch.full_like(flight.loss, 1 / self.microbatches)))
        roots = [(root, gradient) for root, gradient in roots if root.requires_grad]
        if roots:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        back = [tensor for tensor in flight.came if tensor.requires_grad]
        self._exchange.give_gradients([torch.zeros_like(each) if each.grad is None else each.grad for each in back])

    def _fill(self, slots: list[Any], tensors: list[Any]) -> None:
        given = self._course.recipe.given
        for value, name in self._weights.parameters.items():
            parameter: Any = self.get_parameter(name)
            slots[given[value]] = parameter.to_local()
        for value, name in self._weights.buffers.items():
            # What the backward keeps must not change when the buffer does.
            buffer = self.get_buffer(name)
            slots[given[value]] = buffer.clone() if name in self._changes else buffer
        for each, tensor in zip(self._calling.inputs, tensors, strict=True):
            checked = each.check(tensor, each.shape, " for a micro-batch")
            if each.value in given:
                slots[given[each.value]] = checked.to(self._wire.device)
        self._course.late.fill(slots)

    def _add_up_ties(self) -> None:
        """A parameter in several stages has the sum of their gradients in each."""
        for name, stages in self._tied.items():
            parameter: Any = self.get_parameter(name)
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local = parameter.grad.to_local().contiguous()
                dist.all_reduce(local, group=self.grid.shared[stages])
                parameter.grad.to_local().copy_(local)

    def _first_has_the_say(self, name: str, stages: Stages) -> None:
        parameter: Any = self.get_parameter(name)
        local = parameter.detach().to_local()
        given = local.contiguous()
        dist.broadcast(given, src=self.grid.rank(stages[0]), group=self.grid.shared[stages])
        local.copy_(given)

    def _told(self, total: Tensor) -> Tensor:
        holder = next(s for s, section in enumerate(self._outline.sections) if self._outline.loss in section.ends)
        dist.broadcast(total, src=self.grid.first(holder), group=self.grid.world)
        return total.to(self._course.loss)

    def _compare_seeds(self) -> None:
        """Looked at once, in the first step."""
        own = torch.tensor([state_digest(self._wire.device)], device=self._wire.device)
        every = [torch.empty_like(own) for _ in range(self.grid.ranks.numel())]
        dist.all_gather(every, own, group=self.grid.world)
        refuse_other_seeds(torch.cat(every))
        self._seeded_alike = True
