"""Digests of values, tensors and checkpoints, made here, so that no rename in weft can change them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

VOLATILE = re.compile(
    r"(^|_)(time|times|seconds|second|elapsed|duration|began|started|ended|since|path|root|folder|pid|host|storage|"
    r"created|version|git|revision|tag|size_on_disk|eta|rate|per_second|throughput|command|python|torch|peak|measured)s?$"
)
"""Keys of JSON whose values are times, places or the machine's."""


def sha(value: object) -> str:
    """Of a value as JSON, whose floats are exact."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def tensors(found: Mapping[str, torch.Tensor]) -> str:
    """Of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(found):
        tensor = found[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()[:16]


def module(found: torch.nn.Module) -> str:
    return tensors({n: t for n, t in found.state_dict().items() if isinstance(t, torch.Tensor)})


def safetensors_in(folder: Path) -> dict[str, str]:
    """Of every file of weights under a folder, by its path there."""
    made = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            made[path.relative_to(folder).as_posix()] = tensors({n: file.get_tensor(n) for n in file.keys()})  # noqa: SIM118
    return made


def lasting(value: Any, without: Iterable[str] = ()) -> Any:
    """A JSON value without what differs from run to run: volatile keys, and paths inside of texts."""
    skipped = set(without)
    if isinstance(value, Mapping):
        return {
            str(key): lasting(item, skipped)
            for key, item in value.items()
            if str(key) not in skipped and not VOLATILE.search(str(key))
        }
    if isinstance(value, (list, tuple)):
        return [lasting(item, skipped) for item in value]
    return re.sub(r"(/[\w.+-]+){2,}/?", "PATH", value) if isinstance(value, str) else value


def structure(value: Any) -> Any:
    """The shape of a JSON value: keys, the type at each, and of lists the shapes that occur in them."""
    if isinstance(value, Mapping):
        return {str(key): structure(item) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, (list, tuple)):
        shapes = {json.dumps(structure(item), sort_keys=True) for item in value}
        return [json.loads(shape) for shape in sorted(shapes)]
    return type(value).__name__
