"""A model on the devices of a plan: each process computes its part of one stage, whole steps or single forwards.

The order in which each stage takes its micro-batches is one forward, one backward, then a flush:

    stage 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3    Each stage begins with one forward more than the next,
    stage 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3    so that stage s of S never holds more than S - s
    stage 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3    micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from weft.errors import PlanError
from weft.plan.capture import Batch
from weft.plan.graph import batch_size
from weft.plan.runtime.lowering import LocalProgram, Segment
from weft.plan.runtime.p2p import ProcessGrid, StageP2P, Stages, name_lost_peer
from weft.plan.runtime.parameters import register_tensors, storage_owners
from weft.plan.runtime.program import CallSignature, CapturedProgram, ValueRef, split_batch
from weft.plan.runtime.random_ops import rng_digest
from weft.plan.runtime.redistribute import MeshCollectives, ReshardAfterForward, redistribution_steps
from weft.plan.runtime.stages import StageGraph, StagePlan, forward_program
from weft.plan.sharding import REPLICATED, ShardingStrategy


class StageOp(NamedTuple):
    """The forward or backward of one micro-batch on one stage."""

    stage: int
    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> tuple[StageOp, ...]:
    """What a stage does in a step, in order. Forwards and backwards each come in the order of the micro-batches.

    >>> " ".join(map(str, one_forward_one_backward(1, 3, 4)))
    '1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3'
    """
    ahead = min(stages - stage - 1, microbatches)
    ops = [StageOp(stage, "F", number) for number in range(ahead)]
    for number in range(microbatches):
        if number + ahead < microbatches:
            ops.append(StageOp(stage, "F", number + ahead))
        ops.append(StageOp(stage, "B", number))
    return tuple(ops)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a module runs what its strategy says: in so many micro-batches, and with ``recompute`` with each layer's
    forward run again in the backward."""

    microbatches: int = 1
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class _PendingBackward:
    """A micro-batch between its forward and its backward: what was received, what was sent, and the loss."""

    received: list[Tensor]
    sent: dict[ValueRef, Tensor]
    loss: Tensor | None


class ParallelModule(nn.Module):
    """The parameters and buffers of one stage under the model's own names; parameters are DTensors.

    It computes what was captured: inputs have the shapes of the captured batch, and training or evaluation is as it was
    then. Micro-batches are equal parts of the batch, in order, and the loss is the mean of theirs: where a loss weighs
    samples unequally, such as by labels that are ignored, this is not quite the loss of the whole. Batch normalisation
    sees each micro-batch by itself, as on a single device that accumulates gradients. Random operators draw what such a
    device would draw, for which all processes seed torch alike. A parameter that several stages read is held by each of
    them, with the same gradient. ``ops`` is what this stage does in a step.
    """

    def __init__(
        self,
        program: CapturedProgram,
        strategy: ShardingStrategy,
        stage_graph: StageGraph,
        grid: ProcessGrid,
        weights: nn.Module,
        tied: Mapping[ValueRef, Stages],
        options: StepOptions,
    ) -> None:
        super().__init__()
        self._collectives = collectives = MeshCollectives(grid.device_mesh)
        self._program = program = CapturedProgram(program.captured, collectives.device)
        self.grid, self.strategy, self.options, self.stage = grid, strategy, options, grid.stage
        self.ops = one_forward_one_backward(grid.stage, len(stage_graph.sections), options.microbatches)
        self._stage_graph, self._section = stage_graph, stage_graph.sections[grid.stage]
        self._signature = CallSignature.of(program)
        self._rows = batch_size(program.graph) * options.microbatches
        leaves = self._section.leaves
        self._weights = register_tensors(self, program, strategy, grid.device_mesh, collectives.device, weights, leaves)
        owner_of = storage_owners(program, weights)
        names = {owner_of[value]: name for value, name in self._weights.parameters.items()}
        self._tied = {names[owner]: stages for owner, stages in tied.items() if owner in names}
        for name, stages in self._tied.items():
            self._copy_from_first(name, stages)
        self.changing = tuple(stage_graph.changes)
        """The buffers that steps change, of all stages, also those that are no part of the model's state."""
        self._changes = {name: value for name, value in stage_graph.changes.items() if value in self._section.ends}
        self._rng_compared = False
        self._plan: StagePlan | None = None
        if stage_graph.loss is not None:
            self._plan = StagePlan.of(program, strategy, stage_graph, grid.stage, self._weights, options.recompute)
            self._p2p = StageP2P(grid, collectives.device, self._plan.receives, self._plan.sends)

    def forward(self, batch: Batch) -> Any:
        """What the model returns for a batch, whole on every process, with gradients. Every process calls it with the
        whole batch. Raises PlanError where the plan has several stages or micro-batches."""
        if len(self._stage_graph.sections) > 1 or self.options.microbatches > 1:
            raise PlanError(
                "a model in stages or micro-batches runs whole steps: call step(batch), which gives the loss and the "
                "gradients"
            )
        program, segments = self._forward_program
        registers = self._filled(program, batch)
        if program.random:
            self._compare_rng()
        self._run(program, segments, registers)
        outputs = self._signature.outputs
        leaves = [registers[program.results[each]] if isinstance(each, ValueRef) else each[0] for each in outputs]
        return pytree.tree_unflatten(leaves, self._signature.tree)

    @cached_property
    def _forward_program(self) -> tuple[LocalProgram, tuple[Segment, ...]]:
        changes, recompute = self._stage_graph.changes, self.options.recompute
        return forward_program(self._program, self.strategy, changes, self._weights, recompute)

    def step(self, batch: Batch, before_microbatch: Callable[[int], None] | None = None) -> Tensor:
        """Forward and backward of a batch: gives the loss, the same on every process, and leaves its gradients, and
        none from before, in the parameters of this stage, which an optimizer may then step. Every process calls it with
        the whole batch. ``before_microbatch`` is called ahead of the forward of each micro-batch with its number, to
        seed what it draws. Raises PlanError where the model has no loss, or another process is lost."""
        if self._plan is None:
            raise PlanError("the model returns no loss, which a step needs: plan it with loss=..., or give it labels")
        parts = split_batch(batch, self._rows, self.options.microbatches)
        self.zero_grad(set_to_none=True)
        in_flight: dict[int, _PendingBackward] = {}
        total = torch.zeros((), device=self._collectives.device, dtype=torch.float64)
        at: object = "the beginning"
        with torch.enable_grad(), name_lost_peer(lambda: at):
            if self._plan.program.random and before_microbatch is None:
                self._compare_rng()
            self._plan.grad_sync.begin(self)
            for op in self.ops:
                at = op
                if op.kind == "F":
                    if before_microbatch is not None:
                        before_microbatch(op.microbatch)
                    made = in_flight[op.microbatch] = self._forward(self._plan, parts[op.microbatch])
                    if made.loss is not None:
                        total += made.loss.detach().reshape(()) / self.options.microbatches
                    del made
                else:
                    self._backward(in_flight.pop(op.microbatch))
            at = "the end"
            self._p2p.wait_for_sends()
            self._plan.grad_sync.end(self, self._collectives, self.grid.device_mesh)
            self._sum_tied_gradients()
            return self._broadcast_loss(total)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients of all stages so that their norm, which it gives, is at most the limit. Every process
        calls it. (torch's own clipping would know this stage's gradients only.)"""
        total = torch.zeros((), device=self._collectives.device, dtype=torch.float64)
        found = [(name, value.grad) for name, value in self.named_parameters() if value.grad is not None]
        holders = {id(self.get_parameter(name)): len(stages) for name, stages in self._tied.items()}
        for name, gradient in found:
            placed = zip(gradient.placements, self._collectives.sizes, strict=True)  # type: ignore[attr-defined]
            copies = math.prod(size for each, size in placed if isinstance(each, Replicate))
            own = gradient.to_local().double()  # type: ignore[attr-defined]
            total += own.square().sum() / (copies * holders.get(id(self.get_parameter(name)), 1))
        with name_lost_peer(lambda: "clipping"):
            dist.all_reduce(total, group=self.grid.world)
        norm = total.sqrt()
        for _, gradient in found:
            gradient.to_local().mul_(min(1.0, max_norm / (float(norm) + 1e-6)))  # type: ignore[attr-defined]
        return norm

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's state with every tensor whole, on every process; all of them must call it."""
        captured = self._program.captured
        kept = captured.program.state_dict
        names = (*captured.parameters.values(), *(name for name in captured.buffers.values() if name in kept))
        own = self.state_dict()
        return self.gather_full(names, lambda name: self.full_tensor(own[name]))

    def gather_full(self, names: Iterable[str], own: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Tensors like the parameters and buffers of these names, from the stage that holds each, whose processes are
        asked for their ``own``, to every process; all of them must call it."""
        captured = self._program.captured
        nodes = {name: node for node, name in (*captured.parameters.items(), *captured.buffers.items())}
        like = {node.name: node.meta["val"] for node in captured.program.graph.nodes if "val" in node.meta}
        found: dict[str, Tensor] = {}
        with name_lost_peer(lambda: "gathering the state"):
            for name in names:
                node = nodes[name]
                op = captured.op_index[captured.tied.get(node, node)]
                holder = next(s for s, section in enumerate(self._stage_graph.sections) if op in section.leaves)
                value = torch.empty(like[node].shape, dtype=like[node].dtype, device=self._collectives.device)
                if self.stage == holder:
                    value.copy_(own(name))
                dist.broadcast(value, src=self.grid.first(holder), group=self.grid.world)
                found[name] = value
        return found

    def full_tensor(self, value: Tensor) -> Tensor:
        """A parameter of this stage or its gradient, whole on every process of the stage; all of them must call it."""
        value = value.detach()
        if not isinstance(value, DTensor):
            return value
        held = tuple(each.dim if isinstance(each, Shard) else REPLICATED for each in value.placements)
        steps = redistribution_steps(held, (REPLICATED,) * len(held), self.strategy.mesh)
        return self._collectives.move(value.to_local(), steps)

    def _forward(self, plan: StagePlan, part: Batch) -> _PendingBackward:
        program = plan.program
        registers = self._filled(program, part)
        plan.grad_sync.fill(registers)
        received = self._p2p.receive_activations()
        for item, tensor in zip(plan.receives, received, strict=True):
            registers[program.inputs[item.edge.value]] = tensor.requires_grad_(item.edge.gradient)
        self._run(program, plan.segments, registers)
        sent = {item.edge.value: registers[program.results[item.edge.value]] for item in plan.sends}
        self._p2p.send_activations([sent[item.edge.value] for item in plan.sends])
        loss = self._stage_graph.loss
        own = registers[program.results[loss]] if loss is not None and loss in self._section.ends else None
        return _PendingBackward(received, sent, own)

    def _backward(self, made: _PendingBackward) -> None:
        gradients: dict[ValueRef, Tensor] = {}
        for item, gradient in zip(self._p2p.gradients_in, self._p2p.receive_gradients(), strict=True):
            value = item.edge.value
            gradients[value] = gradients[value] + gradient if value in gradients else gradient
        roots = [(made.sent[value], gradient) for value, gradient in gradients.items()]
        if made.loss is not None:
            roots.append((made.loss, torch.full_like(made.loss, 1 / self.options.microbatches)))
        roots = [(root, gradient) for root, gradient in roots if root.requires_grad]
        if roots:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        back = [tensor for tensor in made.received if tensor.requires_grad]
        self._p2p.send_gradients([torch.zeros_like(each) if each.grad is None else each.grad for each in back])

    def _run(self, program: LocalProgram, segments: Iterable[Segment], registers: list[Any]) -> None:
        resharding = ReshardAfterForward(self._collectives)
        with resharding.hooks() if program.reshards else nullcontext():
            for segment in segments:
                segment.run(registers, self._collectives, resharding)
        for name, value in self._changes.items():
            self.get_buffer(name).copy_(registers[program.results[value]].detach())

    def _filled(self, program: LocalProgram, batch: Batch) -> list[Any]:
        """Registers with what the program reads: parameters, buffers and the batch."""
        registers: list[Any] = [None] * program.registers
        inputs = program.inputs
        for value, name in self._weights.parameters.items():
            parameter: Any = self.get_parameter(name)
            registers[inputs[value]] = parameter.to_local()
        for value, name in self._weights.buffers.items():
            # What the backward keeps must not change when the buffer does.
            buffer = self.get_buffer(name)
            registers[inputs[value]] = buffer.clone() if name in self._changes else buffer
        for each, tensor in zip(self._signature.inputs, self._signature.tensors(batch), strict=True):
            checked = each.check(tensor)
            if each.value in inputs:
                registers[inputs[each.value]] = checked.to(self._collectives.device)
        return registers

    def _sum_tied_gradients(self) -> None:
        """A parameter in several stages has the sum of their gradients in each."""
        for name, stages in self._tied.items():
            parameter: Any = self.get_parameter(name)
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                own = parameter.grad.to_local().contiguous()
                dist.all_reduce(own, group=self.grid.shared[stages])
                parameter.grad.to_local().copy_(own)

    def _copy_from_first(self, name: str, stages: Stages) -> None:
        """The values of a tied parameter are those of the first stage that holds it."""
        parameter: Any = self.get_parameter(name)
        own = parameter.detach().to_local()
        given = own.contiguous()
        dist.broadcast(given, src=self.grid.rank(stages[0]), group=self.grid.shared[stages])
        own.copy_(given)

    def _broadcast_loss(self, total: Tensor) -> Tensor:
        graph = self._stage_graph
        assert graph.loss is not None
        holder = next(s for s, section in enumerate(graph.sections) if graph.loss in section.ends)
        dist.broadcast(total, src=self.grid.first(holder), group=self.grid.world)
        return total.to(self._program.dtypes()[graph.loss])

    def _compare_rng(self) -> None:
        """Looked at once, before the first draw; every process calls it."""
        if not self._rng_compared:
            own = rng_digest(self._collectives.device)
            ends = torch.tensor([own, -own], device=self._collectives.device)
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.grid.world)
            if ends.sum():
                raise PlanError(
                    "the model draws at random, but the processes' generators differ: seed torch alike on all"
                )
            self._rng_compared = True
