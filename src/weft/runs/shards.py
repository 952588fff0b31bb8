"""One safetensors file of a checkpoint: written tensor by tensor and hashed on the way, read layer by layer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import CheckpointError
from weft.utils.files import replacing, sha256_file

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """What a checkpoint's manifest says of one shard: enough to know whether it is whole and what it holds."""

    file: str
    bytes: int
    sha256: str
    layers: Mapping[str, tuple[str, ...]]
    """The names of the tensors by layer."""

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> ShardEntry:
        layers = {name: tuple(names) for name, names in saved["layers"].items()}
        return cls(saved["file"], saved["bytes"], saved["sha256"], layers)

    @property
    def names(self) -> list[str]:
        return [name for names in self.layers.values() for name in names]


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to.

    >>> layer_of("block0.conv3.weight#exp_avg"), layer_of("scale")
    ('block0.conv3', 'scale')
    """
    base = name.partition("#")[0]
    return base.rpartition(".")[0] or base


def write(path: Path, tensors: Mapping[str, Tensor]) -> ShardEntry:
    """Write and sync one shard; at most one tensor is copied to the host at a time. No file is left by a failure."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"a checkpoint cannot hold '{name}', a {type(tensor).__name__}: it takes tensors")
    # Wide types first, as safetensors does, so that every tensor is aligned; then by name, so that order is no matter.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {}
    size = 0
    for name in names:
        tensor = tensors[name]
        if name == "__metadata__" or tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"a checkpoint cannot hold tensor '{name}' ({tensor.dtype}, {tensor.layout}, {tensor.device}): "
                "it takes dense tensors of real numbers on a device, and no tensor called '__metadata__'"
            )
        end = size + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [size, end]}
        size = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(start)
    with replacing(path, len(start) + size) as file:
        file.write(start)
        for name in names:
            raw = _bytes(tensors[name])
            file.write(raw)
            digest.update(raw)
    layers: dict[str, tuple[str, ...]] = {}
    for name in sorted(tensors):
        layers[layer_of(name)] = (*layers.get(layer_of(name), ()), name)
    return ShardEntry(path.name, len(start) + size, digest.hexdigest(), layers)


def check(path: Path, entry: ShardEntry, content: bool) -> None:
    """`CheckpointError` unless the file is there in full and, with `content`, has the hash that the entry says."""
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(f"shard '{path.name}' has {size} bytes instead of {entry.bytes}")
        if content and sha256_file(path) != entry.sha256:
            raise CheckpointError(f"shard '{path.name}' has other content than was saved (SHA-256 differs)")
    except OSError as error:
        raise CheckpointError(f"shard '{path.name}' cannot be read ({error.strerror})") from error


def read(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """These tensors on the CPU, as copies: a mapped file may be unaligned, and may change under us."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name).clone() for name in names}
    except (SafetensorError, OSError, RuntimeError) as error:  # the last where torch cannot map the file
        raise CheckpointError(f"shard '{path.name}' cannot be read ({error})") from error


def _bytes(tensor: Tensor) -> memoryview:
    dense = tensor.detach().resolve_neg().cpu().contiguous()
    # One element counts as contiguous with any stride, but can be viewed as bytes with stride 1 alone.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data
