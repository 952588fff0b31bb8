"""Fronts with inherited weights, what is extracted of them, and every method that learns the architecture."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import weft
from benchmarks.golden import digests
from benchmarks.golden.adapter import search, search_gradient, train
from benchmarks.golden.core import options
from benchmarks.golden.models import NETS
from benchmarks.golden.runner import Case

METHODS = ("darts", "darts2", "drnas", "gdas", "spos", "fairnas", "sandwich")
FRONTS: dict[str, dict[str, Any]] = {
    "nsga2": {"maximize": "accuracy", "minimize": "flops"},
    "random": {"maximize": "accuracy", "minimize": "parameters", "method": "random"},
    "evolution": {"minimize": "loss", "constraints": ["parameters<=9000"]},
    "memory": {"minimize": ("loss", "memory"), "budget": 8},
}


def trained(folder: Path, kind: str = "mlp", **more: Any) -> Any:
    return train(*NETS[kind], name="s", folder=folder, metrics={"accuracy": weft.accuracy}, **options(**more))


def front(run: Any, **given: Any) -> Any:
    return search(run, **{"budget": 20, "seed": 1, **given})


def told(found: Any) -> dict[str, Any]:
    return {"ids": [one.subnet.id for one in found], "scores": [dict(one.scores) for one in found]}


def extracted(folder: Path, kind: str) -> dict[str, Any]:
    """The bytes of a plain module's weights and outputs."""
    run = trained(folder, kind)
    module = front(run).best().extract()
    batch = weft.data.digits().test.take(np.arange(16))
    inputs = batch.get("image", batch.get("tokens", next(iter(batch.values()))))
    with torch.inference_mode():
        outputs = module(inputs)
    return {
        "weights": digests.module(module),
        "outputs": hashlib.sha256(outputs.numpy().tobytes()).hexdigest()[:16],
    }


def gradient_search(method: str, folder: Path, kind: str = "mlp", **more: Any) -> dict[str, Any]:
    found = search_gradient(
        *NETS[kind], method=method, name=f"g-{method}", folder=folder, budget=8, bn_batches=0, **options(**more)
    )
    mixture = found.mixture
    return {
        "fingerprint": found.trained.fingerprint,
        "subnet": found.subnet.id,
        "scores": dict(found.scores),
        "pick": {"missed": "perturbation"}.get(found.pick, found.pick),
        "mixture": None
        if mixture is None
        else {name: [value.hex() for value in mixture[name].tolist()] for name in mixture.names},
    }


def cases() -> Iterator[Case]:
    for name, given in FRONTS.items():
        yield f"front/{name}", lambda folder, given=given: told(front(trained(folder), **given))
    for kind in ("mlp", "conv", "elastic"):
        yield f"extract/{kind}", lambda folder, kind=kind: extracted(folder, kind)
    for method in METHODS:
        yield f"gradient/{method}", lambda folder, method=method: gradient_search(method, folder)
    for kind in ("conv", "elastic", "elastic-gpt"):
        yield f"gradient/drnas/{kind}", lambda folder, kind=kind: gradient_search("drnas", folder, kind)
    yield (
        "gradient/targets",
        lambda folder: gradient_search("drnas", folder, targets="parameters=4800", weight_warmup_steps=4),
    )
