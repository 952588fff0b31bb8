"""Fingerprints: SHA-256 over every weight, every optimizer state and every loss, made of one digest a layer."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class LossDigest:
    """A chain of hashes over the losses in step order; its 64 hex digits are all that a checkpoint needs."""

    def __init__(self, value: str = "0" * 64) -> None:
        self.value = value

    def add(self, losses: Iterable[float]) -> None:
        for loss in losses:
            self.value = hashlib.sha256(bytes.fromhex(self.value) + struct.pack("<d", loss)).hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, in order of the names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def fingerprint(layers: Mapping[str, str], losses: LossDigest) -> str:
    """The digest of a whole run from those of its layers, which different processes may have made."""
    total = hashlib.sha256(losses.value.encode())
    for name in sorted(layers):
        total.update(f"\0{name}\0{layers[name]}".encode())
    return total.hexdigest()
