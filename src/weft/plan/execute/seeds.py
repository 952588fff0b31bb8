"""Whether torch's generators are in one state on all processes, as drawing alike needs."""

from __future__ import annotations

import hashlib

import torch

from weft.errors import PlanError
from weft.plan.execute.passage import Kind, Move
from weft.plan.execute.wire import Wire
from weft.plan.layout import REPLICATED


def state_digest(device: torch.device) -> int:
    """A number that tells states of the device's generator apart."""
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest(), "little")


def compare_seeds(wire: Wire) -> None:
    """Raises PlanError where the generators of a mesh's processes differ; all of them must call it."""
    digest = state_digest(wire.device)
    moves = [Move(Kind.ALL_GATHER, axis, 0, REPLICATED) for axis, size in enumerate(wire.sizes) if size > 1]
    refuse_other_seeds(wire.carry(torch.tensor([digest], device=wire.device), moves))


def refuse_other_seeds(digests: torch.Tensor) -> None:
    if not bool((digests == digests[0]).all()):
        raise PlanError("the model draws at random, but the processes' generators differ: seed torch alike on all")
