"""A layer's weights and optimizer state as one block of bytes, so that a layer moves by one copy each way.

| weights | optimizer state | casts | backups |
  copied, once it exists     on the device only, under ``bounded``: see ``InPlaceWeights``
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.optimizer import LayerOptimizer
from weft.engine.weight_versions import VersionedLayer
from weft.errors import TrainError
from weft.offload.config import OffloadConfig
from weft.utils.units import format_bytes

ALIGNMENT = 512
"""Bytes. torch's own memory begins at such addresses, and kernels choose by where a tensor begins."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    itemsize: int

    def view(self, memory: Tensor) -> Tensor:
        """The tensor in a block's memory of bytes."""
        typed = memory.view(self.dtype)
        start = typed.storage_offset() + self.offset // self.itemsize
        return typed.as_strided(self.size, self.stride, start)

    def trainable_view(self, memory: Tensor) -> Tensor:
        """As ``view``, but with a version counter of its own: views of one memory share theirs, and autograd would
        take a change of one for a mistake in all."""
        return self.view(memory).data.requires_grad_()


@dataclass(slots=True)
class BlockLayout:
    weights: list[TensorSlot] = field(default_factory=list)
    """Of every parameter of the module, whether it trains or not."""
    states: list[dict[str, TensorSlot]] = field(default_factory=list)
    """Of every parameter, by the optimizer's key."""
    casts: list[TensorSlot | None] = field(default_factory=list)
    backups: list[TensorSlot | None] = field(default_factory=list)
    weight_bytes: int = 0
    copied_bytes: int = 0
    """Weights and state."""
    bytes: int = 0


def make_layout(weights: VersionedLayer, optimizer: LayerOptimizer | None, states: dict[Any, Any]) -> BlockLayout:
    """The layout of a layer; ``states`` caches the state tensors of optimizers, which are found by trial updates."""
    layout, end = BlockLayout(), 0

    def place(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> TensorSlot:
        nonlocal end
        slot = TensorSlot(end, size, stride, dtype, dtype.itemsize)
        end += aligned(size.numel() * dtype.itemsize)
        return slot

    parameters = list(weights.module.parameters())
    layout.weights = [place(p.shape, dense_stride(p), p.dtype) for p in parameters]
    layout.weight_bytes = end
    trained = {id(p) for p in weights.parameters}
    for p in parameters:
        state = _state_tensors(optimizer, p, states) if optimizer is not None and id(p) in trained else {}
        layout.states.append({key: place(*shape) for key, shape in state.items()})
    layout.copied_bytes = end
    inplace = weights.inplace
    if inplace is not None:
        for p, cast in zip(weights.parameters, inplace.cast, strict=True):
            layout.casts.append(place(p.shape, dense_stride(p), inplace.compute or p.dtype) if cast else None)
            layout.backups.append(None if cast else place(p.shape, dense_stride(p), p.dtype))
    layout.bytes = end
    return layout


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a copy of the tensor that has no gaps and keeps the order of its dimensions."""
    return torch.empty_like(tensor, device="meta").stride()


def copy_into(tensors: Sequence[Tensor], slots: Sequence[TensorSlot], memory: Tensor) -> None:
    for tensor, slot in zip(tensors, slots, strict=True):
        slot.view(memory).copy_(tensor.detach())


def _state_tensors(
    layer_optimizer: LayerOptimizer, parameter: nn.Parameter, known: dict[Any, Any]
) -> dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    """The tensors that an optimizer will keep for a parameter, found by an update of another one of its shape."""
    optimizer, index = layer_optimizer.optimizer(parameter)
    group = optimizer.param_groups[index]
    key = (id(optimizer), index, parameter.shape, dense_stride(parameter), parameter.dtype)
    if key not in known:
        state = optimizer.state.get(parameter) or _trial_update(optimizer, group, parameter)
        # Optimizers that are neither fused nor capturable keep single numbers, such as a count of steps, on the host.
        known[key] = {
            name: (value.shape, dense_stride(value), value.dtype)
            for name, value in state.items()
            if isinstance(value, Tensor) and (value.dim() or group.get("fused") or group.get("capturable"))
        }
    shapes: dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]] = known[key]
    return shapes


def _trial_update(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> Mapping[str, Any]:
    trial: Any = copy.copy(optimizer)
    for name, value in vars(optimizer).items():  # a copy has the state alone, and a step may read more
        vars(trial).setdefault(name, value)
    stand_in = nn.Parameter(torch.zeros_like(parameter, device="cpu"))
    stand_in.grad = torch.zeros_like(stand_in)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [stand_in]}]
    try:
        trial.step()
    except Exception as problem:
        raise TrainError(
            f"offloading must know what {type(optimizer).__name__} keeps of a parameter, and a trial update fails: "
            f"{problem}. Train without offloading, or with another optimizer"
        ) from problem
    state: Mapping[str, Any] = trial.state[stand_in]
    return state


# The least budget, found before anything is allocated.


def bytes_needed(layout: BlockLayout, weights: VersionedLayer) -> int:
    """What a micro-batch that uses a layer may need: the layer, the version that it sees, and room for another."""
    if weights.single_copy:
        return layout.bytes
    return layout.bytes + layout.weight_bytes + (layout.weight_bytes if weights.inplace else layout.copied_bytes)


def least_budget(sizes: Mapping[str, int], routes: Iterable[Sequence[str]], reserve: int, config: OffloadConfig) -> int:
    """The least budget in bytes with which every route fits; refused where that of ``config`` is less."""
    layers = max((sum(sizes.get(name, 0) for name in dict.fromkeys(names)) for names in routes), default=0)
    least = reserve + layers
    if least > config.bytes:
        name, largest = max(sizes.items(), key=lambda pair: pair[1])
        alone = f": layer '{name}' alone needs {format_bytes(largest)}" if largest > config.bytes else ""
        raise TrainError(
            f"offload.budget = {format_bytes(config.bytes)} cannot hold the layers of one micro-batch{alone}. "
            f"The least that would do is {least} bytes ({format_bytes(least)})"
        )
    return least


def largest_per_block(weights: Mapping[str, VersionedLayer], sizes: Mapping[str, int]) -> list[str]:
    """The largest layer of every block."""
    largest: dict[int, str] = {}
    for name, layer in weights.items():
        other = largest.get(layer.layer.block)
        if other is None or sizes[name] > sizes[other]:
            largest[layer.layer.block] = name
    return list(largest.values())
