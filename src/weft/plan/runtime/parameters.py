"""The tensors of a model on a mesh: parameters as DTensors, stored as a strategy says, and buffers whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from weft.errors import PlanError
from weft.plan.runtime.lowering import Instruction, LocalProgram, Redistribute
from weft.plan.runtime.program import CapturedProgram, ValueRef
from weft.plan.runtime.redistribute import MeshCollectives
from weft.plan.sharding import REPLICATED, Placements, ShardingStrategy


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The names of the tensors that a program reads, and how each lies."""

    parameters: Mapping[ValueRef, str]
    buffers: Mapping[ValueRef, str]
    placements: Mapping[ValueRef, Placements]


def register_tensors(
    module: nn.Module,
    program: CapturedProgram,
    strategy: ShardingStrategy,
    mesh: DeviceMesh,
    device: torch.device,
    model: nn.Module,
    only: Collection[int],
) -> ModelTensors:
    """Registers the tensors of a model that belong to these operators on a module, under their own names, with the
    values of the mesh's first process.

    A parameter with two names is stored once, as the first of its operators says.
    """
    captured = program.captured
    found = _values(model)
    whole: Placements = (REPLICATED,) * len(strategy.mesh.sizes)
    owner_of = storage_owners(program, model)
    made: dict[ValueRef, nn.Parameter] = {}
    parameters: dict[ValueRef, str] = {}
    placements_of: dict[ValueRef, Placements] = {}
    for node, name in captured.parameters.items():
        used = captured.tied.get(node, node)
        value = program.value(used)
        if value.source not in only:
            continue
        owner = owner_of[value]
        placements = strategy.result(captured.graph, owner.source)
        if owner not in made:
            trained = captured.graph.operators[owner.source].outputs[0].gradient
            spread = _spread(_found(found, captured.parameters[used]), mesh, device, placements)
            # A copy: where nothing is cut, it would be the model's own memory.
            own = DTensor.from_local(spread.to_local().clone(), mesh, spread.placements, run_check=False)
            made[owner] = nn.Parameter(own, requires_grad=trained)
        _register(module, name, made[owner])
        parameters[value], placements_of[value] = name, placements
    buffers: dict[ValueRef, str] = {}
    kept = captured.program.state_dict
    constants = {node: f"_constant_{number}" for number, node in enumerate(captured.constants)}
    for node, name in {**captured.buffers, **constants}.items():
        value = program.value(node)
        if value.source not in only:
            continue
        source = captured.constants[node] if node in constants else _found(found, name)
        _register(module, name, _spread(source, mesh, device, whole).to_local().clone(), name in kept)
        buffers[value], placements_of[value] = name, whole
    return ModelTensors(parameters, buffers, placements_of)


def storage_owners(program: CapturedProgram, model: nn.Module) -> dict[ValueRef, ValueRef]:
    """For each parameter of the program the one that it is stored as: the first that shares its memory."""
    captured = program.captured
    found = _values(model)
    first: dict[tuple[int, tuple[int, ...]], ValueRef] = {}
    out: dict[ValueRef, ValueRef] = {}
    for node in captured.parameters:
        used = captured.tied.get(node, node)
        value, source = program.value(used), _found(found, captured.parameters[used])
        memory = source.data_ptr() if source.numel() else id(source), tuple(source.shape)
        out[value] = first.setdefault(memory, value)
    return out


def _spread(source: Tensor, mesh: DeviceMesh, device: torch.device, placements: Placements) -> DTensor:
    spelled = [Replicate() if each == REPLICATED else Shard(each) for each in placements]
    return distribute_tensor(source.detach().to(device), mesh, spelled)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _found(values: Mapping[str, Tensor], name: str) -> Tensor:
    found = values.get(name)
    if not isinstance(found, Tensor) or found.is_meta:
        raise PlanError(f"'{name}' has no value: give a model like the planned one, with data")
    return found


def _register(root: nn.Module, path: str, value: Tensor, persistent: bool = True) -> None:
    """Registers a parameter or buffer under a dotted name."""
    *folders, name = path.split(".")
    for folder in folders:
        if folder not in root._modules:
            root.add_module(folder, nn.Module())
        root = root.get_submodule(folder)
    if isinstance(value, nn.Parameter):
        root.register_parameter(name, value)
    else:
        root.register_buffer(name, value, persistent=persistent)


@dataclass(frozen=True, slots=True)
class DeferredGradSync:
    """Gradients of parameters that travel once a step: summed over the micro-batches where they come out, then moved.

    This is for redistributions that move nothing forward, such as that of a parameter that is whole on every device
    and whose gradients come out as partial sums. What is gathered forward is given back for each micro-batch, since its
    sum would take as much memory as the whole. ``instructions`` have the names of their parameters; during a step the
    object holds what their targets hold.
    """

    instructions: tuple[tuple[Redistribute, str], ...]
    _held: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, program: LocalProgram, names: Mapping[int, str]) -> DeferredGradSync:
        """``names``: the register of a parameter -> its name."""
        found = [
            step
            for step in program.instructions
            if isinstance(step, Redistribute) and step.source in names and not step.steps
        ]
        return cls(tuple((step, names[step.source]) for step in found))

    def others(self, program: LocalProgram) -> tuple[Instruction, ...]:
        """The instructions that each micro-batch runs."""
        ours = {id(step) for step, _ in self.instructions}
        return tuple(step for step in program.instructions if id(step) not in ours)

    def begin(self, module: nn.Module) -> None:
        """The parameters as they are in this step."""
        for step, name in self.instructions:
            parameter: Any = module.get_parameter(name)
            for target in step.targets:
                self._held[target] = parameter.to_local().detach().requires_grad_(parameter.requires_grad)

    def fill(self, registers: list[Any]) -> None:
        for target, value in self._held.items():
            registers[target] = value

    def end(self, module: nn.Module, collectives: MeshCollectives, mesh: DeviceMesh) -> None:
        """Moves the sums to where the parameters are stored, and adds them to what the parameters have."""
        for step, name in self.instructions:
            parameter: Any = module.get_parameter(name)
            total = None if parameter.grad is None else parameter.grad.to_local()
            for target, grad_steps in zip(step.targets, step.grad_steps, strict=True):
                gradient = self._held[target].grad
                if gradient is not None:
                    gradient = collectives.move(gradient, grad_steps)
                    total = gradient if total is None else total + gradient
            if total is not None:
                parameter.grad = DTensor.from_local(total, mesh, parameter.placements, run_check=False)
        self._held.clear()
