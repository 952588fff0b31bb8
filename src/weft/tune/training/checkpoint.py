"""Checkpoints of a trial, from which it goes on elsewhere to the same bits: safetensors and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import CheckpointError
from weft.nn.state import from_plain, to_plain
from weft.runs import Checkpoints
from weft.utils.files import to_json

_WEIGHT, _BUFFER, _STATE, _LOSSES = "weights.", "buffers.", "optimizer.", "losses"
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TrialCheckpoint:
    """A trial after ``step`` steps. ``values`` are there once it is done, and the optimizer's state until then."""

    step: int
    weights: Mapping[str, Any]
    """Parameters, buffers and extra states by name, as ``state_dict`` has them."""
    states: Mapping[str, Mapping[str, Tensor]]
    """The optimizer's, by the name of the parameter."""
    losses: Tensor
    """Of the steps so far."""
    values: tuple[float, ...] | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """Those that training changed and ``state_dict`` leaves out."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Those of the model's parts that training changed."""


def save(directory: Path, contract: Mapping[str, Any], checkpoint: TrialCheckpoint) -> None:
    """Writes a checkpoint, whole or not at all. ``contract`` is what must be equal where a trial resumes from it.

    CheckpointError names an extra state that is not of plain values and tensors.
    """
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in checkpoint.weights.items():
        if isinstance(value, Tensor):
            tensors[f"{_WEIGHT}{name}"] = value
            continue
        try:
            extra[name] = to_plain(value, tensors, f"extra.{name}")
        except CheckpointError as problem:
            raise CheckpointError(f"'{name}' of the model's state_dict: {problem}") from None
    tensors |= {f"{_BUFFER}{name}": tensor for name, tensor in checkpoint.buffers.items()}
    attributes = {name: to_plain(value, tensors, f"attributes.{name}") for name, value in checkpoint.attributes.items()}
    for name, state in checkpoint.states.items():
        tensors |= {f"{_STATE}{name}#{key}": tensor for key, tensor in state.items()}
    tensors[_LOSSES] = checkpoint.losses
    values = None if checkpoint.values is None else [float(value).hex() for value in checkpoint.values]
    tensors, pairs = _complex_as_pairs(tensors)
    optional = {"extra": extra, "attributes": attributes, "complex": pairs}
    beyond = {name: values for name, values in optional.items() if values}
    checkpoints = Checkpoints(directory, keep=2)
    checkpoints.drop_after(checkpoint.step - 1)  # of an earlier attempt, damaged or of another contract
    checkpoints.save(checkpoint.step, tensors, {"law": contract, "values": values, **beyond})


def load_latest(directory: Path, contract: Mapping[str, Any], device: torch.device = _CPU) -> TrialCheckpoint | None:
    """The newest whole checkpoint of this trial; None where there is none, or only ones of another contract.

    Tensors are on the host, but for those in attributes that lay on the ``device``.
    """
    checkpoints = Checkpoints(directory, keep=2)
    try:
        if not checkpoints.steps():
            return None
        found = checkpoints.load()
    except CheckpointError:
        return None  # all are damaged: the trial begins anew
    if found.meta.get("law") != to_json(contract):
        return None
    tensors = {
        name: torch.view_as_complex(tensor) if name in found.meta.get("complex", {}) else tensor
        for name, tensor in found.tensors.items()
    }
    given = found.meta.get("extra", {})
    weights: dict[str, Any] = {name: from_plain(value, tensors, _CPU) for name, value in given.items()}
    plain = found.meta.get("attributes", {})
    attributes = {name: from_plain(value, tensors, device) for name, value in plain.items()}
    buffers: dict[str, Tensor] = {}
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(_WEIGHT):
            weights[name.removeprefix(_WEIGHT)] = tensor
        elif name.startswith(_BUFFER):
            buffers[name.removeprefix(_BUFFER)] = tensor
        elif name.startswith(_STATE):
            parameter, _, key = name.removeprefix(_STATE).rpartition("#")
            states.setdefault(parameter, {})[key] = tensor
    losses = tensors.get(_LOSSES, torch.empty(0))
    values = found.meta.get("values")
    done = None if values is None else tuple(float.fromhex(value) for value in values)
    return TrialCheckpoint(found.step, weights, states, losses, done, buffers, attributes)


def _complex_as_pairs(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors with complex ones as pairs of real numbers, since safetensors has no others, and what those were."""
    pairs = {
        name: str(tensor.dtype).removeprefix("torch.")
        for name, tensor in tensors.items()
        if tensor.is_complex() and tensor.layout == torch.strided and not tensor.is_meta
    }
    real = {
        name: torch.view_as_real(tensor.detach().resolve_conj()) if name in pairs else tensor
        for name, tensor in tensors.items()
    }
    return real, pairs
