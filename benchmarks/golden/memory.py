"""Estimates of a training step on a GPU: bytes by phase and part, seconds, other batches, the largest batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import weft
from benchmarks.golden.adapter import call, first
from benchmarks.golden.models import PLAIN
from benchmarks.golden.runner import Case

WAYS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": "sgd", "options": {"lr": 0.1, "momentum": 0.9}},
    "bf16": {"dtype": "bfloat16"},
    "recompute": {"recompute": True},
    "accumulate": {"accumulate": 4},
    "expandable": {"expandable": True, "optimizer": "adam"},
    "other gpu": {},
}
DEVICES = ("h100", "a100", "v100")
"""Of which the first that is not the default and is known stands for the others."""


def estimated(kind: str, way: str) -> Any:
    model, batch = PLAIN[kind]()
    if kind == "mixtral":  # its experts are multiplied in 16 bits only
        model = model.bfloat16()
    given = {**WAYS[way], **({"device": other()} if way == "other gpu" else {})}
    return call(weft.estimate, model, batch, **given)


def other() -> str:
    constants = first("weft.hardware.gpus:kernels", "weft.plan.memory.kernels:kernels")
    for name in DEVICES:
        try:
            constants(name)
        except weft.WeftError:
            continue
        return name
    return "h200"


def told(found: Any) -> dict[str, Any]:
    return {
        "batch": found.batch,
        "allocated": found.allocated,
        "reserved": found.reserved,
        "context": found.context,
        "phases": dict(found.phases),
        "parts": dict(found.parts),
        "modules": {name: dict(parts) for name, parts in found.modules.items()},
        "seconds": found.seconds,
    }


def elsewhere(kind: str, way: str) -> dict[str, Any]:
    """At other batch sizes, and the largest that fits."""
    found = estimated(kind, way)
    return {
        **{f"at {size}": told(found.at(size)) for size in (1, 7, 64)},
        **{f"largest in {room}": found.largest_batch(room) for room in ("512MiB", "4GiB")},
        "fits": [found.fits(room) for room in ("100MiB", "2GiB")],
    }


def cases() -> Iterator[Case]:
    def case(kind: str, way: str) -> Any:
        return lambda folder: told(estimated(kind, way))

    def other_sizes(kind: str, way: str) -> Any:
        return lambda folder: elsewhere(kind, way)

    for kind in PLAIN:
        for way in WAYS if kind != "mixtral" else ("bf16",):
            yield f"estimate/{kind}/{way}", case(kind, way)
    for kind in ("mlp", "conv", "encoder", "lstm"):
        for way in ("adamw", "recompute"):
            yield f"sizes/{kind}/{way}", other_sizes(kind, way)
