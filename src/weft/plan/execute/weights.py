"""The tensors of a model on a mesh: parameters as DTensors, stored as a strategy says, and buffers whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.export import ExportedProgram

from weft.errors import PlanError
from weft.plan.capture import Captured
from weft.plan.execute.passage import passage
from weft.plan.execute.reading import Reading, Value
from weft.plan.execute.wire import Wire
from weft.plan.layout import PARTIAL, REPLICATED, Layout, Mesh
from weft.plan.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Weights:
    """The names of the tensors that a program reads, and how each lies."""

    parameters: Mapping[Value, str]
    buffers: Mapping[Value, str]
    layouts: Mapping[Value, Layout]


def settle(
    module: nn.Module,
    reading: Reading,
    strategy: Strategy,
    mesh: DeviceMesh,
    device: torch.device,
    given: nn.Module | Mapping[str, Tensor] | None,
    only: Collection[int] | None = None,
) -> Weights:
    """Registers the model's tensors on a module under their own names, with the values of the mesh's first process.

    A parameter with two names is stored once, as the first of its operators says. With ``only``, the tensors at these
    places of the graph alone are registered.
    """
    captured = reading.captured
    found = _values(captured, given)
    whole: Layout = (REPLICATED,) * len(strategy.mesh.sizes)
    owner_of = owners(reading, given)
    made: dict[Value, nn.Parameter] = {}
    parameters: dict[Value, str] = {}
    layouts: dict[Value, Layout] = {}
    for node, name in captured.parameters.items():
        used = captured.tied.get(node, node)
        value = reading.value(used)
        if only is not None and value.source not in only:
            continue
        owner = owner_of[value]
        laid = strategy.result(captured.graph, owner.source)
        if owner not in made:
            trained = captured.graph.operators[owner.source].outputs[0].gradient
            made[owner] = _parameter(_found(found, captured.parameters[used]), mesh, device, laid, trained)
        _place(module, name, made[owner])
        parameters[value], layouts[value] = name, laid
    buffers: dict[Value, str] = {}
    kept = persistent(captured)
    for node, name in captured.buffers.items():
        value = reading.value(node)
        if only is not None and value.source not in only:
            continue
        _place(module, name, _spread(_found(found, name), mesh, device), name in kept)
        buffers[value], layouts[value] = name, whole
    for number, (node, constant) in enumerate(captured.constants.items()):
        value = reading.value(node)
        if only is not None and value.source not in only:
            continue
        _place(module, f"_constant_{number}", _spread(constant, mesh, device), False)
        buffers[value], layouts[value] = f"_constant_{number}", whole
    return Weights(parameters, buffers, layouts)


def owners(reading: Reading, given: nn.Module | Mapping[str, Tensor] | None) -> dict[Value, Value]:
    """For each parameter of the program the one that it is stored as: the first that shares its memory."""
    captured = reading.captured
    found = _values(captured, given)
    first: dict[tuple[int, tuple[int, ...]], Value] = {}
    out: dict[Value, Value] = {}
    for node in captured.parameters:
        used = captured.tied.get(node, node)
        value = reading.value(used)
        out[value] = first.setdefault(_identity(_found(found, captured.parameters[used])), value)
    return out


def placements(laid: Layout) -> list[Placement]:
    """A layout in DTensor's words."""
    return [Partial() if place == PARTIAL else Replicate() if place == REPLICATED else Shard(place) for place in laid]


def gathered(value: Tensor, wire: Wire) -> Tensor:
    """A tensor that may be a DTensor, whole on every process of a mesh; all of them must call it."""
    if not isinstance(value, DTensor):
        return value
    held = tuple(each.dim if isinstance(each, Shard) else REPLICATED for each in value.placements)
    return wire.carry(value.to_local(), passage(held, (REPLICATED,) * len(wire.sizes), Mesh(wire.sizes)))


def _identity(source: Tensor) -> tuple[int, tuple[int, ...]]:
    return source.data_ptr() if source.numel() else id(source), tuple(source.shape)


def _parameter(source: Tensor, mesh: DeviceMesh, device: torch.device, laid: Layout, trained: bool) -> nn.Parameter:
    spread = distribute_tensor(source.detach().to(device), mesh, placements(laid))
    # A copy: where nothing is cut, it would be the model's own memory.
    own = DTensor.from_local(spread.to_local().clone(), mesh, placements(laid), run_check=False)
    return nn.Parameter(own, requires_grad=trained)


def _spread(source: Tensor, mesh: DeviceMesh, device: torch.device) -> Tensor:
    spread = distribute_tensor(source.detach().to(device), mesh, placements((REPLICATED,) * mesh.ndim))
    return spread.to_local().clone()


def _values(captured: Captured, given: nn.Module | Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    if isinstance(given, nn.Module):
        named = (*given.named_parameters(remove_duplicate=False), *given.named_buffers(remove_duplicate=False))
        return dict(named)
    program = captured.program
    held = {**program.constants, **program.state_dict} if isinstance(program, ExportedProgram) else {}
    return {**held, **(given or {})}


def _found(values: Mapping[str, Tensor], name: str) -> Tensor:
    found = values.get(name)
    if not isinstance(found, Tensor) or found.is_meta:
        raise PlanError(f"the model was captured without data, so '{name}' has no value: pass weights=model with data")
    return found


def persistent(captured: Captured) -> frozenset[str]:
    """The buffers that belong to the model's state."""
    if isinstance(captured.program, ExportedProgram):
        return frozenset(captured.program.state_dict)
    return frozenset(captured.buffers.values())


def _place(root: nn.Module, path: str, value: Tensor, persistent: bool = True) -> None:
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
