"""What is kept of a trial on the way, so that it goes on elsewhere to the same bits: safetensors and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import CheckpointError
from weft.runs import Checkpoints
from weft.runs.files import plain

_WEIGHT, _STATE, _LOSSES = "weights.", "optimizer.", "losses"


@dataclass(frozen=True, slots=True)
class Kept:
    """A trial after ``step`` steps. ``values`` are there once it is done, and the optimizer's state until then."""

    step: int
    weights: Mapping[str, Tensor]
    """Parameters and buffers by name, as ``state_dict`` has them."""
    states: Mapping[str, Mapping[str, Tensor]]
    """The optimizer's, by the name of the parameter."""
    losses: Tensor
    """Of the steps so far."""
    values: tuple[float, ...] | None = None


def keep(directory: Path, law: Mapping[str, Any], kept: Kept) -> None:
    """Writes a checkpoint, whole or not at all. ``law`` is what must be equal where it is to be taken up again."""
    tensors = {f"{_WEIGHT}{name}": tensor for name, tensor in kept.weights.items()}
    for name, state in kept.states.items():
        tensors |= {f"{_STATE}{name}#{key}": tensor for key, tensor in state.items()}
    tensors[_LOSSES] = kept.losses
    values = None if kept.values is None else [float(value).hex() for value in kept.values]
    Checkpoints(directory, keep=2).save(kept.step, tensors, {"law": law, "values": values})


def newest(directory: Path, law: Mapping[str, Any]) -> Kept | None:
    """The newest whole checkpoint of this trial; None where there is none, or only ones of another law."""
    checkpoints = Checkpoints(directory, keep=2)
    try:
        if not checkpoints.steps():
            return None
        found = checkpoints.load()
    except CheckpointError:
        return None  # all are damaged: the trial begins anew
    if found.meta.get("law") != plain(law):
        return None
    weights: dict[str, Tensor] = {}
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in found.tensors.items():
        if name.startswith(_WEIGHT):
            weights[name.removeprefix(_WEIGHT)] = tensor
        elif name.startswith(_STATE):
            parameter, _, key = name.removeprefix(_STATE).rpartition("#")
            states.setdefault(parameter, {})[key] = tensor
    losses = found.tensors.get(_LOSSES, torch.empty(0))
    values = found.meta.get("values")
    done = None if values is None else tuple(float.fromhex(value) for value in values)
    return Kept(found.step, weights, states, losses, done)
