"""Pretrained weights into a supernet, by global name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from weft.errors import CheckpointError
from weft.pipeline.weights import MARKS
from weft.runs import Checkpoints, Run
from weft.supernet import Chain

log = logging.getLogger("weft.pipeline")


def load_initial(chain: Chain, source: Any, partial: bool = False) -> None:
    """Copies weights from a state dict, a safetensors file, a run (or its directory) or a Chain into the chain, in
    place.

    Names that the chain does not have are left out and counted in the log; a shape that differs, or nothing that fits,
    is a CheckpointError. Of a chain that is built in ``partial``, as on a stage, it may be that nothing fits.
    """
    if source is None:
        return
    found = dict(_weights(source))
    for tie in chain.ties:  # one value for both, also where only one of them is given or lies on this stage
        value = found.get(str(tie.first), found.get(str(tie.second)))
        if value is not None:
            found |= {str(place): value for place in tie}
    own = chain.state_dict()
    common = [name for name in own if name in found]
    if not common and not partial:
        raise CheckpointError(
            f"none of the {len(found)} weights fits the supernet: it has names such as '{next(iter(own), '')}'"
        )
    for name in common:
        if own[name].shape != found[name].shape:
            raise CheckpointError(
                f"'{name}' has shape {tuple(found[name].shape)}, but the supernet has {tuple(own[name].shape)}"
            )
    with torch.no_grad():
        for name in common:
            own[name].copy_(found[name])
    log.info(
        "initialised %d of %d tensors; %d others were given and not used",
        len(common),
        len(own),
        len(found) - len(common),
    )


def _weights(source: Any) -> Mapping[str, Tensor]:
    if isinstance(source, Chain):
        return source.state_dict()
    if isinstance(source, Mapping):
        return source
    if isinstance(source, Run):
        return run_weights(source.checkpoints)
    path = Path(source)
    if path.is_dir():
        return run_weights(Run.open(path).checkpoints)
    if not path.is_file():
        raise CheckpointError(f"init: '{path}' is neither a run nor a safetensors file")
    try:
        return load_file(str(path))
    except Exception as problem:
        raise CheckpointError(f"init: '{path}' cannot be read as safetensors: {problem}") from problem


def run_weights(checkpoints: Checkpoints, step: int | None = None) -> dict[str, Tensor]:
    """The newest weights and buffers in a checkpoint, without optimizer state, older versions or gradients."""
    loaded = checkpoints.load(step, only=lambda name: not set(MARKS) & set(name))
    return dict(loaded.tensors)
