"""The content of a checkpoint, layer by layer: weights, optimizer state, older versions, and gradients that wait.

block0.conv3.weight              the newest weight or buffer
block0.conv3.weight#exp_avg      optimizer state
block0.conv3.weight@12           the version that began with slot 12
block0.conv3.weight+             the ordered sum of the gradients of an unfinished slot
block0.conv3+3.0                 batch statistics of that slot: third micro-batch, first buffer
head.out.weight~12               the sum of the gradients of tied parameters in slot 12, if later updates use it
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.engine.optimizer import LayerOptimizer
from weft.engine.weight_versions import MARKS, PendingGradients, VersionedLayer
from weft.errors import CheckpointError


@dataclass(slots=True)
class CheckpointPart:
    """The layers of a process as they are before micro-batch ``at``: a part of a checkpoint."""

    at: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)


def layer_tensors(weights: VersionedLayer, optimizer: LayerOptimizer) -> dict[str, Tensor]:
    """The newest weights, buffers and optimizer state of a layer, by global name."""
    weights.synchronize()
    weights.to_newest()
    attached = weights.batch_stats.attached
    weights.batch_stats.detach()
    name = weights.layer.name
    tensors = {f"{name}.{path}": tensor for path, tensor in weights.module.state_dict().items()}
    tensors |= {f"{name}.{path}": tensor for path, tensor in weights.volatile().items()}
    if attached:
        weights.batch_stats.attach()
    for path, parameter in zip(weights.names, weights.parameters, strict=True):
        for key, value in optimizer.state(parameter).items():
            tensors[f"{name}.{path}#{key}"] = value
    return tensors


def layer_digest(weights: VersionedLayer, optimizer: LayerOptimizer) -> str:
    """The layer's part of the fingerprint."""
    return tensors_digest(layer_tensors(weights, optimizer))


def capture(weights: VersionedLayer, optimizer: LayerOptimizer, at: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors of a layer for a checkpoint before micro-batch ``at``, and its numbers."""
    tensors = layer_tensors(weights, optimizer)
    name = weights.layer.name
    kept = weights.needed(at)
    for begin in kept:
        for path, tensor in zip(weights.names, weights.kept[begin], strict=True):
            tensors[f"{name}.{path}@{begin}"] = tensor
    numbers: dict[str, Any] = {"newest": weights.newest, "kept": kept, "volatile": sorted(weights.volatile())}
    if weights.pending is not None:
        numbers["pending"] = weights.pending.slot
        numbers["records"] = len(weights.pending.records)
        for path, tensor in zip(weights.names, weights.pending.gradients, strict=True):
            tensors[f"{name}.{path}+"] = tensor
        for number, record in enumerate(weights.pending.records):
            for index, tensor in enumerate(record):
                tensors[f"{name}+{number}.{index}"] = tensor
    return tensors, numbers


def optimizer_states(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The optimizer states in a checkpoint by parameter name, as ``LayerOptimizer.load`` takes them."""
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, mark, key = name.partition("#")
        if mark:
            states.setdefault(parameter, {})[key] = tensor
    return states


def restore(weights: VersionedLayer, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Puts a layer back as ``capture`` found it, but for the optimizer's state."""
    name = weights.layer.name
    device = next((p.device for p in weights.module.parameters()), torch.device("cpu"))
    volatile = set(numbers["volatile"])
    saved = {full.removeprefix(f"{name}."): tensor for full, tensor in tensors.items() if full.startswith(f"{name}.")}
    plain = {path: tensor for path, tensor in saved.items() if not set(MARKS) & set(path) and path not in volatile}
    for path in volatile:
        part, _, label = path.rpartition(".")
        setattr(weights.module.get_submodule(part), label, saved[path].to(device, copy=True))
    try:
        weights.module.load_state_dict(plain)
    except RuntimeError as problem:
        raise CheckpointError(f"the checkpoint does not fit layer '{name}': {' '.join(str(problem).split())}") from None

    def version(mark: str) -> list[Tensor]:
        saved = (tensors[f"{name}.{path}{mark}"] for path in weights.names)
        return [torch.empty_like(p).copy_(tensor) for p, tensor in zip(weights.parameters, saved, strict=True)]

    weights.on_restore()
    weights.newest = int(numbers["newest"])
    weights.kept = {int(begin): [t.requires_grad_() for t in version(f"@{begin}")] for begin in numbers["kept"]}
    weights.pending = None
    if "pending" in numbers:
        count = 2 * len(weights.batch_stats.norms)
        records = [
            [tensors[f"{name}+{number}.{index}"].to(device, copy=True) for index in range(count)]
            for number in range(int(numbers["records"]))
        ]
        weights.pending = PendingGradients(int(numbers["pending"]), version("+"), records)


# Fingerprints: SHA-256 over every weight, every optimizer state and every loss, made of one digest a layer.


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, in order of the names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def fingerprint(layers: Mapping[str, str], losses: str) -> str:
    """The digest of a run, from the digests of its layers, which different processes may have made, and of its
    losses."""
    total = hashlib.sha256(losses.encode())
    for name in sorted(layers):
        total.update(f"\0{name}\0{layers[name]}".encode())
    return total.hexdigest()
