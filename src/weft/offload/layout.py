"""A layer's weights and optimizer state as one block of bytes, so that a layer moves by one copy each way.

| weights | optimizer state | casts | aside |
  moves, once it is there     on the device only, under ``bounded``: see ``inplace``
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.optimizer import LayerOptimizer
from weft.engine.weight_versions import VersionedLayer
from weft.errors import TrainError

ALIGNED = 512
"""Bytes. torch's own memory begins at such addresses, and kernels choose by where a tensor begins."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor's place in its block."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    width: int
    """Bytes of an element."""

    def view(self, memory: Tensor) -> Tensor:
        """The tensor in a block's memory of bytes."""
        typed = memory.view(self.dtype)
        at = typed.storage_offset() + self.offset // self.width
        return typed.as_strided(self.size, self.stride, at)

    def own(self, memory: Tensor) -> Tensor:
        """As ``view``, for autograd: views count changes together with all that lies in the same memory, which it would
        take for mistakes."""
        return self.view(memory).data.requires_grad_()


@dataclass(slots=True)
class BlockLayout:
    """Where everything of a layer lies in its block."""

    weights: list[Part] = field(default_factory=list)
    """Of every parameter of the module, whether it trains or not."""
    states: list[dict[str, Part]] = field(default_factory=list)
    """Of every parameter, by the optimizer's key."""
    casts: list[Part | None] = field(default_factory=list)
    asides: list[Part | None] = field(default_factory=list)
    weight_bytes: int = 0
    moved_bytes: int = 0
    """Weights and state."""
    bytes: int = 0


def layout_of(weights: VersionedLayer, updater: LayerOptimizer | None, states: dict[Any, Any]) -> BlockLayout:
    """The layout of a layer; ``states`` keeps what is known of the optimizers' states, which are tried out."""
    made, at = BlockLayout(), 0

    def place(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Part:
        nonlocal at
        part = Part(at, size, stride, dtype, dtype.itemsize)
        at += aligned(size.numel() * dtype.itemsize)
        return part

    parameters = list(weights.module.parameters())
    made.weights = [place(p.shape, dense(p), p.dtype) for p in parameters]
    made.weight_bytes = at
    trained = {id(p) for p in weights.parameters}
    for p in parameters:
        known = _state(updater, p, states) if updater is not None and id(p) in trained else {}
        made.states.append({key: place(*told) for key, told in known.items()})
    made.moved_bytes = at
    inplace = weights.inplace
    if inplace is not None:
        for p, cast in zip(weights.parameters, inplace.cast, strict=True):
            made.casts.append(place(p.shape, dense(p), inplace.compute or p.dtype) if cast else None)
            made.asides.append(None if cast else place(p.shape, dense(p), p.dtype))
    made.bytes = at
    return made


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def dense(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a copy of the tensor that has no gaps and keeps the order of its dimensions."""
    return torch.empty_like(tensor, device="meta").stride()


def _state(
    updater: LayerOptimizer, parameter: nn.Parameter, known: dict[Any, Any]
) -> dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    """The tensors that an optimizer will keep for a parameter, found by an update of another one of its shape."""
    optimizer, index = updater.optimizer(parameter)
    group = optimizer.param_groups[index]
    key = (id(optimizer), index, parameter.shape, dense(parameter), parameter.dtype)
    if key not in known:
        known[key] = {
            name: (value.shape, dense(value), value.dtype)
            for name, value in (optimizer.state.get(parameter) or _tried(optimizer, group, parameter)).items()
            if isinstance(value, Tensor) and (value.dim() or group.get("fused") or group.get("capturable"))
        }  # else optimizers keep single numbers, such as the count of their steps, on the host
    found: dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]] = known[key]
    return found


def _tried(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: nn.Parameter) -> Mapping[str, Any]:
    trial: Any = copy.copy(optimizer)
    other = nn.Parameter(torch.zeros_like(parameter, device="cpu"))
    other.grad = torch.zeros_like(other)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [other]}]
    try:
        trial.step()
    except Exception as problem:
        raise TrainError(
            f"residency must know what {type(optimizer).__name__} keeps of a parameter, and a trial update fails: "
            f"{problem}. Train without residency, or with another optimizer"
        ) from problem
    found: Mapping[str, Any] = trial.state[other]
    return found


def copied(tensors: Sequence[Tensor], parts: Sequence[Part], memory: Tensor) -> None:
    """Puts the values of tensors into a block."""
    for tensor, part in zip(tensors, parts, strict=True):
        part.view(memory).copy_(tensor.detach())
